"""A run whose result says whether any update was lost or counted twice.

Counters in float64 on two servers, a table trained by Adagrad with gradient 1 (its ``sum`` is the number of updates of a
row), and a layer with any optimizer.
"""

from __future__ import annotations

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
    """The objects of a run, its step, and the check of its result."""

    def __init__(self, strategy: Any, name: str) -> None:
        self.name = name
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
        layer, optimizer = self.layer, self.optimizer

        def step() -> None:
            first.assign_add(torch.ones(3, dtype=torch.float64))
            second.assign_add(torch.ones(3, dtype=torch.float64))
            rows.zero_grad()
            table(torch.arange(40)).sum().backward()
            rows.step()
            optimizer.zero_grad()
            layer(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        coordinator.schedule(step)

    def check(self, steps: int) -> None:
        """Raise if the variables differ from those of `steps` steps, each counted once."""
        assert self.first.numpy().tolist() == [float(steps)] * 3
        assert self.second.numpy().tolist() == [float(steps)] * 3
        sums = self.rows.state_dict()["state"][0]["sum"]
        assert set(sums.flatten().tolist()) == {float(steps)}
        assert torch.allclose(self.layer.weight.detach(), trained_plainly(self.name, steps))
