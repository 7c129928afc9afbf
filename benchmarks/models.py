"""Models of the rows in plain PyTorch, for our side (under a scope) and for the limit.

Imports torch only, neither Stratagem nor the harness.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import work


class Mlp(nn.Module):
    """MLP such as 784-256-10."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.first = nn.Linear(size["inputs"], size["hidden"])
        self.second = nn.Linear(size["hidden"], size["classes"])

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.second(F.relu(self.first(inputs)))
        return logits


class Table(nn.Module):
    """An embedding table and a linear layer."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(size["rows"], size["width"], sparse=True)
        self.head = nn.Linear(size["columns"] * size["width"], 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(ids).flatten(1))
        return logits


class Many(nn.Module):
    """Many small parameters with a fixed total size."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        shapes = work.byte_shapes(size)
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])

    def forward(self) -> Tensor:
        return torch.stack([part.square().sum() for part in self.parts]).sum()


class Layers(nn.Sequential):
    """Many small layers, each with a weight and a bias."""

    def __init__(self, size: dict[str, Any]) -> None:
        features = size["features"]
        super().__init__(*[nn.Linear(features, features) for _ in range(size["layers"])])


def set_layers(model: Layers, size: dict[str, Any]) -> None:
    """Set the initial parameters that all sides use."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), work.layers_parameters(size), strict=True):
            parameter.copy_(torch.from_numpy(value))


def set_mlp(model: Mlp, size: dict[str, Any]) -> None:
    """Set the initial parameters that all sides use."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), work.mlp_parameters(size), strict=True):
            parameter.copy_(torch.from_numpy(value))


def set_table(model: Table, size: dict[str, Any]) -> None:
    """Set the initial table and layer that all sides use."""
    with torch.no_grad():
        if "start" in size:
            nn.init.constant_(model.table.weight, size["start"])
        else:
            model.table.weight.copy_(torch.from_numpy(work.embedding_table(size)))
        model.head.weight.copy_(torch.from_numpy(work.embedding_head(size)))
        model.head.bias.zero_()


def tensors(batches: work.Batches) -> list[tuple[Tensor, Tensor]]:
    """Return the batches as pairs of tensors."""
    inputs, labels = (torch.from_numpy(part) for part in batches)
    return list(zip(inputs.unbind(), labels.unbind(), strict=True))


@torch.no_grad()
def mean_loss(model: nn.Module, loss: Any, batches: work.Batches) -> float:
    """Return the mean loss over all batches with the current parameters."""
    losses = [float(loss(model(inputs), labels)) for inputs, labels in tensors(batches)]
    return sum(losses) / len(losses)


def fingerprints(model: nn.Module, size: dict[str, Any]) -> list[list[float]]:
    """Return a fingerprint of every parameter, in order; nothing where they are not compared."""
    if not size.get("fingerprints", True):
        return []
    return [work.fingerprint(p.detach().numpy()) for p in model.parameters()]
