"""The bare program of the row with two replicas: a thread per replica, half a batch each, barriers, one `optimizer.step()`."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import models, work
from benchmarks.protocol import Work

LIMIT_S = 240.0


class BareThreads(Work):
    """Replicas of the MLP that share the parameters' memory; replica 0 adds the gradients and steps."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.size, self.done, count = size, 0, size["replicas"]
        self.models = [models.Mlp(size) for _ in range(count)]
        models.set_mlp(self.models[0], size)
        for model in self.models[1:]:
            for own, first in zip(model.parameters(), self.models[0].parameters(), strict=True):
                own.data = first.data
        self.optimizer = torch.optim.SGD(self.models[0].parameters(), work.MLP_LEARNING_RATE)
        self.batches = [
            list(zip(inputs.chunk(count), labels.chunk(count), strict=True))
            for inputs, labels in models.tensors(work.mlp_batches(size))
        ]
        self.barrier = threading.Barrier(count)
        self.orders: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(count)]
        self.answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._replica, args=(index,), daemon=True)
            for index in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def _replica(self, index: int) -> None:
        model, first = self.models[index], self.models[0]
        while (batch := self.orders[index].get()) is not None:
            inputs, labels = batch[index]
            model.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            if self.barrier.wait(LIMIT_S) == 0:
                with torch.no_grad():
                    total = [parameter.grad for parameter in first.parameters()]
                    for other in self.models[1:]:
                        torch._foreach_add_(total, [one.grad for one in other.parameters()])
                    torch._foreach_mul_(total, 1 / len(self.models))
                self.optimizer.step()
            self.barrier.wait(LIMIT_S)
            self.answers.put(index)

    def steps(self, count: int) -> None:
        for _ in range(count):
            batch = self.batches[self.done % len(self.batches)]
            self.done += 1
            for order in self.orders:
                order.put(batch)
            for _ in self.threads:
                self.answers.get(timeout=LIMIT_S)

    def check(self) -> dict[str, Any]:
        arrays = work.mlp_batches(self.size)
        before = models.mean_loss(self.models[0], F.cross_entropy, arrays)
        self.steps(self.size["check_steps"])
        after = models.mean_loss(self.models[0], F.cross_entropy, arrays)
        prints = models.fingerprints(self.models[0], self.size)
        return {"loss_before": before, "loss_after": after, "parameters": prints}

    def close(self) -> None:
        for order in self.orders:
            order.put(None)
        for thread in self.threads:
            thread.join(LIMIT_S)
