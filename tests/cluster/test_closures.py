"""The queue's decisions, by example and by thousands of random orders of events."""

from __future__ import annotations

import pytest
from orders import Events, orders

from stratagem._cluster.coordinator.closure_queue import (
    ClosureQueue,
    Fate,
    FenceWorker,
    RecallClosures,
    ResolveClosure,
)


def two_workers(**options: int) -> ClosureQueue:
    """A queue with both workers up."""
    queue = ClosureQueue(2, **options)
    queue.worker_up(0, incarnation=1)
    queue.worker_up(1, incarnation=1)
    return queue


def test_closures_are_taken_in_order_and_only_as_many_as_the_window() -> None:
    """CCO-12: first in, first out; a worker holds no more than its window."""
    queue = two_workers()
    for closure in range(5):
        queue.add(closure)
    assert queue.take(0) == [0, 1]
    assert queue.take(0) == []
    assert queue.take(1) == [2, 3]
    assert queue.completed(0, 0)
    assert queue.take(0) == [4]
    assert not queue.idle


def test_full_queue_says_so_and_zero_means_no_limit() -> None:
    """CCO-12: back-pressure at the limit."""
    queue = ClosureQueue(1, limit=2)
    queue.add(0)
    assert not queue.full
    queue.add(1)
    assert queue.full
    endless = ClosureQueue(1, limit=0)
    endless.add(0)
    assert not endless.full


def test_lost_worker_s_closures_wait_for_the_fence_then_go_to_the_end() -> None:
    """CCO-13, FLT-1, contract 6: nothing runs elsewhere before the fence stands."""
    queue = two_workers()
    for closure in range(5):
        queue.add(closure)
    queue.take(0)
    assert queue.worker_lost(0) == [FenceWorker(0, 1)]
    assert queue.take(1) == [2, 3]
    assert not queue.quiet
    assert queue.fenced(0) == []
    queue.completed(1, 2)
    queue.completed(1, 3)
    assert queue.take(1) == [4], "the queue's own order first, lost ones at the end"
    queue.completed(1, 4)
    assert queue.take(1) == [0], "a closure lost before runs alone"
    assert queue.take(1) == []
    queue.completed(1, 0)
    assert queue.take(1) == [1]
    queue.completed(1, 1)
    assert queue.idle


def test_a_report_of_a_lost_worker_is_nobody_s_business() -> None:
    """A result that arrives after the loss was decided is not counted twice."""
    queue = two_workers()
    queue.add(7)
    queue.take(0)
    queue.worker_lost(0)
    assert not queue.completed(0, 7)
    assert queue.failed(0, 7, ValueError()) is None
    assert queue.retry(0, 7) is None


def test_closure_lost_with_three_workers_is_poisonous_and_its_neighbours_are_not() -> None:
    """The closure that kills is found; one that was merely beside it is run to its end."""
    queue = two_workers()
    queue.add(1)
    queue.add(2)
    assert queue.take(0) == [1, 2]
    settled: list[ResolveClosure] = []
    finished = []
    for life in range(2, 12):
        queue.worker_lost(0)
        settled += [action for action in queue.fenced(0) if isinstance(action, ResolveClosure)]
        queue.worker_up(0, incarnation=life)
        while taken := queue.take(0):
            if taken == [2]:
                break  # closure 2 kills the worker it runs on
            assert taken == [1]
            queue.completed(0, 1)
            finished.append(1)
    assert settled == [ResolveClosure(2, Fate.POISONED, (0, 0, 0))]
    assert finished == [1]


def test_first_error_stops_the_queue_at_once_and_cancels_what_waits() -> None:
    """13.8, CCO-22: nothing more is served; what has not started comes back cancelled."""
    queue = two_workers()
    for closure in range(6):
        queue.add(closure)
    assert queue.take(0) == [0, 1]
    assert queue.take(1) == [2, 3]
    error = ValueError("first")
    actions = queue.failed(0, 0, error)
    assert actions == [
        ResolveClosure(4, Fate.CANCELLED),
        ResolveClosure(5, Fate.CANCELLED),
        RecallClosures(0, (1,)),
        RecallClosures(1, (2, 3)),
    ]
    assert queue.take(0) == queue.take(1) == []
    assert queue.returned(0, [1]) == [ResolveClosure(1, Fate.CANCELLED)]
    assert queue.returned(1, [3]) == [ResolveClosure(3, Fate.CANCELLED)]
    assert not queue.quiet, "closure 2 is running and is waited for"
    assert queue.failed(1, 2, ValueError("second")) == []
    assert queue.quiet
    assert queue.error is error
    assert queue.clear_error() is error
    queue.add(6)
    assert queue.take(1) == [6], "after the error was raised work goes on"


def test_put_back_after_an_error_is_cancelled_instead() -> None:
    """FLT-7: a closure lost while an error waits to be raised is not run again."""
    queue = two_workers()
    queue.add(0)
    queue.take(0)
    queue.worker_lost(0)
    queue.stop(ValueError())
    assert queue.fenced(0) == [ResolveClosure(0, Fate.CANCELLED, (0,))]
    queue.clear_error()
    queue.add(1)
    queue.take(1)
    queue.stop(ValueError())
    assert queue.retry(1, 1) == [ResolveClosure(1, Fate.CANCELLED)]


def test_resources_come_first_are_not_counted_and_are_aborted_with_their_worker() -> None:
    """CCO-15, CCO-33, FLT-2."""
    queue = two_workers()
    queue.add(1)
    assert queue.add_resource(10, 0) == []
    assert queue.take(0) == [10, 1]
    queue.completed(0, 1)
    assert queue.idle
    queue.add_resource(11, 0)
    assert queue.worker_lost(0) == [
        FenceWorker(0, 1),
        ResolveClosure(10, Fate.ABORTED),
        ResolveClosure(11, Fate.ABORTED),
    ]
    assert queue.add_resource(12, 0) == [ResolveClosure(12, Fate.ABORTED)]
    queue.fenced(0)
    assert queue.idle


def test_a_failed_resource_stops_nothing() -> None:
    """CCO-25: it concerns only those who use it."""
    queue = two_workers()
    queue.add_resource(10, 0)
    queue.take(0)
    assert queue.failed(0, 10, ValueError()) == []
    assert queue.error is None


def test_idle_worker_gets_what_waits_behind_a_long_closure() -> None:
    """CCO-12, any idle worker takes the next: also what another had been sent ahead."""
    queue = two_workers()
    for closure in range(3):
        queue.add(closure)
    assert queue.take(0) == [0, 1]
    assert queue.take(1) == [2]
    assert queue.rebalance() == []
    queue.completed(1, 2)
    assert queue.rebalance() == [RecallClosures(0, (0, 1))]
    assert queue.rebalance() == [], "asked once"
    queue.returned(0, [1])
    assert queue.take(1) == [1]


def test_misuse_is_refused() -> None:
    """The coordinator's own mistakes do not pass silently."""
    queue = two_workers()
    with pytest.raises(RuntimeError, match="worker 0 came up"):
        queue.worker_up(0, incarnation=2)
    queue.stop(ValueError())
    with pytest.raises(RuntimeError, match="clear_error"):
        queue.add(1)


WORKERS = 3


class World:
    """A queue, and what happens around it, modelled plainly. Which events happen how often: below."""

    def __init__(self) -> None:
        self.queue = ClosureQueue(WORKERS, poison_limit=3)
        self.next_closure = 0
        self.open: set[int] = set()  # shared closures whose future is not settled
        self.open_resources: set[int] = set()
        self.resources: set[int] = set()
        self.settled: set[int] = set()
        self.lives = [0] * WORKERS
        self.alive = [False] * WORKERS
        self.limbo: set[int] = set()
        self.held: list[list[int]] = [[] for _ in range(WORKERS)]
        self.recalled: set[int] = set()

    def act(self, actions: list[object] | None) -> None:
        for action in actions or ():
            if isinstance(action, ResolveClosure):
                self.settle(action.closure)
                if action.fate is Fate.POISONED:
                    assert len(action.workers) == 3
                    self.act(self.queue.stop(RuntimeError("poison")))
            elif isinstance(action, RecallClosures):
                assert self.alive[action.worker]
                self.recalled.add(action.worker)

    def settle(self, closure: int) -> None:
        assert closure not in self.settled, "completed or settled twice"
        self.settled.add(closure)
        self.open.discard(closure)
        self.open_resources.discard(closure)

    def check(self) -> None:
        assert self.queue.idle == (not self.open)

    # What happens; each reads from the events what it needs to know.

    def nothing(self, events: Events) -> None:
        self.queue.least_loaded_worker()

    def schedule(self, events: Events) -> None:
        for _ in range(1 + events.below(4)):
            if self.queue.error is None:
                self.queue.add(self.next_closure)
                self.open.add(self.next_closure)
                self.next_closure += 1

    def create_resource(self, events: Events) -> None:
        closure, self.next_closure = self.next_closure, self.next_closure + 1
        self.open_resources.add(closure)
        self.resources.add(closure)
        self.act(self.queue.add_resource(closure, events.below(WORKERS)))

    def come_up(self, events: Events) -> None:
        self.bring_up(events.below(WORKERS))

    def bring_up(self, worker: int) -> None:
        if not self.alive[worker] and worker not in self.limbo:
            self.lives[worker] += 1
            self.alive[worker] = True
            self.queue.worker_up(worker, incarnation=self.lives[worker])

    def take(self, events: Events) -> None:
        self.take_for(events.below(WORKERS))

    def take_for(self, worker: int) -> None:
        taken = self.queue.take(worker)
        assert not taken or self.alive[worker]
        assert all(taken.count(closure) == 1 for closure in taken)
        for held in self.held:
            assert not any(closure in held for closure in taken), "a closure at two workers"
        self.held[worker] += taken

    def feed_the_hungriest(self, events: Events) -> None:
        worker = self.queue.least_loaded_worker()
        if worker is not None:
            self.take_for(worker)

    def finish_one(self, events: Events) -> None:
        self.finish(events.below(WORKERS), events.of(["done"] * 7 + ["retry"]))

    def fail_one(self, events: Events) -> None:
        self.finish(events.below(WORKERS), "error")

    def finish(self, worker: int, how: str) -> None:
        if not self.alive[worker] or not self.held[worker]:
            return
        closure = self.held[worker].pop(0)
        if how == "retry" and closure not in self.resources:
            self.act(self.queue.retry(worker, closure))
        elif how == "error":
            self.settle(closure)
            self.act(self.queue.failed(worker, closure, ValueError(closure)))
        else:
            assert self.queue.completed(worker, closure)
            self.settle(closure)

    def die_at_work(self, events: Events) -> None:
        worker = events.below(WORKERS)
        self.bring_up(worker)
        self.take_for(worker)
        self.lose_one(worker)
        self.fence_off(worker)

    def lose(self, events: Events) -> None:
        self.lose_one(events.below(WORKERS))

    def lose_one(self, worker: int) -> None:
        actions = self.queue.worker_lost(worker)
        if self.alive[worker]:
            assert actions[0] == FenceWorker(worker, self.lives[worker])
            self.limbo.add(worker)
        else:
            assert actions == []
        self.alive[worker] = False
        self.recalled.discard(worker)
        late, self.held[worker] = self.held[worker], []
        self.act(actions)
        for closure in late:
            assert not self.queue.completed(worker, closure), "a late report counted"

    def fence(self, events: Events) -> None:
        self.fence_off(events.below(WORKERS))

    def fence_off(self, worker: int) -> None:
        if worker in self.limbo:
            self.limbo.discard(worker)
            self.act(self.queue.fenced(worker))

    def answer_recall(self, events: Events) -> None:
        self.give_back(events.below(WORKERS), events.below(3))

    def give_back(self, worker: int, keep: int) -> None:
        if worker in self.recalled:
            self.recalled.discard(worker)
            back = [c for c in self.held[worker][keep:] if c not in self.resources]
            self.held[worker] = [c for c in self.held[worker] if c not in back]
            self.act(self.queue.returned(worker, back))

    def rebalance(self, events: Events) -> None:
        self.act(self.queue.rebalance())

    def lose_a_server(self, events: Events) -> None:
        self.act(self.queue.stop(RuntimeError("server lost")))
        for closure in self.queue.abandon():
            self.settle(closure)
        for held in self.held:
            held[:] = [closure for closure in held if closure in self.resources]
        assert self.queue.quiet

    def change_window(self, events: Events) -> None:
        self.queue.set_window(events.below(WORKERS), 1 + events.below(5))

    def raise_error(self, events: Events) -> None:
        self.clear_error()

    def clear_error(self) -> None:
        if self.queue.error is not None and self.queue.quiet:
            self.queue.clear_error()

    def end_well(self) -> None:
        """From any state: bring everybody up, answer everything, and no future is stuck."""
        for _ in range(40):
            for worker in range(WORKERS):
                self.fence_off(worker)
                self.bring_up(worker)
                self.give_back(worker, 0)
                self.take_for(worker)
                while self.held[worker]:
                    self.finish(worker, "done")
            self.clear_error()
            if not self.open and not self.open_resources:
                break
        assert self.open == self.open_resources == set(), "stuck futures"
        assert self.settled == set(range(self.next_closure)), "lost closures"
        assert self.queue.idle


CALM = [
    World.nothing,
    *[World.schedule, World.take, World.feed_the_hungriest] * 3,
    *[World.finish_one, World.come_up] * 5,
    *[World.lose, World.fence, World.answer_recall, World.raise_error] * 2,
    *[World.create_resource, World.rebalance, World.change_window],
]
# Workers die under what they have just been given, again and again.
DEADLY = [
    World.nothing,
    *[World.come_up, World.take, World.lose, World.fence] * 2,
    *[World.die_at_work] * 6,
    *[World.schedule, World.finish_one, World.answer_recall, World.raise_error] * 2,
]
# Errors of users and of servers come between.
ANGRY = [*CALM, World.lose_a_server, World.fail_one, World.fail_one]


@orders(4000, events=60)
def test_in_any_order_no_closure_is_lost_or_completed_twice_and_no_future_is_stuck(
    events: Events,
) -> None:
    """Issue 4, section 6; CCO-12, CCO-13, FLT-1, FLT-7 in orders nobody would think of."""
    world = World()
    mood = events.of([CALM, DEADLY, ANGRY])
    while events.more:
        events.of(mood)(world, events)
        world.check()
    world.end_well()
