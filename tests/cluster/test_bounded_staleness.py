"""The rule that bounds staleness, by example, by random orders of events, and with real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from orders import Events, orders
from queue_world import ALL, QUICK_S, World
from scheduling import WAIT_S
from waiting import Gate, pass_gate, wait_until

import stratagem as sg
from stratagem._cluster.coordinator.closure_actions import SendClosures
from stratagem._cluster.coordinator.closure_queue import ClosureQueue
from stratagem._cluster.coordinator.start_rules import BoundedStaleness


def queue_of(workers: int, limit: int) -> ClosureQueue:
    """A queue with that many workers, all up, and ten closures."""
    queue = ClosureQueue(rule=BoundedStaleness(limit))
    for worker in range(workers):
        queue.add_worker(worker)
        queue.worker_up(worker, incarnation=1)
    for closure in range(10):
        queue.add(closure)
    return queue


def test_a_fast_worker_waits_for_the_slow_one() -> None:
    """Closure 0 runs for long: with limit 3, three others run beside it and after it, and no more."""
    queue = queue_of(2, 3)
    assert queue.take(0) == [0]
    for closure in (1, 2, 3):
        assert queue.take(1) == [closure]
        queue.finished(1, [closure], QUICK_S)
    assert queue.take(1) == [], "closure 0 would miss four updates"
    actions = queue.finished(0, [0], QUICK_S)
    assert {one.worker for one in actions if isinstance(one, SendClosures)} == {0, 1}


def test_no_more_workers_run_than_the_limit_allows_and_all_take_turns() -> None:
    """With limit 1 two of four workers run at a time, each worker in turn."""
    queue = queue_of(4, 1)
    order = []
    for _ in range(5):
        sends = [one.worker for one in queue.tick() if isinstance(one, SendClosures)]
        running = [worker for worker in sends if queue.take(worker)]
        assert len(running) == 2
        order += running
        assert not any(queue.take(worker) for worker in range(4))
        for worker in running:
            (closure,) = queue._workers[worker].in_flight
            queue.finished(worker, [closure], QUICK_S)
    assert order == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_closure_that_did_not_run_counts_for_nothing_and_a_lost_one_as_an_update() -> None:
    queue = queue_of(3, 2)
    assert queue.take(0) + queue.take(1) + queue.take(2) == [0, 1, 2]
    queue.returned(1, [1])
    assert queue.take(1) == [1]
    queue.worker_lost(1)
    queue.worker_fenced(1)  # closure 1 has perhaps written, and will write again
    queue.finished(2, [2], QUICK_S)
    assert queue.take(2) == []
    queue.finished(0, [0], QUICK_S)
    assert queue.take(2) == [3]


class BoundedWorld(World):
    """A world that knows how many updates of others each running closure may have missed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.missed: dict[int, int] = {}
        super().__init__(BoundedStaleness(limit))

    def take_for(self, worker: int) -> None:
        before = set(self.held[worker]) if worker in self.held else set()
        super().take_for(worker)
        for closure in set(self.held.get(worker, ())) - before - self.resources:
            assert self.running_at(worker) == 1, "sent ahead"
            self.missed[closure] = 0

    def running_at(self, worker: int) -> int:
        return len([one for one in self.held[worker] if one not in self.resources])

    def finish(self, worker: int, how: str, run_s: float) -> None:
        if worker in self.alive and self.held[worker]:
            self.wrote(self.held[worker][0])
        super().finish(worker, how, run_s)

    def lose_one(self, worker: int) -> None:
        for closure in self.held.get(worker, ()) if worker in self.alive else ():
            self.wrote(closure)  # perhaps
        super().lose_one(worker)

    def wrote(self, closure: int) -> None:
        if self.missed.pop(closure, None) is not None:
            self.missed = {one: count + 1 for one, count in self.missed.items()}

    def check(self) -> None:
        super().check()
        running = {one for held in self.held.values() for one in held} - self.resources
        self.missed = {one: count for one, count in self.missed.items() if one in running}
        for count in self.missed.values():
            # Even if all others that run write now.
            assert count + len(self.missed) - 1 <= self.limit


@pytest.mark.timeout(600)
@orders(2000, events=60)
def test_in_any_order_no_closure_misses_more_than_the_limit(events: Events) -> None:
    """Workers join, leave and die, closures fail and are cancelled: the bound holds, and none is stuck."""
    world = BoundedWorld(1 + events.below(4))
    mood = events.of(ALL)
    while events.more:
        events.of(mood)(world, events)
        world.check()
    world.end_well()


@pytest.mark.timeout(600)
@orders(1000, events=60)
def test_the_actions_alone_get_everything_done_under_a_bound(events: Events) -> None:
    world = BoundedWorld(1 + events.below(4))
    mood = events.of(ALL)
    while events.more:
        events.of([one for one in mood if one is not World.take])(world, events)
    world.end_by_sends_alone()


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "2"])
def test_a_staleness_that_is_no_number_of_updates_is_refused(wrong: object) -> None:
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        with pytest.raises(ValueError, match="staleness="):
            sg.ParameterServerStrategy(cluster.resolver, staleness=wrong)  # type: ignore[arg-type]


@pytest.mark.process
@pytest.mark.parametrize("limit", [1, 3])
def test_a_slow_worker_misses_no_more_updates_than_the_bound(limit: int, gate: Gate) -> None:
    """The measured staleness of a function that hangs while another worker trains is at most the bound."""
    path = gate.path
    with (
        sg.LocalCluster(workers=2, ps=1) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, staleness=limit) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            started = sg.Variable(0, dtype=torch.int64)

        def step(hangs: bool) -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            if hangs:
                started.assign_add(1)
                pass_gate(path)
            optimizer.step()

        slow = coordinator.schedule(step, args=(True,))
        wait_until(lambda: started.read_value().item() == 1, WAIT_S)
        for _ in range(20):
            coordinator.schedule(step, args=(False,))
        # Without the bound, the other worker would finish all of them.
        wait_until(lambda: f"[{20 - limit} queued, 1 in flight" in repr(coordinator), WAIT_S)
        assert slow.status.name == "NOT_READY"
        gate.open()
        coordinator.join(timeout_s=WAIT_S)
        staleness: Any = None

        def measured() -> bool:
            nonlocal staleness
            staleness = coordinator.worker_metrics.distributions.get("ps.staleness")
            return staleness is not None and staleness.count == 21

        wait_until(measured, WAIT_S, tell=lambda: staleness)
        assert staleness.maximum == limit
