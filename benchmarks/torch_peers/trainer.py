"""Parts that the trainers of all PyTorch peers share: model, batches and loss of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models, work


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place of one process: the row, its index among workers or servers, and a file where processes meet."""

    row: str
    size: dict[str, Any]
    index: int
    workers: int
    servers: int
    meeting: str
    shared: Any = None


def model_of(row: str, size: dict[str, Any]) -> nn.Module:
    """Return the model of a row with the initial parameters that all sides use."""
    if row == "mlp":
        mlp = models.Mlp(size)
        models.set_mlp(mlp, size)
        return mlp
    table = models.Table(size)
    models.set_table(table, size)
    return table


def optimizer_of(row: str, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a row."""
    if row == "mlp":
        return torch.optim.SGD(parameters, work.MLP_LEARNING_RATE)
    return torch.optim.Adagrad(parameters, work.EMBEDDING_LEARNING_RATE, eps=work.EMBEDDING_EPSILON)


class Trainer:
    """A worker: batches, a loss, and a step; abstract."""

    def __init__(self, place: Place) -> None:
        self.place = place
        is_mlp = place.row == "mlp"
        self.loss: Any = F.cross_entropy if is_mlp else F.binary_cross_entropy_with_logits
        make = work.mlp_batches if is_mlp else work.embedding_batches
        self.batches = models.tensors(make(place.size))
        self.done = 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the next batch; workers take them in turn."""
        number = self.done * self.place.workers + self.place.index
        self.done += 1
        return self.batches[number % len(self.batches)]

    def step(self) -> None:
        """Make one step."""
        raise NotImplementedError

    def output(self, inputs: Tensor) -> Tensor:
        """Return the model's output with the current parameters."""
        raise NotImplementedError

    @torch.no_grad()
    def mean_loss(self) -> float:
        """Return the mean loss over all batches."""
        losses = [float(self.loss(self.output(inputs), labels)) for inputs, labels in self.batches]
        return sum(losses) / len(losses)

    def close(self) -> None:
        """Release everything."""
