"""The bare program of the MLP row on one host: shared parameters, shared gradients, one byte per message.

Two workers compute gradients into shared memory; two servers, each with its parameters, add them. No coordinator, no recovery.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import models, work
from benchmarks.limits.bare_sockets import BareSockets, Row


class Mlp(Row):
    """A byte tells a server that gradients are ready; a byte tells the worker that they are applied."""

    def __init__(self, size: dict[str, Any], task: int, shared: Any = None) -> None:
        super().__init__(size, task)
        self.values: list[Tensor] = shared["values"]
        self.gradients: list[list[Tensor]] = shared["gradients"]
        self.arrays = work.mlp_batches(size)
        self.batches = models.tensors(self.arrays)
        self.model = models.Mlp(size)
        for parameter, value in zip(self.model.parameters(), self.values, strict=True):
            parameter.data = value

    def worker_step(self, servers: Any) -> None:
        inputs, labels = self.batches[self.done % len(self.batches)]
        self.done += 1
        self.model.zero_grad()
        F.cross_entropy(self.model(inputs), labels).backward()
        mine = self.gradients[self.worker]
        for slot, parameter in zip(mine, self.model.parameters(), strict=True):
            assert parameter.grad is not None
            slot.copy_(parameter.grad)
        for server in servers:
            server.send(bytes([self.worker]))
        for server in servers:
            server.recv(1)

    def answer(self, worker: socket.socket) -> None:
        who = worker.recv(1)
        if not who:
            raise EOFError
        with torch.no_grad():
            for value, gradient in list(zip(self.values, self.gradients[who[0]], strict=True))[
                self.task :: 2
            ]:
                value.add_(gradient, alpha=-work.MLP_LEARNING_RATE)
        worker.send(who)

    def facts(self, servers: Any) -> dict[str, Any]:
        before = models.mean_loss(self.model, F.cross_entropy, self.arrays)
        for _ in range(self.size["check_steps"]):
            self.worker_step(servers)
        after = models.mean_loss(self.model, F.cross_entropy, self.arrays)
        return {"loss_before": before, "loss_after": after}


class BareMemory(BareSockets):
    """The bare program of the MLP row."""

    def __init__(self, size: dict[str, Any]) -> None:
        values = [torch.from_numpy(one).share_memory_() for one in work.mlp_parameters(size)]
        gradients = [
            [torch.zeros_like(value).share_memory_() for value in values]
            for _ in range(size["workers"])
        ]
        super().__init__(Mlp, size, {"values": values, "gradients": gradients})
