"""Steps that are measured: probes that differ in one unit each, and the steps that the model predicts. Runs in our side's process.

``check`` returns what the model must know about a step: its time in plain PyTorch, its dense parameters and its rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import stratagem as sg
from benchmarks import models, work
from benchmarks.ours import cluster

PLAIN_S = 0.5  # for the measurement of a step in plain PyTorch
SERIES = 4


def plain_s(model: torch.nn.Module, loss: Callable[..., Any], batches: work.Batches) -> float:
    """Return the processor time of reading a batch, forward and backward in plain PyTorch."""
    parts = tuple(torch.from_numpy(part) for part in batches)
    iterator = iter(sg.data.Dataset.from_tensor_slices(parts).repeat())
    taken = []
    end = time.process_time() + PLAIN_S
    while time.process_time() < end:
        begin = time.process_time()
        for _ in range(SERIES):
            batch, truth = next(iterator)
            model.zero_grad()
            loss(model(batch), truth).backward()
        taken.append((time.process_time() - begin) / SERIES)
    return statistics.median(taken)


class ProbeModel(torch.nn.Module):
    """Dense parameters and a table, with the smallest computation that gives gradients to all."""

    def __init__(self, size: dict[str, Any], *, with_table: bool) -> None:
        super().__init__()
        shapes = [size["tensor_bytes"] // 4] * size["tensors"]
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(n)) for n in shapes)
        self.table = torch.nn.Embedding(size["table"], 16, sparse=True) if with_table else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        total = torch.stack([part.sum() for part in self.parts]).sum()
        return total if self.table is None else total + self.table(ids).sum()


class Head(torch.nn.Module):
    """The layer above the table of the embedding step, with random numbers in place of the rows."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        width = size["columns"] * size["width"]
        self.rows = torch.nn.Parameter(torch.randn(size["batch"], width))
        self.layer = torch.nn.Linear(width, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(self.rows)
        return logits


class Probe(cluster.Training):
    """Steps over some dense parameters and looked-up rows."""

    def partitioner(self) -> Any:
        shards = self.size["servers"]
        return sg.partitioners.MinSizePartitioner(min_shard_bytes=2**24, max_shards=shards)

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        rows = self.size["rows"]
        self.batches = work.embedding_batches(
            {"batches": 16, "batch": max(1, rows), "columns": 1, "rows": self.size["table"]}
        )
        self.loss = lambda total, truth: total
        with self.strategy.scope():
            self.model = ProbeModel(self.size, with_table=rows > 0)
            kind = torch.optim.Adagrad if rows else torch.optim.SGD
            self.optimizer = kind(self.model.parameters(), lr=1e-3)
        return self.make_step()

    def check(self) -> dict[str, Any]:
        # Without the table: its cost per row is what the probe is for.
        model = ProbeModel(self.size, with_table=False)
        return {"plain_s": plain_s(model, self.loss, self.batches)}


class MlpSteps(cluster.Mlp):
    """The MLP of ``make bench``."""

    def check(self) -> dict[str, Any]:
        model = models.Mlp(self.size)
        return {
            "plain_s": plain_s(model, self.loss, self.batches),
            "tensor_bytes": [each.numel() * 4 for each in model.parameters()],
            "rows": 0,
        }


class EmbeddingSteps(cluster.Embedding):
    """The embedding step of ``make bench``."""

    def check(self) -> dict[str, Any]:
        head = Head(self.size)
        return {
            "plain_s": plain_s(head, self.loss, self.batches),
            "tensor_bytes": [each.numel() * 4 for each in head.layer.parameters()],
            "rows": self.size["batch"] * self.size["columns"],
        }
