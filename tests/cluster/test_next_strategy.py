"""One cluster, one strategy after another; mistakes of a strategy do not hang anybody."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from plain_strategy import PlainOnCoordinator, PlainOnWorker

import stratagem as sg
from stratagem import LocalCluster
from stratagem._cluster.contract import Applied

pytestmark = pytest.mark.process


def test_after_close_the_cluster_serves_the_next_and_old_variables_are_freed() -> None:
    """Issue 4, section 1."""
    with LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        tasks = cluster._tasks.launcher._tasks
        (server,) = (task for task in tasks if "ParameterServer" in repr(task))
        for expected in (3.0, 4.0):
            strategy = sg.ParameterServerStrategy(cluster.resolver)
            with strategy.scope():
                v = sg.Variable(torch.tensor(expected - 1))
            with sg.ClusterCoordinator(strategy) as coordinator:

                def add(v: Any = v) -> None:
                    v.assign_add(torch.ones(()))

                coordinator.schedule(add)
                coordinator.join(timeout_s=120)
                assert float(v) == expected
                assert server.session_count == 1  # type: ignore[attr-defined]
            assert server.session_count == 0  # type: ignore[attr-defined]


class BrokenFence(PlainOnCoordinator):
    """A strategy whose fence fails in a way nobody foresaw."""

    def fence(self, worker_index: int, incarnation: int) -> None:
        raise KeyError("surprise")


def test_a_fence_that_fails_is_raised_not_waited_for(connect: Callable[..., Any]) -> None:
    """The closure must not run elsewhere, and join must not hang."""
    with LocalCluster(workers=2, ps=1) as cluster:
        coordinator = connect(cluster, views=BrokenFence())

        def die() -> None:
            import os

            os._exit(1)

        coordinator.schedule(die)
        with pytest.raises(KeyError, match="surprise"):
            coordinator.join(timeout_s=120)
        assert coordinator.schedule(lambda: 1).fetch(timeout_s=120) == 1


class Moving(PlainOnCoordinator):
    """A strategy with one thing that moves: a number every closure must see as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.version = self.sent = 0
        self.number = 0

    def move(self, number: int) -> None:
        self.version += 1
        self.number = number

    def changes(self) -> tuple[Sequence[object], Sequence[Hashable]]:
        return self.current() if self.version > self.sent else (), ()

    def accept(self) -> None:
        self.sent = self.version

    def current(self) -> Sequence[object]:
        return [self.number] if self.version else []

    def worker_setup(self) -> Any:
        return MovingSetup()


class MovingSetup:
    """The worker's side of it."""

    def connect(self, *, worker_index: int, incarnation: int, key: Any) -> Any:
        return MovingWorker()


class MovingWorker(PlainOnWorker):
    """Keeps the number where closures find it."""

    def apply(self, updates: Sequence[Any]) -> Applied:
        import builtins

        if updates[-1] == 13:
            raise ArithmeticError("an unlucky number")
        builtins.moving_number = updates[-1]  # type: ignore[attr-defined]
        return {}, ()


def test_closures_see_the_state_of_their_own_schedule(connect: Callable[..., Any]) -> None:
    """Contract 7: updates count for the closures after them, and reach a worker's next life."""
    with LocalCluster(workers=1, ps=1) as cluster:
        views = Moving()
        coordinator = connect(cluster, views=views)

        def look() -> int:
            import builtins

            return builtins.moving_number  # type: ignore[attr-defined, no-any-return]

        values = []
        for number in range(1, 10):
            views.move(number)
            values += [coordinator.schedule(look), coordinator.schedule(look)]
        assert coordinator.fetch(values) == [n for n in range(1, 10) for _ in range(2)]
        old = cluster.pid("worker", 0)
        coordinator.join()
        cluster.kill_worker(0)
        cluster.wait_restarted(0, old)
        assert coordinator.schedule(look).fetch(timeout_s=120) == 9
        views.move(13)
        coordinator.schedule(look)
        with pytest.raises(ArithmeticError, match="unlucky"):
            coordinator.join(timeout_s=120)
