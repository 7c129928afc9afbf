"""Hogwild: processes train one model in shared memory without locks, as ``torch.multiprocessing`` documents it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.torch_peers.trainer import Place, Trainer, model_of, optimizer_of


def shared(row: str, size: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return the parameters, and Adagrad's sums, in shared memory."""
    model = model_of(row, size)
    values = [parameter.detach().share_memory_() for parameter in model.parameters()]
    sums = [] if row == "mlp" else [torch.zeros_like(value).share_memory_() for value in values]
    return {"values": values, "sums": sums}


class Worker(Trainer):
    """A process whose optimizer writes into the shared parameters."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.model = model_of(place.row, place.size)
        parameters = list(self.model.parameters())
        for parameter, value in zip(parameters, place.shared["values"], strict=True):
            parameter.data = value
        self.optimizer = optimizer_of(place.row, parameters)
        for parameter, total in zip(parameters, place.shared["sums"], strict=False):
            self.optimizer.state[parameter]["sum"] = total

    def step(self) -> None:
        inputs, labels = self.next_batch()
        self.optimizer.zero_grad()
        self.loss(self.model(inputs), labels).backward()
        self.optimizer.step()

    def output(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.model(inputs)
        return found
