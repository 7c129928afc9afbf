"""Tables of unfinished closures and of per-worker values; they store results and errors in the remote values.

They execute, for the engine and under its lock, the queue's actions that need no I/O.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

from stratagem import metrics
from stratagem._cluster.coordinator.closure_actions import (
    Action,
    DeliverResults,
    RequeueClosure,
    ResolveClosure,
)
from stratagem._cluster.coordinator.remote_values import (
    ClosureRecord,
    PerWorkerValues,
    RemoteValue,
    ResultCondition,
)
from stratagem._cluster.coordinator.sender import Call, Closure
from stratagem._cluster.coordinator.shared_dataset import SharedDataset, lease_all
from stratagem._ps.coordinator.named_job import NamedJob
from stratagem._wire import messages
from stratagem._wire.codec import unpack
from stratagem._wire.messages import Frame
from stratagem.errors import (
    ClosureAborted,
    ClosureCancelled,
    ClosureLostTooOften,
    ParameterServerLost,
    WorkerLost,
)

_log = logging.getLogger("stratagem.coordinator")

RETRY_LOG_S: Final = 1.0
"""Retries of one worker are logged as warnings so often: a lost server makes dozens within its restart."""


class Cause(NamedTuple):
    """The error behind an event, and the task that reported it."""

    error: BaseException
    task: str = ""
    remote_traceback: str = ""


@final
class ClosureTable:
    """Closures by number, and what became of those that ended.

    Scheduled closures are numbered in order, from 1 or after those of earlier coordinators of a named job. Closures that
    build per-worker values have numbers below 0: how many there are depends on failures, and the numbers of scheduled closures
    must be the same in every run.

    Another coordinator of a named job may run closures again that failed or were cancelled here, under the same
    numbers. So servers learn that these ended only when the program has gone on.
    """

    def __init__(self, heartbeat_limit_s: float, job: NamedJob | None) -> None:
        self.errors: deque[ClosureRecord] = deque(maxlen=1000)  # the oldest are dropped
        self.finished = 0
        self.ended: list[int] = []  # closures whose late writes servers must refuse
        self.argument_bytes = 0  # of the closures that are not done
        self._limit_s = heartbeat_limit_s  # for the text of an error
        self._closures: dict[int, Closure] = {}
        self._may_repeat = job is not None
        self._next = 1 if job is None else job.first_closure
        self._resource_numbers = itertools.count(-1, -1)
        # Ended without a result, and the program has not gone on since.
        self._unfinished: set[int] = set()
        self._warned: dict[str, float] = {}  # when, by worker
        self._counters = {
            what: metrics.counter(f"coordinator.{what}")
            for what in ("scheduled", "completed", "failed", "retried", "closures_repeated")
        }
        self._queue_s, self._send_s, self._compute_s = (
            metrics.timer(f"closure.{phase}") for phase in ("queue", "send", "compute")
        )

    def __getitem__(self, number: int) -> Closure:
        return self._closures[number]

    def __contains__(self, number: int) -> bool:
        return number in self._closures

    def add(self, closure: Closure, datasets: Sequence[SharedDataset] = ()) -> int:
        """Give the closure a number, and elements of these datasets; keep it until it is done.

        Raises:
            EndOfData: a dataset has no more elements.
        """
        if closure.resource:
            closure.number = next(self._resource_numbers)
        else:
            closure.leases = lease_all(self._next, datasets) if datasets else ()
            closure.number = closure.value._closure = self._next
            self._next += 1
            self._counters["scheduled"].add()
        self._closures[closure.number] = closure
        self.argument_bytes += closure.call.argument_bytes
        return closure.number

    @property
    def last_number(self) -> int:
        """Number of the closure that was scheduled last."""
        return self._next - 1

    def continue_at(self, number: int) -> None:
        """Give this number, above those of all scheduled closures, to the next one."""
        self._next = number

    def progress(self, *, went_on: bool) -> tuple[int, int, int | None]:
        """Return the number of the next closure, the lowest unfinished one, and the lowest accepted failure.

        With `went_on`, the program has gone on after closures failed or were cancelled: these count as finished.
        """
        accepted = None
        if went_on and self._unfinished:
            accepted = min(self._unfinished)
            self.ended.extend(self._unfinished)
            self._unfinished.clear()
        first = next((number for number in self._closures if number > 0), self._next)
        return self._next, min(first, *self._unfinished, first), accepted

    def deliver(self, frames: Sequence[Frame]) -> None:
        """Store results."""
        arrived = time.perf_counter()
        for frame in frames:
            message = frame.message
            assert isinstance(message, messages.Finished)
            closure = self._closures.pop(message.closure)
            self.argument_bytes -= closure.call.argument_bytes
            closure.value._set(message.value, frame)
            for held, (elements, rows) in zip(closure.leases, message.leased, strict=True):
                held.dataset._ledger.finished(
                    closure.number,
                    elements=elements,
                    rows=rows,
                    exactly_once=closure.exactly_once,
                )
            if not closure.resource:
                self.ended.append(closure.number)
                at_worker_s = message.waited_s + message.ran_s
                self._queue_s.record(closure.sent_at - closure.scheduled_at + message.waited_s)
                self._compute_s.record(message.ran_s)
                self._send_s.record(max(0.0, arrived - closure.sent_at - at_worker_s))
        self.finished += len(frames)
        self._counters["completed"].add(len(frames))

    def resolve(
        self, action: ResolveClosure, cause: Cause | None, workers: Sequence[str]
    ) -> Cause | None:
        """Resolve a closure without a result; return the cause of the actions that follow.

        `workers`: names of the workers that it was lost with.
        """
        closure = self._closures.pop(action.closure, None)
        if closure is None:
            return cause
        self.argument_bytes -= closure.call.argument_bytes
        for held in closure.leases:
            ran = action.fate not in ("cancelled", "withdrawn")
            held.dataset._ledger.ended(closure.number, ran=ran)
        if action.fate == "cancelled":
            closure.value._fail(
                ClosureCancelled(
                    f"{closure.name} was cancelled because another closure failed; schedule it "
                    "again if it still matters."
                )
            )
        elif action.fate == "withdrawn":
            closure.value._fail(ClosureCancelled(f"{closure.name} was cancelled by cancel()."))
        elif action.fate == "aborted":
            closure.value._abort(aborted(None if cause is None else cause.error))
        else:
            if action.fate == "poisoned":
                cause = Cause(self._lost_too_often(closure, workers), workers[-1])
            assert cause is not None
            closure.value._fail(cause.error)
            # A resource that failed to build concerns only the closures that use it (CCO-25).
            if action.fate != "given up" and not closure.resource:
                self._counters["failed"].add()
                self.keep_error(cause, closure)
        if not closure.resource:
            if self._may_repeat:
                self._unfinished.add(closure.number)
            else:
                self.ended.append(closure.number)
        return cause

    def note_requeued(self, action: RequeueClosure, cause: Cause | None) -> None:
        """Count a closure that runs again."""
        for held in self._closures[action.closure].leases:
            held.dataset._ledger.runs_again(action.closure)
        if action.lost:
            self._counters["closures_repeated"].add()
        elif cause is not None and not isinstance(cause.error, StopIteration):  # else no data left
            self._counters["retried"].add()
            name = self._closures[action.closure].name
            now = time.monotonic()
            is_new = now - self._warned.get(cause.task, -math.inf) >= RETRY_LOG_S
            if is_new:
                self._warned[cause.task] = now
            level = logging.WARNING if is_new else logging.DEBUG
            lost = cause.error
            if isinstance(lost, ParameterServerLost):  # its text is advice for a run that has ended
                _log.log(
                    level, "%s runs again, because %s cannot reach %s", name, cause.task, lost.task
                )
            else:
                _log.log(
                    level, "%s runs again, because it failed on %s: %s", name, cause.task, lost
                )

    def keep_error(self, cause: Cause, closure: Closure | None = None) -> None:
        """Keep an error for `coordinator.errors`."""
        number, name = (None, "") if closure is None else (closure.number, closure.name)
        self.errors.append(
            ClosureRecord(
                closure=number,
                function=name,
                worker=cause.task,
                error=cause.error,
                remote_traceback=cause.remote_traceback,
            )
        )

    def cancel_all(self, error: ClosureCancelled) -> None:
        """Resolve every closure with this error."""
        for closure in self._closures.values():
            closure.value._fail(error)
        self._closures.clear()
        self.argument_bytes = 0

    def _lost_too_often(self, closure: Closure, workers: Sequence[str]) -> ClosureLostTooOften:
        return ClosureLostTooOften(
            f"{closure.name} was lost with {len(workers)} workers in a row "
            f"({', '.join(workers)}) and is not tried again. It probably ends the process (out of "
            "memory, a crash in native code, os._exit), or keeps the worker from answering for "
            f"more than {self._limit_s:g} s.",
            closure=closure.name,
            workers=workers,
        )


def reported_advances(
    frames: Sequence[Frame], done: Sequence[Action]
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield number and advances of each report that has some; none of a closure whose result is not delivered.

    Args:
        frames: messages of one worker, in order.
        done: actions of the queue about them.
    """
    counted: set[int] = set()
    for action in done:
        if isinstance(action, DeliverResults):
            counted.update(action.closures)
    for frame in frames:
        message = frame.message
        if isinstance(message, messages.Finished) and message.advances is not None:
            counts = message.closure in counted
            yield message.report, unpack(message.advances, frame) if counts else ()
        elif isinstance(message, messages.Failed) and message.report:
            yield message.report, ()


def aborted(lost: BaseException | None) -> ClosureAborted:
    """Return the error of a value whose worker is gone."""
    return ClosureAborted(f"the worker holding this value is gone: {lost}", original_exception=lost)


@final
class ResourceTable:
    """Per-worker values by number, as long as the program refers to them. The engine's lock guards it."""

    def __init__(self, condition: ResultCondition) -> None:
        self._condition = condition
        self._resources: dict[int, tuple[weakref.ref[PerWorkerValues], Call]] = {}
        self._numbers = itertools.count(1)
        self._collected: deque[int] = deque()  # resources that nothing refers to any more

    def add(self, call: Call, workers: Iterable[int]) -> tuple[int, PerWorkerValues]:
        """Make a value for these workers, which the call builds."""
        number, collected = next(self._numbers), self._collected
        values = PerWorkerValues._make(f"resource {call.function.name}", number)
        # The callback may run in any thread at any time, so it only notes the number (CCO-32).
        reference = weakref.ref(values, lambda _: collected.append(number))
        self._resources[number] = (reference, call)
        for worker in workers:
            values._by_worker[worker] = RemoteValue(self._condition, values._name)
        return number, values

    def call(self, number: int) -> Call:
        """Return the call that builds a value."""
        return self._resources[number][1]

    def live(self) -> list[tuple[int, PerWorkerValues]]:
        """Return the values that are still referenced, by number."""
        found = [(number, reference()) for number, (reference, _) in self._resources.items()]
        return [(number, values) for number, values in found if values is not None]

    def take_collected(self) -> list[int]:
        """Forget the values that are not referenced any more; return their numbers."""
        released = [self._collected.popleft() for _ in range(len(self._collected))]
        for number in released:
            del self._resources[number]
        return released

    def worker_joined(self, worker: int, reason: WorkerLost) -> None:
        """Add a worker to every value; it has none until it is up."""
        for _, values in self.live():
            values._by_worker[worker] = RemoteValue(self._condition, values._name)
        self.worker_lost(worker, reason)

    def worker_lost(self, worker: int, reason: WorkerLost) -> None:
        """Abort the values of a worker."""
        for _, values in self.live():
            if worker in values._by_worker:
                values._by_worker[worker]._abort(aborted(reason))

    def worker_left(self, worker: int, reason: WorkerLost) -> None:
        """Abort the values of a worker and forget it."""
        self.worker_lost(worker, reason)
        for _, values in self.live():
            values._by_worker.pop(worker, None)
