"""A run whose result says whether any update was lost or counted twice.

Counters in float64 on two servers, a table trained by Adagrad with gradient 1 (its ``sum`` is the number of updates of a
row), and a layer with any optimizer.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import stratagem as sg

STEP_LIMIT_S = 200.0


def trained_plainly(name: str, steps: int) -> torch.Tensor:
    """Return the weights of the layer after `steps` steps of plain PyTorch."""
    layer = nn.Linear(4, 4)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return layer.weight.detach()


class ConservedRun:
    """The objects of a run, its step, and the check of its result.

    Args:
        strategy: where it runs.
        name: the optimizer of the layer.
        pause_s: how much longer each step takes.
    """

    def __init__(self, strategy: Any, name: str, *, pause_s: float = 0.0) -> None:
        self.name = name
        self._pause_s = pause_s
        with strategy.scope():
            self.first = sg.Variable(torch.zeros(3, dtype=torch.float64), name="first")
            self.second = sg.Variable(torch.zeros(3, dtype=torch.float64), name="second")
            self.table = nn.Embedding(40, 2)
            nn.init.zeros_(self.table.weight)
            self.rows = torch.optim.Adagrad(self.table.parameters(), lr=0.5, eps=1e-10)
            self.layer = nn.Linear(4, 4)
            for parameter in self.layer.parameters():
                nn.init.zeros_(parameter)
            self.optimizer = getattr(torch.optim, name)(self.layer.parameters(), lr=0.5)
        self.checkpoint = sg.Checkpoint(
            first=self.first,
            second=self.second,
            table=self.table,
            rows=self.rows,
            layer=self.layer,
            optimizer=self.optimizer,
        )

    def schedule(self, coordinator: Any) -> None:
        first, second, table, rows = self.first, self.second, self.table, self.rows
        layer, optimizer, pause_s = self.layer, self.optimizer, self._pause_s

        def step() -> None:
            time.sleep(pause_s)
            first.assign_add(torch.ones(3, dtype=torch.float64))
            second.assign_add(torch.ones(3, dtype=torch.float64))
            rows.zero_grad()
            table(torch.arange(40)).sum().backward()
            rows.step()
            optimizer.zero_grad()
            layer(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        coordinator.schedule(step)

    def values(self) -> list[float]:
        """Return how often the counters and the rows of the table were updated: least and most of each."""
        sums = self.rows.state_dict()["state"][0]["sum"]
        found = [self.first.numpy(), self.second.numpy(), sums.numpy()]
        return [float(end) for each in found for end in (each.min(), each.max())]

    def check(self, steps: int) -> None:
        """Raise if the variables differ from those of `steps` steps, each counted once."""
        found = self.values()
        names = "least and most of: first, second, sums"
        assert found == [float(steps)] * 6, f"{names}: {found}, expected {steps}"
        weight, expected = self.layer.weight.detach(), trained_plainly(self.name, steps)
        assert torch.allclose(weight, expected), f"weight {weight}, expected {expected}"
