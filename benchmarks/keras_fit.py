"""The row *keras_fit*: ``fit`` of the MLP in Keras on torch, plain (the limit) and under a strategy (our side)."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras

from benchmarks import models, work
from benchmarks.protocol import Work


class KerasFit(Work):
    """``fit`` with a generator of batches, one call for all steps of a sample."""

    def __init__(self, size: dict[str, Any], strategy: Any = None) -> None:
        super().__init__()
        self.size, self.strategy = size, strategy
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.Input((size["inputs"],)),
                    keras.layers.Dense(size["hidden"], activation="relu"),
                    keras.layers.Dense(size["classes"]),
                ]
            )
            self.model.compile(
                optimizer=keras.optimizers.SGD(work.MLP_LEARNING_RATE),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        self.model.set_weights([value.T for value in work.mlp_parameters(size)])
        self.pairs = models.tensors(work.mlp_batches(size))
        self.done = 0

    def steps(self, count: int) -> None:
        self.model.fit(self._batches(), steps_per_epoch=count, shuffle=False, verbose=0)
        self.done += count

    def _batches(self) -> Iterator[Any]:
        """Yield batches without end; Keras takes generators, not other iterators."""
        first = self.done % len(self.pairs)
        yield from itertools.islice(itertools.cycle(self.pairs), first, None)

    def check(self) -> dict[str, Any]:
        before = self._loss()
        self.steps(self.size["check_steps"])
        after = self._loss()
        prints = [work.fingerprint(value) for value in self.model.get_weights()]
        return {"loss_before": before, "loss_after": after, "parameters": prints}

    def _loss(self) -> float:
        inputs, labels = work.mlp_batches(self.size)
        rows = inputs.reshape(-1, self.size["inputs"]), labels.reshape(-1)
        return float(self.model.evaluate(*rows, batch_size=self.size["batch"], verbose=0))

    def close(self) -> None:
        if self.strategy is not None:
            self.strategy.close()


class OneDeviceFit(KerasFit):
    """``fit`` under OneDeviceStrategy."""

    def __init__(self, size: dict[str, Any]) -> None:
        import stratagem as sg

        super().__init__(size, sg.OneDeviceStrategy("cpu:0"))
