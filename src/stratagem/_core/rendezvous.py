"""The meeting point of the replicas of one run: all arrive with a value, and one combines the values.

Everything that replicas do together (``merge_call``, collectives, gradient aggregation, optimizer steps) is a
rendezvous. `Rendezvous` also tells the thread that called ``run`` when all replicas have ended, and aborts the run
when one of them fails.

Between two rendezvous the replicas take turns, in the order of their numbers: replica 1 starts when replica 0 waits or
has ended. Replicas are threads that share Python objects, so a step that keeps a value in an attribute
(``self.loss = ...``, ``weight_norm``) would otherwise read the value of another replica. Counters of steps have a value
for each replica, which is set when its turn begins.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from typing_extensions import override

from stratagem import config
from stratagem._core import context
from stratagem._core.context import Replica
from stratagem.errors import ReplicaMismatch, ReplicaTimeout

Combine = Callable[[list[Any]], Sequence[Any]]
_Arrived = dict[int, tuple[Any, Combine]]

STRAGGLER_LIMIT_S = 2.0
"""How long a replica may take to end after a timeout or Ctrl-C, before its thread is abandoned."""

POLL_S = 0.5
"""How often the waiting caller wakes up: a Ctrl-C that arrives just before the wait does not interrupt it."""


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


class Rendezvous:
    """Barrier at which the replicas of one run wait for each other, and their caller waits for them.

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
        "_blocked", "_caller", "_caller_combines", "_label", "_lock", "_own", "_parallel", "_replicas", "_results",
        "_size", "_start", "_timeout_s", "_turn", "_turn_began_s", "_unstarted", "_waiting", "_wake", "_weights",
        "aborted", "combine_error", "ended", "errors",
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
        self._size = len(replicas)
        self._weights = weights
        self._timeout_s = None if timeout_s is None else min(timeout_s, _thread.TIMEOUT_MAX)
        self._lock = _thread.allocate_lock()
        self._caller = _thread.allocate_lock()  # held while the caller has nothing to do
        self._caller.acquire()
        self._wake: dict[int, _thread.LockType] = {}  # held while replica i waits
        self._waiting: _Arrived = {}
        self._label: Hashable = None
        self._caller_combines = False
        self._results: dict[int, Any] = {}
        self._parallel = parallel
        self._start: Callable[[int], None]
        self._unstarted = list(range(self._size))
        self._blocked: set[int] = set()  # replicas that have their result and wait for their turn
        self._turn = 0  # the replica that runs now
        self._turn_began_s = 0.0
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

    # -------------------------------------------------------------- replicas

    def begin(self, start: Callable[[int], None], own: Sequence[OwnValues] = ()) -> None:
        """Start the replicas: all at once, or the first one, which starts the next when it waits.

        Args:
            start: starts the job of one replica on its thread.
            own: values of which each replica has its own, if replicas take turns.
        """
        self._start = start
        self._own = own
        with self._lock:
            while self._unstarted and (self._parallel or len(self._unstarted) == self._size):
                self._pass_turn()

    def _pass_turn(self) -> None:
        """Let the next replica run that has not arrived at this rendezvous. Call it under the lock."""
        self._turn_began_s = time.monotonic()
        if self._blocked:
            self._turn = min(self._blocked)
            self._blocked.remove(self._turn)
            self._resume()
            self._wake[self._turn].release()
        elif self._unstarted:
            self._turn = self._unstarted.pop(0)
            self._resume()
            self._start(self._turn)

    def _resume(self) -> None:
        for each in self._own:
            each.resume(self._turn)

    def meet(
        self, replica_id: int, label: Hashable, value: Any, combine: Combine, *, on_caller: bool
    ) -> Any:
        """Wait for all replicas, combine their values once, return this replica's result.

        See `ReplicaGroup.rendezvous`, which documents the arguments.
        """
        with self._lock:
            if self.aborted or self.ended or (self._waiting and label != self._label):
                self._check(replica_id, label)
            self._label = label
            self._waiting[replica_id] = (value, combine)
            for each in self._own:
                each.pause(replica_id)
            complete = len(self._waiting) + len(self.ended) == self._size
            arrived: _Arrived = {}
            if replica_id not in self._wake:
                self._wake[replica_id] = _thread.allocate_lock()
                self._wake[replica_id].acquire()
            if complete and not on_caller:
                arrived, self._waiting = self._waiting, {}
            elif complete:
                self._caller_combines = True
                self._wake_caller()
            elif not self._parallel:
                self._pass_turn()
        goes_on = bool(arrived) and self._combine(arrived, runner=replica_id)
        if self._parallel:
            if not arrived and not self._wait(replica_id):
                self._time_out(replica_id)
        elif not goes_on:
            while not self._wait(replica_id):
                pass  # the caller ends the run if a turn takes too long
            if self.aborted:
                raise Aborted
        if self.aborted and replica_id not in self._results:
            raise Aborted
        result = self._results.pop(replica_id)
        if type(result) is _Failure:
            raise result.error
        return result

    def _check(self, replica_id: int, label: Hashable) -> None:
        """Raise if the replica must not arrive here now."""
        if self.aborted:
            raise Aborted
        if self._waiting and label != self._label:
            others = sorted(self._waiting)
            self.abort()
            raise ReplicaMismatch(
                f"replicas met in different places: replica {replica_id} is at {label}, "
                f"replicas {others} wait at {self._label}. Every replica must make the "
                "same collective calls in the same order."
            )
        gone = [i for i in self.ended if self._weights[i] > 0]
        if gone:
            self.abort()
            raise _unequal(gone[0], label)

    def _wait(self, replica_id: int) -> bool:
        return self._wake[replica_id].acquire(timeout=self.timeout_s)

    def _combine(self, arrived: _Arrived, runner: int = -1) -> bool:
        """Combine the values of all replicas, distribute the results, wake the replicas.

        Return whether the calling replica, ``runner``, goes on. Else it waits for its turn, which may already have
        begun: another replica may be at the next rendezvous by now.
        """
        values = [arrived[i][0] if i in arrived else None for i in range(self._size)]
        first = min(arrived)
        own = self._own
        try:
            for each in own:
                each.settle([i for i in range(self._size) if self._weights[i] > 0])
                each.resume(first)
            with context.entered(self._replicas[first].strategy, None):
                results = arrived[first][1](values)
            for i in arrived:
                self._results[i] = results[i]
        except BaseException as error:  # noqa: BLE001 - raised again in every replica
            self.combine_error = error
            self._results.update(dict.fromkeys(arrived, _Failure(error)))
        for each in own:
            each.share(first)
        if self._parallel:
            for i in arrived:
                if i != runner:
                    self._wake[i].release()
            return True
        with self._lock:
            self._blocked = set(arrived)
            if self.aborted:
                self.abort(but=runner)
                return True
            if min(arrived) == runner:
                self._blocked.remove(runner)
                self._turn, self._turn_began_s = runner, time.monotonic()
                self._resume()
                return True
            self._pass_turn()
            return False

    def _time_out(self, replica_id: int) -> None:
        while True:
            with self._lock:
                waiting = sorted(self._waiting)
                here = {*waiting, *self.ended}
                missing = [i for i in range(self._size) if i not in here]
                if replica_id in self._waiting and missing:
                    self.abort(but=replica_id)
                    break
            # All have arrived and are being combined, which may take long.
            if self._wait(replica_id):
                return
        raise ReplicaTimeout(
            f"replicas {waiting} waited {self.timeout_s:g} s at {self._label} for "
            f"{[self._replicas[i] for i in missing]}, which did not arrive. Every replica must make "
            "the same collective calls; raise STRATAGEM_REPLICA_TIMEOUT_S if it is merely slow.",
            waiting=waiting,
            missing=missing,
            limit_s=self.timeout_s,
        )

    def abort(self, but: int = -1) -> None:
        """End the run: waiting replicas unwind now, others when they arrive. Call it under the lock."""
        self.aborted = True
        for i in (*self._waiting, *self._blocked):
            if i != but:
                self._wake[i].release()
        self._waiting, self._blocked = {}, set()
        self.ended.update(self._unstarted)
        self._unstarted = []
        self._wake_caller()

    def leave(self, replica_id: int, error: BaseException | None) -> None:
        """Note that a replica's function has ended, with or without an error."""
        with self._lock:
            for each in self._own:
                each.pause(replica_id)
            if error is not None:
                self.errors[replica_id] = error
                if error is not self.combine_error:
                    self.abort()
            self.ended.add(replica_id)
            complete = False
            if self._waiting and not self.aborted:
                if self._weights[replica_id] > 0:
                    self.errors[replica_id] = _unequal(replica_id, self._label)
                    self.abort()
                else:
                    # The caller combines: it has nothing else to do.
                    complete = len(self._waiting) + len(self.ended) == self._size
                    self._caller_combines = complete
            if complete or len(self.ended) == self._size:
                self._wake_caller()
            elif not (self._parallel or self.aborted):
                self._pass_turn()

    # -------------------------------------------------------------- the caller

    def _wake_caller(self) -> None:
        # Under self._lock. A signal that was not taken yet is enough.
        if self._caller.locked():
            self._caller.release()

    def wait_for_end(self) -> bool:
        """Wait until all replicas have ended, combining where needed; False: some did not end in time."""
        deadline: float | None = None
        while True:
            limit_s = POLL_S if deadline is None else deadline - time.monotonic()
            if limit_s <= 0:
                return False
            self._caller.acquire(timeout=min(limit_s, POLL_S))
            if len(self.ended) == self._size:
                return True
            arrived: _Arrived = {}
            with self._lock:
                if self._caller_combines and not self.aborted:
                    self._caller_combines = False
                    arrived, self._waiting = self._waiting, {}
            if arrived:
                self._combine(arrived)
            elif not self._parallel:
                self._end_long_turn()
            if self.aborted and deadline is None:
                late = any(isinstance(e, ReplicaTimeout) for e in self.errors.values())
                deadline = time.monotonic() + (STRAGGLER_LIMIT_S if late else self.timeout_s)

    def _end_long_turn(self) -> None:
        """Abort the run if one replica has kept the others waiting for too long."""
        with self._lock:
            waiting = [*sorted({*self._waiting, *self._blocked}), *self._unstarted]
            late = time.monotonic() - self._turn_began_s > self.timeout_s
            if self.aborted or not waiting or not late or self._turn in self._waiting:
                return
            turn, at = self._turn, f" at {self._label}" if self._waiting else ""
            self.errors[waiting[0]] = ReplicaTimeout(
                f"replicas {waiting} waited {self.timeout_s:g} s{at} for {self._replicas[turn]}, which did not "
                "arrive. Every replica must make the same collective calls, and must not wait for a later replica: "
                "replicas run in turns. Raise STRATAGEM_REPLICA_TIMEOUT_S if it is merely slow.",
                waiting=waiting,
                missing=[turn],
                limit_s=self.timeout_s,
            )
            self.abort()

    def abort_and_wait(self, limit_s: float) -> None:
        """Abort the run and wait up to ``limit_s`` for the replicas to end."""
        with self._lock:
            self.abort()
        deadline = time.monotonic() + limit_s
        while len(self.ended) < self._size and (rest := deadline - time.monotonic()) > 0:
            self._caller.acquire(timeout=rest)

    def close(self) -> None:
        """Break the reference cycles with the replicas; abandoned threads may still call us."""
        self._replicas = ()
        self._start = lambda _: None

    @override
    def __repr__(self) -> str:
        return (
            f"<Rendezvous of {self._size} [{len(self._waiting)} waiting at {self._label!r}, "
            f"{len(self.ended)} ended, {len(self.errors)} failed]>"
        )


def _unequal(replica_id: int, label: Hashable) -> ReplicaMismatch:
    return ReplicaMismatch(
        f"replica {replica_id} ended without coming to {label}, where other replicas "
        "wait: a different number of merge_call (or other collective) calls. Every replica "
        "must make the same collective calls in the same order."
    )
