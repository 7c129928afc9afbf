"""A worker that comes back knows the present state of the strategy; one that missed an update hears it again."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_strategy import PlainOnCoordinator
from torch import nn
from waiting import wait_until

import stratagem as sg
from stratagem import LocalCluster

pytestmark = pytest.mark.process


def test_a_new_incarnation_sees_earlier_advances() -> None:
    """FLT-2: rates, train/eval, frozen parameters and new groups; the definitions are older than all that."""
    with sg.LocalCluster(workers=1, ps=1) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            first, second = nn.Linear(1, 1), nn.Linear(1, 1)
            optimizer = torch.optim.SGD(first.parameters(), lr=0.5)

        def look() -> tuple[object, ...]:
            rates = [group["lr"] for group in optimizer.param_groups]
            return first.training, first.weight.requires_grad, rates

        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            assert coordinator.schedule(look).fetch(timeout_s=60) == (True, True, [0.5])
            first.eval()
            first.weight.requires_grad_(False)
            optimizer.param_groups[0]["lr"] = 0.25
            optimizer.param_groups[0]["lr"] = 0.125
            optimizer.add_param_group({"params": list(second.parameters()), "lr": 2.0})
            now = (False, False, [0.125, 2.0])
            assert coordinator.schedule(look).fetch(timeout_s=60) == now
            before = cluster.pid("worker", 0)
            cluster.kill_worker(0)
            cluster.wait_restarted(0, before)
            # One that names none of these objects comes first: the worker hears of changes to things
            # it does not know yet.
            assert coordinator.schedule(os.getpid).fetch(timeout_s=60) != before
            assert coordinator.schedule(look).fetch(timeout_s=60) == now


class Unwelcome:
    """An update that cannot be read on a worker while a certain file exists."""

    def __init__(self, refuses: str) -> None:
        self.refuses = refuses

    def __reduce__(self) -> tuple[Any, ...]:
        return _welcome, (self.refuses,)


def _welcome(refuses: str) -> Unwelcome:
    if os.path.exists(refuses):
        raise OSError("this cannot be read here")
    return Unwelcome(refuses)


class MovingViews(PlainOnCoordinator):
    """Plain views with one update that says no more than that something moved."""

    def __init__(self, refuses: Path) -> None:
        super().__init__()
        self.version = self.sent = 0
        self._refuses = str(refuses)

    def changes(self) -> tuple[Sequence[object], Sequence[Hashable]]:
        return self.current() if self.version > self.sent else (), ()

    def accept(self) -> None:
        self.sent = self.version

    def current(self) -> Sequence[object]:
        return [Unwelcome(self._refuses)] if self.version else []


def test_updates_that_cannot_be_read_come_again(
    cluster: LocalCluster, connect: Any, tmp_path: Path
) -> None:
    """What was in them nobody knows, so every closure fails; but not for the rest of the life."""
    mark = tmp_path / "refuses"
    views = MovingViews(mark)
    coordinator: sg.ClusterCoordinator = connect(cluster, views=views)
    assert coordinator.schedule(lambda: 7).fetch(timeout_s=60) == 7
    mark.touch()
    views.version += 1
    for _ in range(3):
        coordinator.schedule(lambda: 7)
        with pytest.raises(OSError, match="cannot be read here"):
            coordinator.join(timeout_s=60)
    mark.unlink()
    # Each worker may fail once more as before, and asks again.
    failures, ran = 0, set()

    def both_ran() -> bool:
        nonlocal failures
        try:  # also schedule() raises the error
            values = [coordinator.schedule(sg.get_current_worker_index) for _ in range(20)]
            coordinator.join(timeout_s=60)
            ran.update(value.fetch() for value in values)
        except OSError:
            failures += 1
        return len(ran) == 2

    wait_until(both_ran)
    assert failures <= 2
    assert coordinator.fetch([coordinator.schedule(lambda: 7) for _ in range(20)]) == [7] * 20
