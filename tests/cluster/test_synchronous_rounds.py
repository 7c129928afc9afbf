"""Synchronous rounds as a pure rule, by example and by random orders of events."""

from __future__ import annotations

import sys

import pytest
from fake_links import FakeCluster, failed, finished
from orders import Events, orders
from plain_strategy import PlainOnCoordinator
from queue_world import ALL, QUICK_S, World

from stratagem._cluster.coordinator.closure_actions import (
    Action,
    DeliverResults,
    EndRound,
    ResolveClosure,
    SendClosures,
)
from stratagem._cluster.coordinator.closure_queue import ClosureQueue
from stratagem._cluster.coordinator.start_rules import SynchronousRounds


def queue_of(workers: int, closures: int) -> tuple[ClosureQueue, SynchronousRounds]:
    """A queue with that many workers, all up, and the closures 1, 2, 3 …"""
    rounds = SynchronousRounds()
    queue = ClosureQueue(rule=rounds)
    for worker in range(workers):
        queue.add_worker(worker)
        queue.worker_up(worker, incarnation=1)
    for closure in range(1, closures + 1):
        queue.add(closure)
    return queue, rounds


def test_a_round_has_one_closure_for_each_worker_and_the_next_waits_for_its_steps() -> None:
    queue, rounds = queue_of(2, 4)
    assert (queue.take(0), queue.take(1)) == ([1], [2])
    assert queue.finished(0, [1], QUICK_S) == [], "the result waits"
    assert queue.take(0) == []
    assert queue.finished(1, [2], QUICK_S) == [EndRound((1, 2))]
    assert queue.take(0) == queue.take(1) == []
    assert not queue.quiet
    assert rounds.applied() == [DeliverResults((1, 2))]
    assert queue.tick() == [SendClosures(0), SendClosures(1)]
    assert (queue.take(0), queue.take(1)) == ([3], [4])


def test_a_smaller_round_begins_only_if_the_program_waits_for_it() -> None:
    queue, rounds = queue_of(3, 2)
    assert not any(queue.take(worker) for worker in range(3))
    assert queue.tick() == []
    rounds.wanted = 1
    assert queue.tick() == [SendClosures(0), SendClosures(1)]
    queue.add(3)
    assert [queue.take(worker) for worker in range(3)] == [[1], [2], []], "3 came too late"


def test_the_closure_of_a_lost_worker_runs_again_in_the_same_round() -> None:
    queue, _ = queue_of(2, 4)
    queue.take(0), queue.take(1)
    queue.worker_lost(1)
    queue.finished(0, [1], QUICK_S)
    assert SendClosures(0) in queue.worker_fenced(1)
    assert queue.take(0) == [2], "before 3"
    assert queue.finished(0, [2], QUICK_S) == [EndRound((1, 2))]


def test_a_fast_worker_does_not_take_the_closure_of_a_slow_one() -> None:
    """Each worker has one closure of the round, and so reads one batch of its dataset."""
    queue, _ = queue_of(2, 2)
    assert queue.take(0) == [1]
    queue.finished(0, [1], QUICK_S)
    assert queue.take(0) == []
    assert queue.take(1) == [2]


def test_steps_of_a_closure_that_raised_do_not_count() -> None:
    queue, rounds = queue_of(2, 4)
    queue.take(0), queue.take(1)
    queue.failed(0, 1)
    assert queue.finished(1, [2], QUICK_S) == [EndRound((2,))]
    assert rounds.applied() == [DeliverResults((2,))]
    assert queue.quiet


def test_a_round_waits_for_workers_that_answer_a_recall() -> None:
    """After an error a worker may still owe an answer: the next round has a closure for it, too."""
    queue, rounds = queue_of(2, 2)
    queue.take(0), queue.take(1)
    queue.failed(0, 1)
    queue.finished(1, [2], QUICK_S)
    rounds.applied()
    queue.resume()
    for closure in (3, 4):
        assert queue.add(closure) == [], "worker 1 has not answered"
    assert queue.returned(1, []) == [SendClosures(0), SendClosures(1)]


def test_a_round_that_a_server_has_forgotten_runs_again() -> None:
    queue, rounds = queue_of(2, 2)
    queue.take(0), queue.take(1)
    queue.finished(0, [1], QUICK_S)
    assert SendClosures(0) in queue.run_again(rounds.restart())
    assert queue.take(0) == [1]
    queue.finished(1, [2], QUICK_S)
    assert queue.finished(0, [1], QUICK_S) == [EndRound((1, 2))]
    assert rounds.restart() == [], "the servers make its steps already"


class RoundsWorld(World):
    """A world in which servers make the steps of rounds."""

    def __init__(self) -> None:
        self.rounds = SynchronousRounds()
        self.undelivered: set[int] = set()
        self.applying = False
        super().__init__(self.rounds)

    def execute(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, EndRound):
                assert not self.applying
                assert set(action.closures) == self.undelivered
                self.applying = True
                running = {one for held in self.held.values() for one in held}
                assert running <= self.resources, "a closure of the round runs"
            else:
                super().execute([action])

    def take_for(self, worker: int) -> None:
        before = set(self.held.get(worker, ()))
        super().take_for(worker)
        new = set(self.held.get(worker, ())) - before - self.resources
        assert not (new and self.applying), "a closure read parameters that are being written"
        running = {one for held in self.held.values() for one in held} - self.resources
        # Rounds have consecutive closures, apart from cancelled ones; at most one for each worker.
        assert len(running | self.undelivered) <= self.next_worker

    def finish(self, worker: int, how: str, run_s: float) -> None:
        if how != "done" or worker not in self.alive or not self.held[worker]:
            super().finish(worker, how, run_s)
            return
        closure = self.held[worker].pop(0)
        if closure not in self.resources:
            self.undelivered.add(closure)
        self.execute(self.queue.finished(worker, [closure], run_s))

    def lose_a_server(self, events: Events) -> None:
        given_up = self.queue.server_lost()
        self.execute([*given_up, *(ResolveClosure(c, "given up") for c in self.rounds.give_up())])
        self.undelivered.clear()
        self.applying = False
        assert self.queue.quiet

    def resume(self) -> None:
        """Make the steps of the round, too."""
        if self.applying:
            self.applying = False
            delivered = self.rounds.applied()
            assert delivered == [DeliverResults(tuple(sorted(self.undelivered)))]
            self.undelivered.clear()
            self.execute([*delivered, *self.queue.tick()])
        super().resume()

    def end_well(self) -> None:
        self.rounds.wanted = sys.maxsize
        for _ in range(300):
            if not self.open:
                break
            self.settle()
        super().end_well()

    def settle(self) -> None:
        if not set(self.held) - self.draining:
            self.join_one()
        for worker in self.workers:
            self.fence_off(worker)
            self.bring_up(worker)
            self.give_back(worker, 0)
        self.execute(self.queue.tick())
        for worker in self.workers:
            self.take_for(worker)
            while self.held.get(worker):
                self.finish(worker, "done", QUICK_S)
        self.resume()

    def end_by_sends_alone(self) -> None:
        self.rounds.wanted = sys.maxsize
        self.execute(self.queue.tick())
        super().end_by_sends_alone()


def tick_and_apply(world: RoundsWorld, events: Events) -> None:
    world.rounds.wanted += events.below(3)
    world.execute(world.queue.tick())
    world.resume()


def restart(world: RoundsWorld, events: Events) -> None:
    if not world.queue.stopped:
        again = world.rounds.restart()
        world.undelivered.difference_update(again)
        world.execute(world.queue.run_again(again))


@pytest.mark.timeout(600)
@orders(2000, events=60)
def test_in_any_order_rounds_do_not_mix_and_none_is_stuck(events: Events) -> None:
    """Workers join, leave and die, closures fail, are cancelled and run again: steps are made between rounds only."""
    world = RoundsWorld()
    mood = [*events.of(ALL), *[tick_and_apply] * 4, restart]
    while events.more:
        event = events.of(mood)
        getattr(RoundsWorld, event.__name__, event)(world, events)
        world.check()
    world.end_well()


# ------------------------------------------------------------------ the engine


def rounds_of(workers: int) -> tuple[FakeCluster, PlainOnCoordinator]:
    views = PlainOnCoordinator()
    views.staleness = 0
    cluster = FakeCluster(workers, views)
    for link in cluster.links:
        link.come_up()
    return cluster, views


def test_results_are_delivered_when_the_servers_have_made_the_steps() -> None:
    cluster, views = rounds_of(2)
    one, two = cluster.schedule(len), cluster.schedule(len)
    first, second = cluster.links
    first.report(finished(1, "a"))
    assert one.status.name == "NOT_READY"
    assert views.rounds == []
    second.report(finished(2, "b"))
    assert views.rounds == [(1, 2)]
    assert (one.get(), two.get()) == ("a", "b")


def test_get_begins_a_round_with_fewer_closures() -> None:
    cluster, views = rounds_of(2)
    value = cluster.schedule(len)
    assert [link.running() for link in cluster.links] == [[], []]
    value._want()
    assert [link.running() for link in cluster.links] == [[1], []]
    cluster.links[0].report(finished(1, 7))
    assert value.get() == 7
    assert views.rounds == [(1,)]


def test_an_error_of_the_servers_step_is_raised_once_and_no_value_hangs() -> None:
    cluster, views = rounds_of(2)

    def broken(closures: object) -> None:
        raise ValueError("the optimizer refuses")

    views.apply_round = broken  # type: ignore[method-assign]
    values = [cluster.schedule(len), cluster.schedule(len)]
    for link, number in zip(cluster.links, (1, 2), strict=True):
        link.report(finished(number))
    for value in values:
        with pytest.raises(ValueError, match="refuses"):
            value.get()
    assert cluster.engine.queue.stopped
    assert cluster.engine.queue.quiet


def test_a_failed_closure_leaves_the_round() -> None:
    cluster, views = rounds_of(2)
    one, two = cluster.schedule(len), cluster.schedule(len)
    cluster.links[0].report(failed(1, KeyError("mine")))
    cluster.links[1].report(finished(2, "b"))
    assert two.get() == "b"
    assert views.rounds == [(2,)]
    with pytest.raises(KeyError):
        one.get()
