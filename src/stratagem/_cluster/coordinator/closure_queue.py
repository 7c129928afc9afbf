"""Decide which worker runs which closure, and handle failures of workers and closures.

Pure: no thread, clock, socket or user's exception. The engine calls a method for every event while it holds
its lock, and executes every action that the method returns. Closures and workers are known by number.

States of a closure::

    add ──▶ queued ──take──▶ in flight ──finished, failed──▶ resolved
              ▲                │    │
              └───returned─────┘    └─worker_lost──▶ fencing ──worker_fenced──▶ queued again (at the end)
                (not started)                                          └─────▶ resolved: poisoned, cancelled

A closure is *fencing* from the loss of its worker until every parameter server has confirmed that it refuses
late writes of that worker. Only then may the closure run elsewhere.

Any worker may run a *shared* closure. A *resource* closure belongs to one worker: it is sent first, does not
count for `idle`, and is aborted when its worker is lost.

Workers join (`add_worker`) and leave (`drain_worker`) at any time. A draining worker finishes its running
closure, returns closures that it has not started, and gets no new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

from typing_extensions import override

from stratagem._cluster.coordinator.closure_actions import (
    Action,
    DeliverResults,
    Fate,
    FenceWorker,
    RaiseError,
    RecallClosures,
    ReleaseWorker,
    RequeueClosure,
    ResolveClosure,
    SendClosures,
    SetAsideWorker,
)
from stratagem._cluster.coordinator.queue_state import (
    ClosureChoice,
    LostClosures,
    QueueWorker,
    ReportedFailures,
)
from stratagem._cluster.coordinator.start_rules import StartRule


@final
class ClosureQueue:
    """The closures of one coordinator, and the decisions about them.

    Args:
        limit: closures that may be queued before `full`; 0 means no limit.
        poison_limit: losses in a row after which a closure is considered their cause and not tried again.
        server_failures: reports about one parameter server at which its failure is raised (FLT-10).
        deadlines: missed deadlines at which one is raised (FLT-11); -1 means a tenth of the workers.
        choice: chooses among the first closures by their inputs.
        rule: says when closures may start; by default each worker gets closures ahead.

    Example:
        >>> queue = ClosureQueue()
        >>> queue.add_worker(0)
        >>> queue.worker_up(0, incarnation=1)
        []
        >>> queue.add(7), queue.take(0)
        ([SendClosures(worker=0)], [7])
        >>> queue.worker_lost(0), queue.worker_fenced(0)
        ([FenceWorker(worker=0, incarnation=1)], [RequeueClosure(closure=7, lost=True)])
        >>> queue
        <ClosureQueue [1 queued, 0 in flight, 0 fencing, 0 of 1 workers up]>
    """

    def __init__(
        self,
        *,
        limit: int = 262_144,
        poison_limit: int = 3,
        server_failures: int = 3,
        deadlines: int = -1,
        choice: ClosureChoice | None = None,
        rule: StartRule | None = None,
    ) -> None:
        self.stopped = False  # an error waits to be raised: nothing is sent until `resume`
        self._workers: dict[int, QueueWorker] = {}
        self._limit = limit
        self._failures = ReportedFailures(server_failures=server_failures, deadlines=deadlines)
        self._queued: deque[int] = deque()
        self._lost = LostClosures(poison_limit)
        self._withdrawn: set[int] = set()  # cancelled by the user, but perhaps started already
        self._in_flight = 0
        self._fencing = 0
        self._choice = choice or ClosureChoice()
        self._rule = rule
        self._starts = 0  # under a rule

    # ------------------------------------------------------------------ questions

    @property
    def full(self) -> bool:
        """True if `add` must wait."""
        return 0 < self._limit <= len(self._queued)

    @property
    def idle(self) -> bool:
        """True if no shared closure is queued, in flight or fencing."""
        return not self._queued and self.quiet

    @property
    def quiet(self) -> bool:
        """True if no shared closure runs or may still run."""
        waits = self._rule is not None and self._rule.is_open
        return self._in_flight == 0 and self._fencing == 0 and not waits

    @property
    def counts(self) -> tuple[int, int]:
        """Closures that wait for a worker, and closures that were sent to one."""
        return len(self._queued), self._in_flight

    @property
    def workers(self) -> tuple[int, ...]:
        """Numbers of all workers."""
        return tuple(self._workers)

    def is_up(self, worker: int) -> bool:
        """Return whether the worker answers."""
        return worker in self._workers and self._workers[worker].up

    def is_draining(self, worker: int) -> bool:
        """Return whether the worker gets no more closures."""
        return worker in self._workers and self._workers[worker].draining

    def unsent(self) -> frozenset[int]:
        """Return the closures that wait for a worker."""
        return frozenset(self._queued)

    def servers_out_of_reach(self) -> list[str]:
        """Return the servers that a majority of the workers does not reach."""
        return self._failures.out_of_reach(self._workers)

    @property
    def waits_for_workers(self) -> bool:
        """True if closures wait, and no worker that answers can run the first one."""
        if self.idle or self._in_flight:
            return False
        up = [number for number, worker in self._workers.items() if worker.up]
        return not any(self._has_input(number) for number in up)

    def workers_up(self) -> int:
        """Return the number of workers that answer."""
        return sum(worker.up for worker in self._workers.values())

    # ------------------------------------------------------------------ closures

    def add(self, closure: int) -> list[Action]:
        """Queue a shared closure. The caller has checked `full` and `stopped`."""
        if self.stopped:
            raise RuntimeError("add() while an error waits to be raised: call resume() first.")
        self._queued.append(closure)
        return self._send_next()

    def add_resource(self, closure: int, number: int) -> list[Action]:
        """Queue a closure for one worker; abort it while that worker is down."""
        worker = self._workers[number]
        if not worker.up or worker.draining:
            return [ResolveClosure(closure, "aborted")]
        worker.waiting_resources.append(closure)
        return [SendClosures(number)]

    def take(self, number: int) -> list[int]:
        """Return the closures to send to this worker now. From here on they are in flight."""
        worker = self._workers.get(number)
        if worker is None or not worker.up:
            return []
        taken = list(worker.waiting_resources)
        if taken:
            worker.waiting_resources.clear()
            worker.resources.update(dict.fromkeys(taken))
        free = worker.window - len(worker.in_flight)
        if self.stopped or not worker.has_room:
            free = 0
        rule = self._rule
        choices: Sequence[int] = self._queued
        while self._queued and free > 0:
            if rule is not None and not (choices := rule.choices(number, self._queued)):
                break
            if (place := self._choice.choose(number, choices)) is None:
                break
            closure = self._queued[place]
            if closure in self._lost:
                # It was lost with a worker before. If it runs alone, the next loss shows whether it
                # is the cause; beside others a loss would incriminate them all.
                if worker.in_flight:
                    break
                worker.solo = True
                free = 1
            del self._queued[place]
            worker.in_flight[closure] = None
            self._in_flight += 1
            taken.append(closure)
            free -= 1
            if rule is not None:
                rule.started(closure, number)
                self._starts += 1
                worker.started_at = self._starts
        return taken

    def finished(self, number: int, closures: Sequence[int], run_s: float) -> list[Action]:
        """Handle results; those of closures that the worker no longer has do not count.

        `run_s`: how long one of the closures took on average.
        """
        worker = self._workers.get(number)
        if worker is None:
            return []
        counted = tuple(closure for closure in closures if self._end(worker, closure))
        if not counted:
            return []
        worker.measured(run_s)
        results = [DeliverResults(counted)] if self._rule is None else self._rule.deliver(counted)
        return [*results, *self._drained(number), *self._send_next(number)]

    def failed(
        self,
        number: int,
        closure: int,
        *,
        blame: str = "user",
        task: str = "",
        others_reach: bool = False,
        forgiven: bool = False,
        lacks: bool = False,
        ended: int = 0,
    ) -> list[Action]:
        """Handle an exception: retry the closure, or stop the queue. A resource stops nothing.

        `blame` is that of `messages.Failed`; `task` is the parameter server to blame. `others_reach`: the
        coordinator reaches that server. `forgiven`: retry it in any case, because that server is being
        restored. `lacks`: the worker could not unpack something. `ended`: the per-worker dataset that is used up on this worker; others may have elements.
        """
        worker = self._workers.get(number)
        shared = worker is not None and closure in worker.in_flight
        if worker is None or not self._end(worker, closure):
            return []
        why = "it could not unpack an object" if lacks and shared else ""
        if blame == "path" and not forgiven:
            self._failures.no_path(number, task)
            why = f"it does not reach {task}" if others_reach else ""
        aside = [SetAsideWorker(number, why)] if why and not worker.aside else []
        worker.aside = worker.aside or bool(aside)
        if ended:
            self._choice.note_ended(number, ended)
            forgiven = any(
                one.incarnation and not one.draining and self._choice.can_run(other, closure)
                for other, one in self._workers.items()
            )
        forgiven = forgiven or blame == "path"
        if shared and (forgiven or self._failures.is_transient(blame, task, self._workers)):
            actions = [*self._requeue([closure], lost=False), *aside]
        else:
            actions = [ResolveClosure(closure, "failed"), *aside]
            if shared:
                actions += self._stop(closure)
        return [*actions, *self._drained(number), *self._send_next(number)]

    def returned(self, number: int, closures: Sequence[int]) -> list[Action]:
        """Queue closures that a worker gave back unstarted, in front, in their old order."""
        worker = self._workers.get(number)
        if worker is None:
            return []
        worker.recalling = False
        back = [closure for closure in closures if closure in worker.in_flight]
        for closure in back:
            del worker.in_flight[closure]
        self._in_flight -= len(back)
        if self._rule is not None:
            self._rule.returned(back)
        if back:
            worker.solo = False
        if worker.in_flight:
            worker.window = 1  # it runs a long closure: send nothing ahead until that is done
        kept, cancelled = self._without_cancelled(back)
        self._queued.extendleft(reversed(kept))
        return [*cancelled, *self._drained(number), *self._send_next(number)]

    def run_again(self, closures: Sequence[int]) -> list[Action]:
        """Queue closures again, in front, whose results were not delivered."""
        self._queued.extendleft(reversed(closures))
        return [*(RequeueClosure(one, lost=True) for one in closures), *self._send_next()]

    def tick(self) -> list[Action]:
        """Send closures to workers whose window is not full, and recall closures that wait behind a long one."""
        if self._rule is not None or (self._queued and not self.stopped):
            return self._send_next()
        if self.stopped:
            return []
        idle = any(worker.has_room and not worker.in_flight for worker in self._workers.values())
        return self._recall(self.workers, at_least=2) if idle and self._in_flight >= 2 else []

    # ------------------------------------------------------------------ workers

    def add_worker(self, number: int) -> None:
        """Add a worker. It is down until `worker_up`."""
        if number in self._workers:
            raise RuntimeError(f"worker {number} was added twice.")
        self._workers[number] = QueueWorker(sends_ahead=self._rule is None)

    def drain_worker(self, number: int) -> list[Action]:
        """Give the worker nothing more; `ReleaseWorker` follows when it has finished."""
        worker = self._workers[number]
        worker.draining = True
        aborted = self._resolve_all(worker.waiting_resources, "aborted")
        worker.waiting_resources.clear()
        return [*aborted, *self._recall([number], at_least=1), *self._drained(number)]

    def worker_up(self, number: int, *, incarnation: int) -> list[Action]:
        """Handle a worker that answers. `incarnation` is larger than that of its last session."""
        worker = self._workers[number]
        if worker.up or worker.fencing is not None:
            raise RuntimeError(f"worker {number} came up before its last incarnation was fenced.")
        worker.up = True
        worker.incarnation = incarnation
        self._failures.forget(number)
        return self._send_next(number)

    def worker_without_path(self, number: int, task: str) -> None:
        """Note that a worker, which is down, does not reach this server."""
        if number in self._workers:
            self._failures.no_path(number, task)

    def worker_lost(self, number: int) -> list[Action]:
        """Handle the loss of a worker. Its closures wait until `worker_fenced`."""
        worker = self._workers.get(number)
        if worker is None or not worker.up:
            return []
        self._choice.forget_worker(number)
        self._in_flight -= len(worker.in_flight)
        self._fencing += len(worker.in_flight)
        self._workers[number] = worker.lost()
        aborted = self._resolve_all([*worker.resources, *worker.waiting_resources], "aborted")
        return [FenceWorker(number, worker.incarnation), *aborted]

    def worker_fenced(self, number: int, *, innocent: bool = False) -> list[Action]:
        """Queue the closures of a lost worker again: no server accepts its writes any more.

        `innocent`: the coordinator ended the session, so that no closure can be the cause.
        """
        worker = self._workers.get(number)
        if worker is None or worker.fencing is None:
            return []
        closures, worker.fencing = worker.fencing, None
        self._fencing -= len(closures)
        if self._rule is not None:
            self._rule.lost(closures)
        suspects = () if innocent or worker.blameless else closures
        poisoned = self._lost.note(suspects, worker=number)
        actions = self._requeue([one for one in closures if one not in poisoned], lost=True)
        for closure in poisoned:
            actions += [*self._resolve_all([closure], "poisoned"), *self._stop(closure)]
        actions += self._drained(number)
        if self._rule is not None or not self._queued:
            return [*actions, *self._send_next()]
        sends = [SendClosures(other) for other, one in self._workers.items() if one.has_room]
        return [*actions, *sends]

    # ------------------------------------------------------------------ errors

    def cancel(self) -> list[Action]:
        """Resolve the queued closures, and recall those that a worker has but may not have started."""
        actions = self._resolve_all(self._queued, "withdrawn")
        self._queued.clear()
        for worker in self._workers.values():
            self._withdrawn.update(worker.in_flight, worker.fencing or ())
        sends = [] if self._rule is None else self._send_next()
        return [*actions, *self._recall(self.workers, at_least=1), *sends]

    def stop(self) -> list[Action]:
        """Handle an error that belongs to no closure: cancel queued closures until `resume`."""
        return self._stop(None)

    def server_lost(self) -> list[Action]:
        """Stop, and wait for no closure that runs: it waits for that server, or is about to."""
        actions = self._stop(None)
        for number, worker in list(self._workers.items()):
            given_up = [*worker.in_flight, *(worker.fencing or ())]
            actions += self._resolve_all(given_up, "given up")
            worker.in_flight.clear()
            worker.solo = False
            if worker.fencing is not None:
                worker.fencing = []
            actions += self._drained(number)
        self._in_flight = self._fencing = 0
        return actions

    def resume(self) -> None:
        """Accept closures again: the error has been raised to the user."""
        self.stopped = False

    # ------------------------------------------------------------------ inside

    def _end(self, worker: QueueWorker, closure: int) -> bool:
        """Take a closure from its worker; return False if that worker does not have it."""
        if closure in worker.in_flight:
            del worker.in_flight[closure]
            self._in_flight -= 1
            worker.solo = False
            worker.window = max(worker.window, worker.least)
            if self._rule is not None:
                self._rule.ended(closure)
            self._lost.forget(closure)
            self._withdrawn.discard(closure)
            return True
        return worker.resources.pop(closure, 0) is None

    def _stop(self, closure: int | None) -> list[Action]:
        if self.stopped:
            return []
        self.stopped = True
        cancelled = self._resolve_all(self._queued, "cancelled")
        self._queued.clear()
        return [RaiseError(closure), *cancelled, *self._recall(self.workers, at_least=1)]

    def _requeue(self, closures: Sequence[int], *, lost: bool) -> list[Action]:
        kept, actions = self._without_cancelled(closures)
        if self._rule is not None and self._rule.requeued(kept):
            self._queued.extendleft(reversed(kept))
        else:
            self._queued.extend(kept)
        return [*actions, *(RequeueClosure(closure, lost) for closure in kept)]

    def _without_cancelled(self, closures: Sequence[int]) -> tuple[Sequence[int], list[Action]]:
        """Return the closures that may run again, and the actions that resolve the others."""
        if self.stopped:
            return (), self._resolve_all(closures, "cancelled")
        kept = [closure for closure in closures if closure not in self._withdrawn]
        withdrawn = [closure for closure in closures if closure in self._withdrawn]
        return kept, self._resolve_all(withdrawn, "withdrawn")

    def _resolve_all(self, closures: Iterable[int], fate: Fate) -> list[Action]:
        closures = list(closures)
        if self._rule is not None:
            self._rule.resolved(closures)
        self._withdrawn.difference_update(closures)
        return [ResolveClosure(one, fate, self._lost.forget(one)) for one in closures]

    def _send_next(self, number: int | None = None) -> list[Action]:
        """Send closures to the worker that has fewest, and to worker `number`."""
        if self._rule is not None:
            waits = any(one.recalling for one in self._workers.values())  # for a worker's answer
            free = [n for n, one in self._workers.items() if one.has_room and not waits]
            free.sort(key=lambda other: self._workers[other].started_at)
            return self._rule.next(self._queued, [one for one in free if self._has_input(one)])
        if not self._queued or self.stopped:
            return []
        best, fewest = None, 0
        for other, worker in self._workers.items():
            count = len(worker.in_flight)
            if (best is None or count < fewest) and worker.has_room and self._has_input(other):
                best, fewest = other, count
        sends: list[Action] = [] if best is None else [SendClosures(best)]
        if best != number and number in self._workers and self._workers[number].has_room:
            sends.append(SendClosures(number))
        return sends

    def _has_input(self, number: int) -> bool:
        return not self._queued or self._choice.can_run(number, self._queued[0])

    def _recall(self, numbers: Iterable[int], *, at_least: int) -> list[Action]:
        actions: list[Action] = []
        for number in numbers:
            worker = self._workers[number]
            if worker.up and len(worker.in_flight) >= at_least and not worker.recalling:
                worker.recalling = True
                actions.append(RecallClosures(number, tuple(worker.in_flight)))
        return actions

    def _drained(self, number: int) -> list[Action]:
        """Forget a draining worker that has nothing left to finish."""
        worker = self._workers[number]
        busy = worker.in_flight or worker.resources or worker.fencing is not None
        if not worker.draining or busy:
            return []
        del self._workers[number]
        self._choice.forget_worker(number)
        self._choice.forget_ended()
        self._failures.forget(number)
        return [ReleaseWorker(number)]

    @override
    def __repr__(self) -> str:
        stopped = ", stopped by an error" if self.stopped else ""
        return (
            f"<ClosureQueue [{len(self._queued)} queued, {self._in_flight} in flight, "
            f"{self._fencing} fencing, {self.workers_up()} of {len(self._workers)} workers up{stopped}]>"
        )
