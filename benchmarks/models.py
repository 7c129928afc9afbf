"""The models of the rows in plain PyTorch: what our side puts under a scope and the limit runs bare.

Imports torch only; knows neither Stratagem nor the harness.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import work


class Mlp(nn.Module):
    """784-256-10 and its like."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.first = nn.Linear(size["inputs"], size["hidden"])
        self.second = nn.Linear(size["hidden"], size["classes"])

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.second(F.relu(self.first(inputs)))
        return logits


class Table(nn.Module):
    """A table of embeddings and a linear layer above it."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(size["rows"], size["width"], sparse=True)
        self.head = nn.Linear(size["columns"] * size["width"], 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(ids).flatten(1))
        return logits


class Many(nn.Module):
    """Many small parameters that make a fixed number of bytes together."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        shapes = work.byte_shapes(size)
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])

    def forward(self) -> Tensor:
        return torch.stack([part.square().sum() for part in self.parts]).sum()


def set_mlp(model: Mlp, size: dict[str, Any]) -> None:
    """Give the model every side's first parameters."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), work.mlp_parameters(size), strict=True):
            parameter.copy_(torch.from_numpy(value))


def set_table(model: Table, size: dict[str, Any]) -> None:
    """Give the table and the layer above it every side's first parameters."""
    with torch.no_grad():
        if "start" in size:
            nn.init.constant_(model.table.weight, size["start"])
        else:
            model.table.weight.copy_(torch.from_numpy(work.embedding_table(size)))
        model.head.weight.copy_(torch.from_numpy(work.embedding_head(size)))
        model.head.bias.zero_()


def tensors(batches: work.Batches) -> list[tuple[Tensor, Tensor]]:
    """Batches as pairs of tensors."""
    inputs, labels = (torch.from_numpy(part) for part in batches)
    return list(zip(inputs.unbind(), labels.unbind(), strict=True))


@torch.no_grad()
def mean_loss(model: nn.Module, loss: Any, batches: work.Batches) -> float:
    """Mean loss over all batches with the parameters as they are now."""
    losses = [float(loss(model(inputs), labels)) for inputs, labels in tensors(batches)]
    return sum(losses) / len(losses)


def fingerprints(model: nn.Module, size: dict[str, Any]) -> list[list[float]]:
    """A fingerprint of every parameter, in order; none where nobody compares them."""
    if not size.get("fingerprints", True):
        return []
    return [work.fingerprint(p.detach().numpy()) for p in model.parameters()]
