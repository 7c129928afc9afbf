"""The one-machine rows on our side: one device, and central storage with two CPU replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import stratagem as sg
from benchmarks import models, work
from benchmarks.protocol import Work


def central_storage(size: dict[str, Any]) -> sg.CentralStorageStrategy:
    """Return central storage with the row's number of CPU replicas."""
    devices = [f"cpu:{index}" for index in range(size["replicas"])]
    parallel = size.get("parallel", False)
    return sg.CentralStorageStrategy(devices, "cpu:0", parallel_replicas=parallel)


class SingleWork(Work):
    """The ordinary MLP step, run under a strategy."""

    def __init__(self, strategy: sg.Strategy, size: dict[str, Any]) -> None:
        super().__init__()
        self.strategy, self.size, self.done = strategy, size, 0
        with strategy.scope():
            self.model = models.Mlp(size)
            self.optimizer = torch.optim.SGD(self.model.parameters(), work.MLP_LEARNING_RATE)
        models.set_mlp(self.model, size)
        pairs = models.tensors(work.mlp_batches(size))
        self.batches = [(self.place(inputs), self.place(labels)) for inputs, labels in pairs]

    def place(self, whole: Tensor) -> Any:
        """Return one batch as ``run`` takes it."""
        return whole

    def steps(self, count: int) -> None:
        model, optimizer, strategy, batches = (
            self.model,
            self.optimizer,
            self.strategy,
            self.batches,
        )

        def step(inputs: Tensor, labels: Tensor) -> None:
            optimizer.zero_grad()
            loss: Any = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()

        for _ in range(count):
            strategy.run(step, args=batches[self.done % len(batches)])
            self.done += 1

    def check(self) -> dict[str, Any]:
        batches = work.mlp_batches(self.size)
        before = models.mean_loss(self.model, F.cross_entropy, batches)
        self.steps(self.size["check_steps"])
        after = models.mean_loss(self.model, F.cross_entropy, batches)
        prints = models.fingerprints(self.model, self.size)
        return {"loss_before": before, "loss_after": after, "parameters": prints}

    def close(self) -> None:
        self.strategy.close()


class OneDevice(SingleWork):
    """The MLP step under OneDeviceStrategy."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__(sg.OneDeviceStrategy("cpu:0"), size)


class Central(SingleWork):
    """The MLP step over the replicas of CentralStorageStrategy."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__(central_storage(size), size)

    def place(self, whole: Tensor) -> Any:
        parts = whole.chunk(self.size["replicas"])
        return self.strategy.distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )


class EmptyReplicas(Work):
    """A function that does nothing, on two replicas: the fixed cost of ``run``."""

    time_unit_s = 1e-6

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.strategy = central_storage(size)

    def steps(self, count: int) -> None:
        def nothing() -> None:
            pass

        for _ in range(count):
            self.strategy.run(nothing)

    def close(self) -> None:
        self.strategy.close()


class ReplicatedLayers(Work):
    """A step of many small layers, on two replicas: the cost of each parameter."""

    time_unit_s = 1e-3

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.size, self.strategy = size, central_storage(size)
        with self.strategy.scope():
            self.model = models.Layers(size)
            self.optimizer = torch.optim.SGD(self.model.parameters(), work.LAYERS_LEARNING_RATE)
        models.set_layers(self.model, size)
        self.whole = torch.from_numpy(work.layers_inputs(size))
        parts = self.whole.chunk(size["replicas"])
        self.batch: Any = self.strategy.distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )

    def steps(self, count: int) -> None:
        model, optimizer = self.model, self.optimizer

        def step(inputs: Tensor) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        for _ in range(count):
            self.strategy.run(step, args=(self.batch,))

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss of the whole batch."""
        return float(self.model(self.whole).square().mean())

    def check(self) -> dict[str, Any]:
        before = self.loss()
        self.steps(self.size["check_steps"])
        prints = models.fingerprints(self.model, self.size)
        return {"loss_before": before, "loss_after": self.loss(), "parameters": prints}

    def close(self) -> None:
        self.strategy.close()
