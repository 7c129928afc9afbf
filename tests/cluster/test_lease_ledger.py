"""Leases of a shared dataset: the order, the account, and which worker reads which part."""

from __future__ import annotations

import json
from collections import Counter, deque
from typing import Any

import pytest
from orders import Events, orders

from stratagem._cluster.coordinator.lease_ledger import Lease, LeaseLedger, LeaseOrder
from stratagem._cluster.coordinator.queue_state import LOOK, ClosureChoice


def elements_of(leases: list[Lease]) -> Counter[tuple[int, int, int]]:
    """Count (epoch, part, element)."""
    return Counter(
        (lease.epoch, lease.part, lease.first + i)
        for lease in leases
        for i in range(lease.elements)
    )


def epoch_of(order: LeaseOrder) -> list[Lease]:
    found = []
    while (lease := order.next()) is not None:
        found.append(lease)
    return found


# ------------------------------------------------------------------ the order


@orders(2000, events=20)
def test_an_epoch_leases_every_element_once(events: Events) -> None:
    """With any sizes, known at once or late; with any number of parts read in turn; at any position."""
    sizes = [events.below(5) for _ in range(events.below(12))]
    options: dict[str, Any] = {
        "interleave": 1 + events.below(4),
        "per_closure": 1 + events.below(3),
        "seed": events.below(9),
        "shuffled": bool(events.below(2)),
    }
    known = LeaseOrder(list(sizes), **options)
    late = LeaseOrder([None] * len(sizes), **options)
    everything = Counter((0, part, i) for part, size in enumerate(sizes) for i in range(size))
    expected = epoch_of(known)
    assert elements_of(expected) == everything
    found = []
    while True:
        while (part := late.unsized) is not None:
            late.sizes[part] = sizes[part]
        lease = late.next()
        if lease is None:
            break
        found.append(lease)
        if events.below(4) == 0:  # continue in another process
            state = json.loads(json.dumps(late.state()))
            late = LeaseOrder(late.sizes, **{**options, "seed": 77})
            late.load(state)
    assert found == expected, "the order depends on when sizes become known, or on the position"
    known.begin_epoch()
    again = epoch_of(known)
    assert [lease.number for lease in again] == list(range(len(expected)))
    assert elements_of(again) == Counter((1, part, i) for _, part, i in everything)
    assert list(known.leases_of(1)) == again


def test_parts_are_read_in_turn_and_replaced_when_they_end() -> None:
    order = LeaseOrder([3, 1, 2], interleave=2)
    assert [(lease.part, lease.first) for lease in epoch_of(order)] == [
        (0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (2, 1),
    ]  # fmt: skip


def test_shuffled_epochs_have_different_orders_of_parts() -> None:
    order = LeaseOrder([1] * 20, seed=3, shuffled=True)
    first = [lease.part for lease in epoch_of(order)]
    order.begin_epoch()
    second = [lease.part for lease in epoch_of(order)]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != list(range(20))


# ------------------------------------------------------------------ the account


class Program:
    """Schedules closures and lets things happen to them, as the coordinator does."""

    def __init__(self, events: Events, *, at_least_once: bool) -> None:
        self.events = events
        self.at_least_once = at_least_once
        self.sizes = [1 + events.below(4) for _ in range(1 + events.below(4))]
        self.options: dict[str, Any] = {
            "interleave": 1 + events.below(3),
            "per_closure": 1 + events.below(2),
            "shuffled": True,
        }
        self.epochs = 1 + events.below(3)
        self.ledger = self.new_ledger()
        self.number = 0
        self.queued: dict[int, Lease] = {}
        self.running: dict[int, Lease] = {}
        self.trained: list[Lease] = []  # as the variables have them
        self.ran: set[int] = set()  # closures that a lost worker may have run in part
        self.failures = 0

    def new_ledger(self) -> LeaseLedger:
        order = LeaseOrder(list(self.sizes), **self.options)
        return LeaseLedger(order, passes=self.epochs, at_least_once=self.at_least_once)

    def schedule(self) -> bool:
        self.number += 1
        lease = self.ledger.lease(self.number)
        if lease is None:
            return False
        self.queued[self.number] = lease
        return True

    def pick(self, of: dict[int, Lease]) -> int:
        return list(of)[self.events.below(len(of))]

    def send(self) -> None:
        closure = self.pick(self.queued)
        self.running[closure] = self.queued.pop(closure)

    def finish(self) -> None:
        closure = self.pick(self.running)
        lease = self.running.pop(closure)
        self.trained.append(lease)
        self.ledger.finished(
            closure, elements=lease.elements, rows=lease.elements, exactly_once=True
        )

    def lose_worker(self) -> None:
        closure = self.pick(self.running)
        self.ledger.runs_again(closure)
        self.ran.add(closure)
        self.queued[closure] = self.running.pop(closure)

    def end_in_doubt(self, lease: Lease) -> None:
        """Apply the closure, or not."""
        self.failures += 1
        if self.events.below(2):
            self.trained.append(lease)

    def fail(self) -> None:
        """One closure fails after it was applied, perhaps; those that are queued are cancelled."""
        closure = self.pick(self.running)
        self.end_in_doubt(self.running.pop(closure))
        self.ledger.ended(closure, ran=True)
        for other, lease in self.queued.items():
            if other in self.ran:
                self.end_in_doubt(lease)
            self.ledger.ended(other, ran=False)
        self.queued.clear()

    def restart_from_checkpoint(self) -> None:
        """Closures that run may be in the cut; the queue is forgotten."""
        state = json.loads(json.dumps(self.ledger.state(unsent=set(self.queued))))
        for closure, lease in {**self.queued, **self.running}.items():
            if closure in self.running or closure in self.ran:
                self.end_in_doubt(lease)
        self.queued.clear()
        self.running.clear()
        self.ledger = self.new_ledger()
        self.ledger.load(state)

    def continue_job(self) -> None:
        """A mark counts when all closures before it have finished."""
        state = json.loads(json.dumps(self.ledger.state_when_finished()))
        self.trained += [*self.queued.values(), *self.running.values()]
        self.queued.clear()
        self.running.clear()
        self.ledger = self.new_ledger()
        self.ledger.load(state)

    def run(self) -> None:
        """Run one pass, whatever happens; then settle everything."""
        ended = False
        while not ended or self.queued or self.running or self.ledger.returned:
            choices = [self.schedule] if not ended or self.ledger.returned else []
            choices += [self.send] if self.queued else []
            choices += [self.finish, self.lose_worker] if self.running else []
            if self.events.more:
                choices += [self.restart_from_checkpoint, self.continue_job]
                choices += [self.fail] if self.running else []
            else:  # end it
                choices = [one for one in choices if one != self.lose_worker]
            if self.events.of(choices)() is False:
                ended = True

    def everything(self) -> Counter[tuple[int, int, int]]:
        return Counter(
            (epoch, part, i)
            for epoch in range(self.epochs)
            for part, size in enumerate(self.sizes)
            for i in range(size)
        )


@orders(4000, events=60)
def test_every_element_is_used_at_most_once_and_the_ledger_says_which_were_lost(
    events: Events,
) -> None:
    """Issue 14, point 2. Exactly once without failures of functions; otherwise losses are accounted for."""
    program = Program(events, at_least_once=False)
    program.run()
    trained, lost = elements_of(program.trained), elements_of(program.ledger.lost)
    everything = program.everything()
    assert not trained - everything, "an element was trained twice"
    assert trained | lost == everything, "an element is missing, and the ledger does not say so"
    assert not program.ledger.repeated
    if not program.failures:
        assert trained == everything
        assert not lost
    assert "0 held, 0 returned" in repr(program.ledger)


@orders(4000, events=60)
def test_every_element_is_used_at_least_once_if_asked_for(events: Events) -> None:
    """Issue 14, point 2. Elements that were perhaps trained twice are in `repeated`."""
    program = Program(events, at_least_once=True)
    program.run()
    trained, everything = elements_of(program.trained), program.everything()
    assert not everything - trained, "an element was not trained"
    assert not program.ledger.lost
    repeated = elements_of(program.ledger.repeated)
    assert set(trained - everything) <= set(repeated), "an element was trained twice in silence"
    if not program.failures:
        assert trained == everything
        assert not repeated


def test_elements_that_a_function_does_not_read_are_lost() -> None:
    ledger = LeaseLedger(LeaseOrder([4], per_closure=4))
    assert ledger.lease(1) is not None
    ledger.finished(1, elements=1, rows=8, exactly_once=True)
    assert [(lease.first, lease.elements) for lease in ledger.lost] == [(1, 3)]
    assert ledger.rows == 8


def test_a_repeated_closure_without_exactly_once_is_noted() -> None:
    ledger = LeaseLedger(LeaseOrder([2]))
    for closure in (1, 2):
        ledger.lease(closure)
        ledger.runs_again(closure)
    ledger.finished(1, elements=1, rows=1, exactly_once=True)
    assert ledger.repeated == []
    ledger.finished(2, elements=1, rows=1, exactly_once=False)
    assert [lease.first for lease in ledger.repeated] == [1]


def test_the_end_is_reported_once_and_the_next_lease_begins_an_epoch() -> None:
    ledger = LeaseLedger(LeaseOrder([1]), passes=2)
    found = [ledger.lease(closure) for closure in range(1, 7)]
    assert [None if lease is None else lease.epoch for lease in found] == [0, 1, None, 2, 3, None]
    empty = LeaseLedger(LeaseOrder([0, 0]), passes=None)
    assert [empty.lease(1), empty.lease(2)] == [None, None]
    endless = LeaseLedger(LeaseOrder([1]), passes=None)
    assert [endless.lease(n).epoch for n in range(1, 6)] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]


def test_leases_that_come_back_go_to_the_next_closures_in_order() -> None:
    ledger = LeaseLedger(LeaseOrder([5]))
    for closure in range(1, 5):
        ledger.lease(closure)
    for closure in (3, 1):
        ledger.ended(closure, ran=False)
    assert [ledger.lease(n).first for n in (5, 6, 7)] == [0, 2, 4]  # type: ignore[union-attr]
    assert ledger.lease(8) is None
    ledger.ended(2, ran=False)
    assert [ledger.lease(n) is None for n in (9, 10)] == [False, True], "the end is reported again"
    assert ledger.lease(11).epoch == 1  # type: ignore[union-attr]


# ------------------------------------------------------------------ workers and parts


@orders(1000, events=60)
def test_closures_do_not_wait_for_more_than_some_others(events: Events) -> None:
    """Every closure is sent, and the first one waits for at most LOOK others, even if its worker takes none."""
    parts = {n: (None, "a", "b", "b", "b")[events.below(5)] for n in range(200)}
    choice = ClosureChoice(parts.get)
    queue = deque(range(200))
    choice.choose(9, [next(n for n in parts if parts[n] == "a")] if "a" in parts.values() else [0])
    waited = 0
    while queue:
        place = choice.choose(events.below(3), queue)
        assert place < LOOK
        waited = waited + 1 if place else 0
        assert waited <= LOOK
        del queue[place]
        if events.below(20) == 0:
            choice.forget_worker(events.below(3))


def test_workers_read_different_parts() -> None:
    """Two workers that take closures in turn open each part once, although the parts alternate."""
    parts = [n % 8 for n in range(400)]
    choice = ClosureChoice(parts.__getitem__)
    queue, opened = deque(range(400)), Counter()  # type: ignore[var-annotated]
    for n in range(400):
        place = choice.choose(n % 2, queue)
        opened[n % 2, parts[queue[place]]] += 1
        del queue[place]
    assert len(opened) <= 10, "parts are read by several workers"


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_a_lost_worker_leaves_its_parts_to_others(workers: int) -> None:
    choice = ClosureChoice(lambda n: n % 4)
    for worker in range(workers):
        choice.choose(worker, [worker])
    for worker in range(workers):
        choice.forget_worker(worker)
    choice.choose(99, [0])
    assert choice.choose(98, [0, 1]) == 1, "part 1 is read by nobody"
