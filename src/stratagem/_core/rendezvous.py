"""The meeting point of the replicas of one run: all arrive with a value, and one combines the values.

Everything that replicas do together (``merge_call``, collectives, gradient aggregation, optimizer steps) is a
rendezvous. `Rendezvous` also aborts the run when a replica fails or takes too long.

The thread that called ``run`` is the thread of replica 0. While it waits, for a rendezvous or for the end of the run, it
combines what must be combined there, and watches the time that the others take.

A replica waits at a rendezvous until all others have arrived. At the end of ``backward()`` it need not wait at once:
it goes on until it needs the result (`Rendezvous.wait`) or comes to the next rendezvous.

Replicas take turns: one runs until it waits or ends, then the next one runs, in the order of their numbers. The one that
arrives last combines the values and goes on, without a change of threads. Replicas are threads that share Python objects, so
a step that keeps a value in an attribute (``self.loss = ...``, ``weight_norm``) would otherwise read the value of another
replica. Counters of steps have a value for each replica, which is set when its turn begins.
"""

from __future__ import annotations

import _thread
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from typing_extensions import override

from stratagem import config
from stratagem._core import context
from stratagem._core.context import Replica
from stratagem.errors import ReplicaMismatch, ReplicaTimeout

Combine = Callable[[list[Any]], Sequence[Any]]

STRAGGLER_LIMIT_S = 2.0
"""How long a replica may take to end after a timeout or Ctrl-C, before its thread is abandoned."""

POLL_S = 0.5
"""How often a waiting thread wakes up: a Ctrl-C that arrives just before the wait does not interrupt it."""


_ENDS_NOW = (KeyboardInterrupt, SystemExit, ReplicaTimeout)
"""Errors after which the caller does not wait for replicas that still compute."""


class Aborted(BaseException):
    """Ends a replica whose run has failed elsewhere; `replicas` catches it."""


class OwnValues:
    """Values that replicas share in the program, and of which each replica has its own while replicas take turns.

    Base class: its methods do nothing.
    """

    def resume(self, replica_id: int) -> None:
        """Give the program the values of a replica, whose turn begins."""

    def pause(self, replica_id: int) -> None:
        """Keep the values of a replica, whose turn ends."""

    def settle(self, replicas: Sequence[int]) -> None:
        """Combine the values of these replicas, which all wait."""

    def share(self, replica_id: int) -> None:
        """Let all replicas see what code did that ran once for them, with the values of this one."""

    def finish(self, replicas: Sequence[int], *, succeeded: bool) -> None:
        """End the run."""


class _Failure:
    """The error of a combine function, to be raised in every replica."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Meeting:
    """One place at which the replicas meet, until their values have been combined.

    Attributes:
        label: names the place.
        arrived: values and combine functions of the replicas that have arrived, in the order of arrival.
        on_caller: whether the thread that called ``run`` combines the values.
        all_wait: whether every replica waits here from its arrival on.
    """

    __slots__ = ("all_wait", "arrived", "label", "on_caller")

    def __init__(self, label: Hashable, *, on_caller: bool) -> None:
        self.label = label
        self.arrived: dict[int, tuple[Any, Combine]] = {}
        self.on_caller = on_caller
        self.all_wait = True


class Rendezvous:
    """Barrier at which the replicas of one run wait for each other.

    Args:
        replicas: the replicas of the run, two or more.
        weights: each replica's share of the rows; a replica with share 0 may end early.
        timeout_s: how long a replica waits for the others; None: as configured.
        parallel: whether replicas run at the same time, instead of in turns.

    Attributes:
        aborted: whether the run has failed, so that the results of replicas still running are not used.
        errors: errors of replicas, by replica number.
        combine_error: the exception of a combine function.
        ended: numbers of the replicas whose function has ended.
    """

    __slots__ = (
        "_arrivals", "_caller_combines", "_combining", "_done", "_lock", "_meetings", "_own", "_parallel", "_progress_s",
        "_replicas", "_results", "_runnable", "_size", "_start", "_timeout_s", "_turn", "_unstarted", "_waits_for",
        "_wake", "_weights", "aborted", "combine_error", "ended", "errors",
    )  # fmt: skip

    def __init__(
        self,
        replicas: Sequence[Replica],
        weights: Sequence[float],
        timeout_s: float | None,
        *,
        parallel: bool = False,
    ) -> None:
        self._replicas = replicas
        self._size = size = len(replicas)
        self._weights = weights
        self._timeout_s = None if timeout_s is None else min(timeout_s, _thread.TIMEOUT_MAX)
        self._lock = _thread.allocate_lock()
        self._wake = [
            _held_lock() for _ in range(size)
        ]  # released when the replica's thread must look
        self._meetings: deque[_Meeting] = deque()  # that are not combined yet, oldest first
        self._done = 0  # meetings that are
        self._arrivals = [0] * size  # meetings at which each replica has arrived
        self._waits_for: dict[
            int, int
        ] = {}  # replica -> how many meetings have to be done before it goes on
        self._runnable: set[int] = set()  # replicas that have their result and wait for their turn
        self._results: dict[int, Any] = {}
        self._combining = False  # whether the oldest meeting is being combined
        self._caller_combines = False  # whether the caller has to do it
        self._parallel = parallel
        self._start: Callable[[int], None]
        self._unstarted = list(range(1, size))
        self._turn = 0  # the replica that runs now
        self._progress_s = 0.0  # when a replica last came to wait, or to run
        self._own: Sequence[OwnValues] = ()
        self.aborted = False
        self.errors: dict[int, BaseException] = {}
        self.combine_error: BaseException | None = None
        self.ended: set[int] = set()

    @property
    def timeout_s(self) -> float:
        """Seconds that a replica waits for the others."""
        if self._timeout_s is None:
            self._timeout_s = min(config.replica_timeout_s(), _thread.TIMEOUT_MAX)
        return self._timeout_s

    # -------------------------------------------------------------- turns

    def begin(self, start: Callable[[int], None], own: Sequence[OwnValues] = ()) -> None:
        """Begin the run: the caller runs replica 0 next, and the others run now or when their turn comes.

        Args:
            start: starts the job of another replica on its thread.
            own: values of which each replica has its own, if replicas take turns.
        """
        self._start = start
        self._own = own
        with self._lock:
            self._resume()
            while self._parallel and self._unstarted:
                self._pass_turn()

    def _pass_turn(self) -> None:
        """Let the next replica run that has what it waited for. Call it under the lock."""
        self._progress_s = time.monotonic()
        if self._runnable:
            self._turn = min(self._runnable)
            self._runnable.remove(self._turn)
            self._resume()
            self._wake_up(self._turn)
        elif self._unstarted:
            self._turn = self._unstarted.pop(0)
            self._resume()
            self._start(self._turn)

    def _wake_up(self, replica_id: int) -> None:
        """Let the thread of a replica look at what has changed. Call it under the lock."""
        if self._wake[replica_id].locked():
            self._wake[replica_id].release()

    def _resume(self) -> None:
        for each in self._own:
            each.resume(self._turn)

    def _pause(self, replica_id: int) -> None:
        for each in self._own:
            each.pause(replica_id)

    # -------------------------------------------------------------- replicas

    def meet(
        self,
        replica_id: int,
        label: Hashable,
        value: Any,
        combine: Combine,
        *,
        on_caller: bool,
        waits: bool,
    ) -> Any:
        """Meet all replicas, combine their values once, return this replica's result.

        See `ReplicaGroup.rendezvous`, which documents the arguments.
        """
        with self._lock:
            meeting = self._arrive(replica_id, label, on_caller=on_caller)
            meeting.arrived[replica_id] = (value, combine)
            meeting.all_wait &= waits
            if waits:
                self._pause(replica_id)
            is_oldest = meeting is self._meetings[0]
            combines = is_oldest and not on_caller and self._is_complete()
            if combines:
                self._combining = True
            elif waits:
                self._stop(replica_id)
            else:
                return None
        result = self._combine(replica_id) if combines else self._wait(replica_id)
        if type(result) is _Failure:
            raise result.error
        return result

    def wait(self, replica_id: int) -> None:
        """Wait for the result of a meeting at which the replica did not wait."""
        with self._lock:
            if self.aborted:
                raise Aborted
            if self._arrivals[replica_id] <= self._done:
                return
            self._pause(replica_id)
            self._stop(replica_id)
        self._wait(replica_id)

    def _arrive(self, replica_id: int, label: Hashable, *, on_caller: bool) -> _Meeting:
        """Return the meeting at which a replica arrives; raise if it must not arrive there now."""
        if self.aborted:
            raise Aborted
        place = self._arrivals[replica_id] - self._done
        if place == len(self._meetings):
            gone = [i for i in self.ended if self._weights[i] > 0]
            if gone:
                self.abort()
                raise _unequal(gone[0], label)
            self._meetings.append(_Meeting(label, on_caller=on_caller))
        meeting = self._meetings[place]
        if label != meeting.label:
            others = sorted(meeting.arrived)
            self.abort()
            raise ReplicaMismatch(
                f"replicas met in different places: replica {replica_id} is at {label}, "
                f"replicas {others} came to {meeting.label}. Every replica must make the "
                "same collective calls in the same order."
            )
        self._arrivals[replica_id] += 1
        return meeting

    def _is_complete(self) -> bool:
        """Return whether the oldest meeting can be combined: all replicas have arrived there or ended."""
        if not self._meetings or self._combining or self.aborted:
            return False
        arrived = self._meetings[0].arrived
        return len(arrived) == self._size or len(arrived.keys() | self.ended) == self._size

    def _stop(self, replica_id: int) -> None:
        """Let others go on, while a replica waits for the last meeting at which it arrived. Call it under the lock."""
        self._waits_for[replica_id] = self._arrivals[replica_id]
        self._progress_s = time.monotonic()
        if self._is_complete():
            self._caller_combines = True
            self._wake_up(0)
        elif not self._parallel:
            self._pass_turn()

    def _wait(self, replica_id: int) -> Any:
        """Wait for a meeting, and in turns for this replica's turn; return the result."""
        on_caller = replica_id == 0
        while True:
            if on_caller:
                self._combine_here()
            with self._lock:
                if replica_id not in self._waits_for and replica_id not in self._runnable:
                    break
            is_woken = self._wake[replica_id].acquire(timeout=POLL_S)
            if not is_woken and (on_caller or self._parallel):
                self._end_if_late()
        if replica_id not in self._results:
            raise Aborted
        return self._results.pop(replica_id)

    def _combine(self, runner: int | None) -> Any:
        """Combine the values of the oldest meeting; return the result of the calling replica, ``runner``.

        Replicas that wait for the result may go on: at once, or in turns when ``runner`` waits or has ended.
        """
        meeting = self._meetings[0]
        results = self._results_of(meeting)
        with self._lock:
            self._combining = False
            self._progress_s = time.monotonic()
            first = min(results)
            if type(results[first]) is _Failure and not meeting.all_wait:
                # A replica that has gone on is not here to get the error.
                self.errors.setdefault(first, results[first].error)
                self.abort()
            if not self.aborted:
                self._meetings.popleft()
                self._done += 1
                for i in [i for i, count in self._waits_for.items() if count <= self._done]:
                    del self._waits_for[i]
                    self._results[i] = results[i]
                    if self._parallel:
                        self._wake_up(i)
                    else:
                        self._runnable.add(i)
                if meeting.all_wait and runner is not None:
                    self._resume()
        return None if runner is None else results[runner]

    def _results_of(self, meeting: _Meeting) -> dict[int, Any]:
        """Combine the values of a meeting; return the result of each replica that has arrived."""
        arrived = meeting.arrived
        values = [arrived[i][0] if i in arrived else None for i in range(self._size)]
        first = min(arrived)
        own = self._own if meeting.all_wait else ()
        try:
            for each in own:
                each.settle([i for i in range(self._size) if self._weights[i] > 0])
                each.resume(first)
            with context.entered(self._replicas[first].strategy, None):
                found = arrived[first][1](values)
            results = {i: found[i] for i in arrived}
        except BaseException as error:  # noqa: BLE001 - raised again in every replica
            self.combine_error = error
            results = dict.fromkeys(arrived, _Failure(error))
        for each in own:
            each.share(first)
        return results

    def abort(self) -> None:
        """End the run: waiting replicas unwind now, others when they arrive. Call it under the lock."""
        self.aborted = True
        for i in (*self._waits_for, *self._runnable):
            self._results.pop(i, None)
            self._wake_up(i)
        self._waits_for, self._runnable = {}, set()
        self.ended.update(self._unstarted)
        self._unstarted = []
        self._wake_up(0)

    def leave(self, replica_id: int, error: BaseException | None) -> None:
        """Note that a replica's function has ended, with or without an error."""
        with self._lock:
            self._pause(replica_id)
            if error is not None:
                self.errors[replica_id] = error
                if error is not self.combine_error:
                    self.abort()
            self.ended.add(replica_id)
            place = self._arrivals[replica_id] - self._done
            if place < len(self._meetings) and self._weights[replica_id] > 0 and not self.aborted:
                self.errors[replica_id] = _unequal(replica_id, self._meetings[place].label)
                self.abort()
            if self._is_complete():
                self._caller_combines = True
            if self._caller_combines or len(self.ended) == self._size:
                self._wake_up(0)
            elif not (self._parallel or self.aborted):
                self._pass_turn()

    # -------------------------------------------------------------- the caller

    def wait_for_end(self) -> bool:
        """Wait until all replicas have ended, combining where needed; False: some did not end in time."""
        deadline: float | None = None
        while True:
            self._combine_here()
            if len(self.ended) == self._size:
                return True
            if self.aborted and deadline is None:
                now = any(isinstance(each, _ENDS_NOW) for each in self.errors.values())
                deadline = time.monotonic() + (STRAGGLER_LIMIT_S if now else self.timeout_s)
            limit_s = POLL_S if deadline is None else deadline - time.monotonic()
            if limit_s <= 0:
                return False
            if not self._wake[0].acquire(timeout=min(limit_s, POLL_S)):
                self._end_if_late()

    def _combine_here(self) -> None:
        """Combine what the caller has to combine, and let the next replica run."""
        while self._caller_combines:
            with self._lock:
                self._combining = self._caller_combines = self._is_complete()
                if not self._combining:
                    if not (self._parallel or self.aborted):
                        self._pass_turn()
                    return
            self._combine(None)

    def _end_if_late(self) -> None:
        """Abort the run if the replicas that run have kept the others waiting for too long."""
        with self._lock:
            waiting = sorted({*self._waits_for, *self._runnable, *self._unstarted})
            missing = [i for i in range(self._size) if i not in waiting and i not in self.ended]
            late = time.monotonic() - self._progress_s > self.timeout_s
            if self.aborted or self._combining or not (waiting and missing and late):
                return
            at = f" at {self._label}" if self._waits_for else ""
            self.errors[waiting[0]] = ReplicaTimeout(
                f"replicas {waiting} waited {self.timeout_s:g} s{at} for {[self._replicas[i] for i in missing]}, "
                "which did not arrive. Every replica must make the same collective calls, and must not wait for a "
                "later replica: replicas run in turns. Raise STRATAGEM_REPLICA_TIMEOUT_S if it is merely slow.",
                waiting=waiting,
                missing=missing,
                limit_s=self.timeout_s,
            )
            self.abort()

    def abort_and_wait(self, limit_s: float) -> None:
        """Abort the run and wait up to ``limit_s`` for the replicas to end."""
        with self._lock:
            self.abort()
        deadline = time.monotonic() + limit_s
        while len(self.ended) < self._size and (rest := deadline - time.monotonic()) > 0:
            self._wake[0].acquire(timeout=rest)

    def close(self) -> None:
        """Break the reference cycles with the replicas; abandoned threads may still call us."""
        self._replicas = ()
        self._start = lambda _: None

    @property
    def _label(self) -> Hashable:
        """The place where replicas wait, for messages; None: there is none."""
        return self._meetings[-1].label if self._meetings else None

    @override
    def __repr__(self) -> str:
        return (
            f"<Rendezvous of {self._size} [{len(self._waits_for)} waiting at {self._label!r}, "
            f"{len(self.ended)} ended, {len(self.errors)} failed]>"
        )


def _held_lock() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


def _unequal(replica_id: int, label: Hashable) -> ReplicaMismatch:
    return ReplicaMismatch(
        f"replica {replica_id} ended without coming to {label}, where other replicas "
        "wait: a different number of merge_call (or other collective) calls. Every replica "
        "must make the same collective calls in the same order."
    )
