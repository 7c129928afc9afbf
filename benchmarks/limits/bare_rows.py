"""The embedding step as kernels only: what Stratagem's workers and servers compute, in one process, without Stratagem.

The same kernels in C (`stratagem._ps.row_kernels`) on the same rows, and plain torch for the layer above. What a step of the cluster takes
beyond this is Python, messages and copies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import models, work
from benchmarks.protocol import Work
from stratagem._ps.malloc import keep_freed_memory
from stratagem._ps.row_kernels import TableShards, kernels
from stratagem._wire.shm import zeros_apart


class BareRows(Work):
    """Gather, forward and backward, sort and sum, Adagrad on the rows of each shard."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        if kernels is None:
            raise RuntimeError(
                "the kernels for tables are not built: install Stratagem with a C compiler (pip install .)"
            )
        keep_freed_memory()  # as workers do
        self.kernels = kernels
        self.width, self.done = size["width"], 0
        self.model = models.Table({**size, "rows": 1})
        first = -(-size["rows"] // size["shards"])
        starts = list(range(0, size["rows"], first))
        table = torch.from_numpy(work.embedding_table(size))
        if "start" in size:
            table.fill_(size["start"])
        self.tables = [table[start : start + first].clone() for start in starts]
        self.sums = [zeros_apart(tuple(one.shape), one.dtype) for one in self.tables]
        self.shards = TableShards(self.tables, starts)
        self.edges = torch.tensor([*starts, size["rows"]])
        head = self.model.head
        with torch.no_grad():
            head.weight.copy_(torch.from_numpy(work.embedding_head(size)))
            head.bias.zero_()
        self.optimizer = torch.optim.Adagrad(
            head.parameters(), work.EMBEDDING_LEARNING_RATE, eps=work.EMBEDDING_EPSILON
        )
        self.batches = models.tensors(work.embedding_batches(size))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step(*self.batches[self.done % len(self.batches)])
            self.done += 1

    def step(self, ids: Tensor, labels: Tensor) -> None:
        """Do one step."""
        kernels, optimizer, width = self.kernels, self.optimizer, self.width
        numbers = ids.reshape(-1)
        rows = kernels.take(self.shards, numbers).requires_grad_()
        optimizer.zero_grad()
        logits = self.model.head(rows.view(ids.shape[0], -1))
        F.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
        assert rows.grad is not None
        found = kernels.group(numbers, self.edges)
        assert found is not None
        rate, epsilon = work.EMBEDDING_LEARNING_RATE, work.EMBEDDING_EPSILON
        for shard, size in enumerate(found.bounds[1].tolist()):
            summed, unique = torch.empty(size, width), torch.empty(size, dtype=torch.int64)
            kernels.sum_groups(rows.grad, found, shard, shard + 1, summed, unique)
            kernels.step_adagrad(
                self.tables[shard], self.sums[shard], unique, summed, rate, epsilon
            )
