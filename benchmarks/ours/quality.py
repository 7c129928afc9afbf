"""Quality of the click model, trained on one device and by asynchronous workers.

Every form sees every example exactly once, so that they differ only in order and staleness. Time
spent on evaluation is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from benchmarks.protocol import Work
from stratagem._demo.clicks import Clicks, ClickWorld, WideAndDeep, auc

LEARNING_RATE = 0.05
JOIN_TIMEOUT_S = 300.0


class Quality(Work):
    """One sample is one whole training; its value is the AUC at the end."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.size = size
        self.samples = 0
        self._draw(0)

    def _draw(self, number: int) -> None:
        """Make the data and the seed of the model of the n-th sample."""
        size, seed = self.size, 4 * number
        self.world = ClickWorld(seed=seed + 1)
        self.train = self.world.sample(size["steps"] * size["batch"], seed=seed + 2)
        self.test = self.world.sample(size["test_rows"], seed=seed + 3)
        self.model_seed = seed + 4

    def steps(self, count: int) -> None:
        raise NotImplementedError("a training is measured by sample()")

    def sample(self, seconds: float) -> dict[str, Any]:
        if self.size.get("new_seeds"):
            self._draw(self.samples)
        self.samples += 1
        workers = self.size["workers"]
        train = self._alone if workers == 0 else self._with_servers
        curve, facts = train()
        return {
            "value": curve[-1]["auc"],
            "curve": curve,
            "best_auc": self.test.best_auc(),
            "seconds": curve[-1]["seconds"],
            **facts,
        }

    def _model(self) -> tuple[WideAndDeep, torch.optim.Optimizer]:
        torch.manual_seed(self.model_seed)
        fields = len(self.world.vocabulary)
        model = WideAndDeep(
            num_categories=self.world.num_categories,
            num_fields=fields,
            num_dense=self.train.dense.shape[1],
        )
        return model, torch.optim.Adagrad(model.parameters(), LEARNING_RATE)

    def _alone(self) -> tuple[list[dict[str, float]], dict[str, Any]]:
        model, optimizer = self._model()
        step = _step_on(model, optimizer, self.train, self.size["batch"])

        def part(numbers: range) -> None:
            for number in numbers:
                step(number)

        return self._curve(model, part), {}

    def _with_servers(self) -> tuple[list[dict[str, float]], dict[str, Any]]:
        size = self.size
        in_process = size.get("in_process", False)
        with sg.LocalCluster(workers=size["workers"], ps=2, in_process=in_process) as cluster:
            strategy = sg.ParameterServerStrategy(cluster.resolver)
            with sg.ClusterCoordinator(strategy) as coordinator:
                with strategy.scope():
                    model, optimizer = self._model()
                step = _step_on(model, optimizer, self.train, self.size["batch"])

                def part(numbers: range) -> None:
                    for number in numbers:
                        coordinator.schedule(step, args=(number,))
                    coordinator.join(timeout_s=JOIN_TIMEOUT_S)

                curve = self._curve(model, part)
                spread = coordinator.worker_metrics.distributions.get("ps.staleness")
            strategy.close()
        if spread is None:
            return curve, {}
        tail = {f"staleness_p{percent}": spread.quantile(percent / 100) for percent in (50, 90, 99)}
        return curve, {"staleness_mean": spread.mean, **tail}

    def _curve(self, model: nn.Module, part: Callable[[range], None]) -> list[dict[str, float]]:
        """Train in parts, and evaluate on the test rows after each part."""
        total, parts = self.size["steps"], self.size["parts"]
        curve = [self._point(model, 0, 0.0)]
        spent = 0.0
        for index in range(parts):
            numbers = range(total * index // parts, total * (index + 1) // parts)
            begin = time.perf_counter()
            part(numbers)
            spent += time.perf_counter() - begin
            curve.append(self._point(model, numbers.stop, spent))
        return curve

    @torch.no_grad()
    def _point(self, model: nn.Module, steps: int, seconds: float) -> dict[str, float]:
        logits: Tensor = model(self.test.ids, self.test.dense)
        return {
            "examples": float(steps * self.size["batch"]),
            "seconds": seconds,
            "auc": auc(logits, self.test.label),
            "loss": float(F.binary_cross_entropy_with_logits(logits, self.test.label)),
        }


def _step_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, clicks: Clicks, batch: int
) -> Callable[[int], None]:
    """Return the step on the n-th batch, a local function that is sent by value, once, with its rows."""
    ids, dense, label = clicks.ids, clicks.dense, clicks.label

    def step(number: int) -> None:
        rows = slice(number * batch, (number + 1) * batch)
        optimizer.zero_grad()
        loss: Any = F.binary_cross_entropy_with_logits(model(ids[rows], dense[rows]), label[rows])
        loss.backward()
        optimizer.step()

    return step
