"""Decides which closure goes to which worker, and what becomes of it when something fails.

Pure: no thread, no clock, no socket, no exception type of a worker. The coordinator tells it what
happened (`add`, `completed`, `worker_lost`, …) under its own lock and carries out the actions that
come back. Closures are known by their number alone.

Where a closure can be::

    add ──▶ queued ──take──▶ in flight ──completed/failed──▶ settled
              ▲                  │  │
              │   returned       │  └─worker_lost──▶ limbo ──fenced──▶ queued again (at the end)
              └──(not started)───┘                               └──▶ settled: poisoned, cancelled

*Limbo* is the time between a worker's loss and the moment every parameter server has confirmed that
it refuses that worker's late writes: only then may the closure run elsewhere.

Two kinds of closures: *shared* ones, which any worker may take, and *resources*, which belong to one
worker, are served first, are not counted by `idle`, and are aborted, not moved, when it is lost.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

QUEUE_LIMIT = 262_144
"""As tf.distribute (CCO-12): at some 500 bytes a closure this is about 130 MB."""

POISON_LIMIT = 3
"""A closure lost with this many workers in a row is taken to be the cause."""


class Fate(enum.Enum):
    """How a closure ended without a result of its own."""

    CANCELLED = "cancelled"
    ABORTED = "aborted"
    POISONED = "poisoned"


class ResolveClosure(NamedTuple):
    """The closure will not run (again): tell whoever waits for it."""

    closure: int
    fate: Fate
    workers: tuple[int, ...] = ()


class FenceWorker(NamedTuple):
    """Make every server refuse this life of the worker, then call `fenced`."""

    worker: int
    incarnation: int


class RecallClosures(NamedTuple):
    """Ask the worker to give back what it has not started; it answers with `returned`."""

    worker: int
    closures: tuple[int, ...]


Action = ResolveClosure | FenceWorker | RecallClosures


@dataclass(slots=True)
class _Worker:
    """One worker as the queue sees it."""

    incarnation: int = 0
    up: bool = False
    window: int = 2
    in_flight: dict[int, None] = field(default_factory=dict)  # an ordered set: sent first, first
    resources: dict[int, None] = field(default_factory=dict)  # resource closures in flight
    waiting_resources: deque[int] = field(default_factory=deque)
    recalling: bool = False
    solo: bool = False  # runs a closure that was lost before: nothing else is sent beside it


class ClosureQueue:
    """The queue and its decisions.

    Args:
        workers: how many workers there are; all start down.
        limit: closures that may be queued before `full`; 0 means no limit.
        poison_limit: losses in a row after which a closure is not tried again.

    Example:
        >>> queue = ClosureQueue(workers=2)
        >>> queue.add(1)
        >>> queue.worker_up(0, incarnation=1)
        >>> queue.take(0)
        [1]
        >>> queue.worker_lost(0)
        [FenceWorker(worker=0, incarnation=1)]
        >>> queue.fenced(0)
        []
        >>> queue
        <ClosureQueue [1 queued, 0 in flight, 0 in limbo, 0 of 2 workers up]>
    """

    def __init__(
        self, workers: int, *, limit: int = QUEUE_LIMIT, poison_limit: int = POISON_LIMIT
    ) -> None:
        self._workers = [_Worker() for _ in range(workers)]
        self._limit = limit
        self._poison_limit = poison_limit
        self._queued: deque[int] = deque()
        self._limbo: dict[int, list[int]] = {}
        self._lost_with: dict[int, list[int]] = {}
        self._in_flight = 0
        self._error: BaseException | None = None

    # ------------------------------------------------------------------ questions

    @property
    def full(self) -> bool:
        """Whether `add` must wait."""
        return 0 < self._limit <= len(self._queued)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, in flight or in limbo (resources not counted)."""
        return not self._queued and self.quiet

    @property
    def quiet(self) -> bool:
        """Whether nothing runs or may still run."""
        return self._in_flight == 0 and not any(self._limbo.values())

    @property
    def queued(self) -> int:
        """How many shared closures wait for a worker."""
        return len(self._queued)

    @property
    def in_flight(self) -> int:
        """How many shared closures are at a worker."""
        return self._in_flight

    @property
    def error(self) -> BaseException | None:
        """The first error since the last `clear_error`."""
        return self._error

    def is_up(self, worker: int) -> bool:
        """Whether the worker takes closures."""
        return self._workers[worker].up

    def workers_up(self) -> int:
        """How many workers take closures."""
        return sum(worker.up for worker in self._workers)

    def at_worker(self, worker: int) -> tuple[int, ...]:
        """Shared closures at this worker, oldest first."""
        return tuple(self._workers[worker].in_flight)

    def least_loaded_worker(self) -> int | None:
        """The worker with the fewest closures that has room for one, if there is work for it."""
        if not self._queued or self._error is not None:
            return None
        best, fewest = None, 0
        for number, worker in enumerate(self._workers):
            count = len(worker.in_flight)
            if (
                worker.up
                and count < worker.window
                and not worker.recalling
                and not worker.solo
                and (best is None or count < fewest)
            ):
                best, fewest = number, count
        return best

    # ------------------------------------------------------------------ work

    def add(self, closure: int) -> None:
        """A shared closure was scheduled; the caller has checked `full` and `error`."""
        if self._error is not None:
            raise RuntimeError("add() while an error waits to be raised: call clear_error() first.")
        self._queued.append(closure)

    def add_resource(self, closure: int, worker: int) -> list[Action]:
        """A closure only this worker may run; aborted at once while the worker is down."""
        if not self._workers[worker].up:
            return [ResolveClosure(closure, Fate.ABORTED)]
        self._workers[worker].waiting_resources.append(closure)
        return []

    def take(self, number: int) -> list[int]:
        """The closures to send to this worker now; they count as in flight from here on."""
        worker = self._workers[number]
        if not worker.up:
            return []
        taken: list[int] = []
        while worker.waiting_resources:
            closure = worker.waiting_resources.popleft()
            worker.resources[closure] = None
            taken.append(closure)
        if worker.recalling or worker.solo or self._error is not None:
            return taken
        room = worker.window - len(worker.in_flight)
        while room > 0 and self._queued:
            closure = self._queued[0]
            if self._lost_with and closure in self._lost_with:
                # It went down with a worker before. Alone on an idle worker its guilt, or its
                # innocence, is certain; beside others a loss would blame them all.
                if worker.in_flight:
                    break
                worker.solo = True
                room = 1
            self._queued.popleft()
            worker.in_flight[closure] = None
            self._in_flight += 1
            taken.append(closure)
            room -= 1
        return taken

    def completed(self, number: int, closure: int) -> bool:
        """The worker reports a result; False if this closure is not (any more) its business."""
        worker = self._workers[number]
        if closure in worker.in_flight:
            del worker.in_flight[closure]
            self._in_flight -= 1
            worker.solo = False
            worker.window = max(worker.window, 2)
            if self._lost_with:
                self._lost_with.pop(closure, None)
            return True
        if closure in worker.resources:
            del worker.resources[closure]
            return True
        return False

    def failed(self, number: int, closure: int, error: BaseException) -> list[Action] | None:
        """The worker reports a user's exception; None if the closure is not its business.

        The closure itself is settled by the caller, with the exception. For a resource the
        exception concerns nobody but those who use it; for a shared closure the queue stops.
        """
        shared = closure in self._workers[number].in_flight
        if not self.completed(number, closure):
            return None
        return self.stop(error) if shared else []

    def retry(self, number: int, closure: int) -> list[Action] | None:
        """The closure ended by a passing trouble, not by its own doing: queue it again."""
        if closure not in self._workers[number].in_flight:
            return None
        self.completed(number, closure)
        return self._requeue([closure])

    def returned(self, number: int, closures: Sequence[int]) -> list[Action]:
        """The worker gives back what it had not started; keeps the order of the queue."""
        worker = self._workers[number]
        worker.recalling = False
        back = [closure for closure in closures if closure in worker.in_flight]
        for closure in back:
            del worker.in_flight[closure]
        if back:
            worker.solo = False
        if worker.in_flight:
            worker.window = (
                1  # it is busy with something long: nothing is sent ahead until it is done
            )
        self._in_flight -= len(back)
        if self._error is not None:
            return [self._settle(closure, Fate.CANCELLED) for closure in back]
        self._queued.extendleft(reversed(back))
        return []

    def rebalance(self) -> list[Action]:
        """Takes back closures that wait behind a long one while another worker has nothing."""
        if self._queued or self._error is not None or self._in_flight < 2:
            return []
        if not any(worker.up and not worker.in_flight for worker in self._workers):
            return []
        return self._recall_all(at_least=2)

    def set_window(self, number: int, window: int) -> None:
        """How many closures may be at this worker at a time, the running one included."""
        self._workers[number].window = max(1, window)

    # ------------------------------------------------------------------ workers come and go

    def worker_up(self, number: int, *, incarnation: int) -> None:
        """The worker answers; `incarnation` is larger than that of its last life."""
        worker = self._workers[number]
        if worker.up or number in self._limbo:
            raise RuntimeError(f"worker {number} came up before its last life was settled.")
        worker.up = True
        worker.incarnation = incarnation

    def worker_lost(self, number: int) -> list[Action]:
        """The worker is gone. Its closures wait in limbo until `fenced`."""
        worker = self._workers[number]
        if not worker.up:
            return []
        actions: list[Action] = [FenceWorker(number, worker.incarnation)]
        actions += [ResolveClosure(closure, Fate.ABORTED) for closure in worker.resources]
        actions += [ResolveClosure(closure, Fate.ABORTED) for closure in worker.waiting_resources]
        self._limbo[number] = list(worker.in_flight)
        self._in_flight -= len(worker.in_flight)
        self._workers[number] = _Worker(incarnation=worker.incarnation, window=worker.window)
        return actions

    def fenced(self, number: int) -> list[Action]:
        """No server takes writes of that life any more: its closures may run elsewhere."""
        closures = self._limbo.pop(number, [])
        actions: list[Action] = []
        again = []
        for closure in closures:
            blame = self._lost_with.setdefault(closure, [])
            blame.append(number)
            if len(blame) < self._poison_limit:
                again.append(closure)
            else:
                actions.append(self._settle(closure, Fate.POISONED))
        return actions + self._requeue(again)

    # ------------------------------------------------------------------ errors

    def stop(self, error: BaseException) -> list[Action]:
        """Serves nothing more until `clear_error`: queued closures are cancelled now."""
        if self._error is not None:
            return []
        self._error = error
        cancelled = [self._settle(closure, Fate.CANCELLED) for closure in self._queued]
        self._queued.clear()
        return [*cancelled, *self._recall_all(at_least=1)]

    def abandon(self) -> list[int]:
        """Gives up what is in flight or in limbo, without waiting; late reports will not count.

        For errors after which nothing that runs can end well: a lost parameter server.
        """
        given_up = [closure for closures in self._limbo.values() for closure in closures]
        for number in self._limbo:
            self._limbo[number] = []
        for worker in self._workers:
            given_up += worker.in_flight
            worker.in_flight.clear()
            worker.solo = False
        self._in_flight = 0
        for closure in given_up:
            self._lost_with.pop(closure, None)
        return given_up

    def clear_error(self) -> BaseException | None:
        """The error, which has now been raised to the user; work may go on."""
        error, self._error = self._error, None
        return error

    # ------------------------------------------------------------------ inside

    def _requeue(self, closures: list[int]) -> list[Action]:
        if self._error is not None:
            return [self._settle(closure, Fate.CANCELLED) for closure in closures]
        self._queued.extend(closures)
        return []

    def _settle(self, closure: int, fate: Fate) -> ResolveClosure:
        return ResolveClosure(closure, fate, tuple(self._lost_with.pop(closure, ())))

    def _recall_all(self, *, at_least: int) -> list[Action]:
        actions: list[Action] = []
        for number, worker in enumerate(self._workers):
            if worker.up and len(worker.in_flight) >= at_least and not worker.recalling:
                worker.recalling = True
                actions.append(RecallClosures(number, tuple(worker.in_flight)))
        return actions

    @override
    def __repr__(self) -> str:
        limbo = sum(len(closures) for closures in self._limbo.values())
        failed = f", stopped by {self._error!r}" if self._error is not None else ""
        return (
            f"<ClosureQueue [{len(self._queued)} queued, {self._in_flight} in flight, "
            f"{limbo} in limbo, {self.workers_up()} of {len(self._workers)} workers up{failed}]>"
        )
