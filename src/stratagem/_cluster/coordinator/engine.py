"""The coordinator's engine: carries out what the queue decides.

Decisions are made by `closures.ClosureQueue`. Events come from the links' threads (`link.py`), from
the watching threads (`watch.py`) and from the user's (`coordinator.py`).

Locks, taken in this order, never the other way round: the sender's packing lock; a link's `sending`,
which keeps the order of what one worker is told; `lock` (of the condition `changed`), for the queue,
the tables and remote values. Nothing that can wait is done while `lock` is held. Methods whose name
begins with ``locked_`` are called while holding it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, final

from stratagem import metrics
from stratagem._cluster.contract import StrategyOnCoordinator
from stratagem._cluster.coordinator.closure_queue import (
    Action,
    ClosureQueue,
    Fate,
    RecallClosures,
    ResolveClosure,
)
from stratagem._cluster.coordinator.packer import Encoded
from stratagem._cluster.coordinator.remote_values import (
    ClosureRecord,
    PerWorkerValues,
    ResultCondition,
)
from stratagem._cluster.coordinator.sender import Call, Closure, Sender
from stratagem._cluster.coordinator.watch_threads import WatchThreads
from stratagem._cluster.coordinator.worker_link import WorkerLink, close_links
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.worker import output
from stratagem._wire import messages
from stratagem._wire.failures import exception_from
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.messages import Frame
from stratagem.config import ClusterOptions
from stratagem.errors import (
    ClosureAborted,
    ClosureCancelled,
    ClosurePoisonous,
    ParameterServerLost,
    UnavailableError,
    WorkerLost,
)

_log = logging.getLogger("stratagem.coordinator")

IN_FLIGHT_S: Final = 0.02
"""Work sent ahead to a worker, in seconds: several times a wake-up, short against any fault."""

MAX_WINDOW: Final = 64
MIN_WINDOW: Final = 2

ERRORS_KEPT: Final = 1000
"""Errors kept in `coordinator.errors`; the oldest go first."""

_COUNTED: Final = (
    "scheduled",
    "completed",
    "failed",
    "retried",
    "workers_lost",
    "closures_repeated",
)


@final
class Engine:
    """Queue, links and closures of one coordinator."""

    def __init__(
        self,
        spec: ClusterSpec,
        views: StrategyOnCoordinator,
        options: ClusterOptions,
        *,
        key: ClusterKey | None,
    ) -> None:
        tasks = spec.task_indices("worker")
        self.name = f"coordinator-{uuid.uuid4().hex[:8]}"
        self.options = options
        self.views = views
        self.sender = Sender(views)
        self.lock = threading.Lock()
        self.bell = ResultCondition(self.lock)
        self.changed = self.bell.condition
        self.queue = ClosureQueue(
            len(tasks), limit=options.queue_limit, poison_limit=options.poison_limit
        )
        self.closed = False
        self.abandoned = False
        self.errors: deque[ClosureRecord] = deque(maxlen=ERRORS_KEPT)
        self.facts: dict[int, metrics.Snapshot] = {}
        self.finished = 0
        self.lives = [0] * len(tasks)
        self.resources: dict[int, tuple[weakref.ref[PerWorkerValues], Call]] = {}
        self._closures: dict[int, Closure] = {}
        self._numbers = itertools.count(1)
        self._resource_numbers = itertools.count(1)
        self._released: deque[int] = deque()
        self._finished_numbers: list[int] = []  # that servers have not been told
        self._server_reports: dict[str, int] = {}
        self._deadlines = 0
        self._timers = {
            phase: metrics.timer(f"closure.{phase}") for phase in ("queue", "send", "compute")
        }
        self._counters = {what: metrics.counter(f"coordinator.{what}") for what in _COUNTED}
        self.links = [
            WorkerLink(
                self,
                number,
                task_index=task,
                workers=len(tasks),
                address=spec.task_address("worker", task),
                key=key,
            )
            for number, task in enumerate(tasks)
        ]
        self._watch = WatchThreads(self)

    def start(self) -> None:
        """Begins to connect and to watch."""
        for link in self.links:
            link.start()
        self._watch.start()

    def close(self) -> None:
        """Cancels what is not done and ends every thread. May be called again."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            error = ClosureCancelled("the coordinator was closed before this closure was done.")
            for closure in self._closures.values():
                closure.value._fail(error)
            self._closures.clear()
            self.changed.notify_all()
        close_links(self.links, self.options.close_timeout_s)
        self._watch.close(self.options.close_timeout_s)

    def abandon(self) -> None:
        """Nobody has the coordinator any more: the watch ends everything soon.

        Called while objects are being collected, in any thread, whatever it holds: it only notes.
        """
        self.abandoned = True

    # ------------------------------------------------------------------ work comes in

    def locked_add(self, closure: Closure) -> int | None:
        """Queues a closure; gives the worker that should be fed now, if there is one."""
        closure.number = next(self._numbers)
        self._closures[closure.number] = closure
        self.queue.add(closure.number)
        self._counters["scheduled"].add()
        return self.queue.least_loaded_worker()

    def add_resource(self, call: Call, values: PerWorkerValues) -> None:
        """Builds a per-worker value on every worker, now and whenever one is replaced."""
        number = next(self._resource_numbers)
        values._resource = number
        # The callback only notes the number: it may run in any thread, at any time (CCO-32).
        reference = weakref.ref(values, functools.partial(_note, self._released, number))
        with self.changed:
            self.resources[number] = (reference, call)
            for link in self.links:
                self._locked_build(link, number, values)
        for link in self.links:
            self.pump(link)

    def pump(self, link: WorkerLink) -> None:
        """Sends the worker what it may have now."""
        with link.sending:
            while True:
                with self.lock:
                    was_full = self.queue.full
                    numbers = self.queue.take(link.index)
                    if not numbers:
                        return
                    closures = [self._closures[number] for number in numbers]
                batch: list[Encoded] = []
                for closure in closures:
                    self.sender.add(link, closure, batch)
                sent_at = time.perf_counter()
                for closure in closures:
                    closure.sent_at = sent_at
                if was_full:
                    with self.changed:
                        self.changed.notify_all()  # schedule() may wait for room
                if not link.send(batch):
                    return

    # ------------------------------------------------------------------ what links tell

    def setup_object(self) -> object:
        """What a worker needs to open a life."""
        return self.views.worker_setup()

    def next_incarnation(self, worker: int) -> int:
        """A number no earlier life of the worker had."""
        with self.lock:
            self.lives[worker] += 1
            return self.lives[worker]

    def worker_up(self, link: WorkerLink) -> None:
        """A life began: it gets the present state, then its resources, then work."""
        self.sender.catch_up(link)
        with self.changed:
            if self.closed:
                return
            self.queue.worker_up(link.index, incarnation=link.incarnation)
            for number, (reference, _) in list(self.resources.items()):
                values = reference()
                if values is not None:
                    self._locked_build(link, number, values)
            self.changed.notify_all()
        if link.incarnation > 1:
            _log.info("%s is back (life %d)", link.task, link.incarnation)
        self.pump(link)

    def worker_reports(self, link: WorkerLink, frames: Sequence[Frame]) -> None:
        """Results, errors and signs of life."""
        finished: list[messages.Finished] = []
        arrived = time.perf_counter()
        for frame in frames:
            if isinstance(frame.message, messages.LogLine):
                output.log_line(link.task, frame.message)
            elif isinstance(frame.message, messages.Failed) and frame.message.lacks:
                self._send_again(link, frame.message.closure)
        with self.changed:
            if self.closed:
                return  # its closures have been cancelled
            for frame in frames:
                message = frame.message
                if isinstance(message, messages.Finished):
                    if self.queue.completed(link.index, message.closure):
                        self._locked_complete(message, frame, arrived)
                        finished.append(message)
                elif isinstance(message, messages.Failed):
                    self._locked_failure(link, message)
                elif isinstance(message, messages.Returned):
                    self._locked_do(self.queue.returned(link.index, message.closures))
                elif isinstance(message, messages.Beat) and message.facts:
                    self.facts[link.index] = metrics.Snapshot.from_plain(message.facts)
            if finished:
                self._locked_set_window(link, finished)
                self.finished += len(finished)
                self._counters["completed"].add(len(finished))
            # With a hundred batches a second, waking a join for each would cost more than the rest.
            if self.bell.waiting_for_values or self.queue.idle or self.queue.error is not None:
                self.changed.notify_all()
            # What came back (retries, recalls) may be for somebody who has nothing at all.
            least_loaded_worker = self.queue.least_loaded_worker()
        if least_loaded_worker is not None and least_loaded_worker != link.index:
            self.pump(self.links[least_loaded_worker])
        self.pump(link)

    def _send_again(self, link: WorkerLink, number: int) -> None:
        """Before the closure's error is known to anybody, who might schedule it again."""
        with self.lock:
            closure = self._closures.get(number)
        if closure is not None:
            self.sender.send_again(link, closure.call)

    def worker_lost(self, link: WorkerLink, reason: Exception) -> None:
        """Fences the life on every server, then lets its closures run elsewhere (contract 6)."""
        _log.warning("%s is lost: %s; its closures run elsewhere", link.task, reason)
        metrics.event("worker_lost", worker=link.task, reason=str(reason))
        self._counters["workers_lost"].add()
        lost = WorkerLost(f"{link.task} was lost: {reason}", task=link.task)
        with self.changed:
            if self.closed:
                return
            self.facts.pop(link.index, None)
            self._counters["closures_repeated"].add(len(self.queue.at_worker(link.index)))
            self._locked_do(self.queue.worker_lost(link.index), lost)
            for reference, _ in self.resources.values():
                values = reference()
                if values is not None:
                    values.values[link.index]._abort(_aborted(lost))
            self.changed.notify_all()
        try:
            self.views.fence(link.task_index, link.incarnation)
        except ParameterServerLost as error:
            self.server_lost(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, join must not wait for it
            _log.exception("fencing %s failed: what it ran is not repeated", link.task)
            self._stop(error)
        with self.changed:
            self._locked_do(self.queue.fenced(link.index))
            self.changed.notify_all()
        for other in self.links:
            self.pump(other)

    def worker_unreachable(self, link: WorkerLink, error: Exception) -> None:
        """An attempt to begin a life failed; the link tries again."""
        _log.debug("%s does not answer: %s", link.task, error)
        with self.changed:
            self.changed.notify_all()  # who waits for workers may go on without this one
        if isinstance(error, ParameterServerLost):
            self.server_lost(error)

    # ------------------------------------------------------------------ what the watch tells

    def server_lost(self, error: ParameterServerLost) -> None:
        """A server is gone for good: everything stops, the next call raises it."""
        with self.changed:
            if not self.closed and self.queue.error is None:
                _log.error("%s", error)
                self.errors.append(
                    ClosureRecord(closure=None, function="", worker=error.task, error=error)
                )
                self._locked_do(self.queue.stop(error))
                # What runs waits for that server, or is about to: nobody should wait with it.
                for number in self.queue.abandon():
                    self._closures.pop(number).value._fail(error)
                    self._finished_numbers.append(number)
            self.changed.notify_all()

    def no_workers(self, waited_s: float) -> None:
        """Closures have waited too long for any worker to come."""
        what = f"closures wait, but no worker has answered for {waited_s:g} s ({self.why_down()})."
        self._stop(UnavailableError(what, task="/job:worker"))

    def _stop(self, error: Exception) -> None:
        """Something is wrong that is nobody's closure: the next call raises it."""
        with self.changed:
            self.errors.append(ClosureRecord(closure=None, function="", worker="", error=error))
            self._locked_do(self.queue.stop(error))
            self.changed.notify_all()

    def why_down(self) -> str:
        """Who does not answer, where, and what came of the last attempt."""
        return "; ".join(link.why_down() for link in self.links if not link.connected)

    def tick(self) -> None:
        """Looks after idle workers, and things nobody needs any more. May wait for a worker to read."""
        with self.lock:
            self._locked_do(self.queue.rebalance())
            released = self._locked_released()
            least_loaded_worker = self.queue.least_loaded_worker()
            finished, self._finished_numbers = self._finished_numbers, []
        self.sender.forget(self.links, released)
        if finished:
            self.views.finish_closures(finished)
        if least_loaded_worker is not None:
            self.pump(self.links[least_loaded_worker])

    def look_for_silence(self) -> None:
        """Gives up workers that have said nothing for too long. Never waits."""
        now = time.monotonic()
        for link in self.links:
            link.look_for_silence(now)

    def beat(self) -> None:
        """Tells every worker that its coordinator lives. Never waits."""
        for link in self.links:
            link.beat()

    # ------------------------------------------------------------------ inside, holding lock

    def _locked_build(self, link: WorkerLink, resource: int, values: PerWorkerValues) -> None:
        _, call = self.resources[resource]
        value = values.values[link.index]
        closure = Closure(next(self._numbers), call, value, time.perf_counter(), resource=resource)
        self._closures[closure.number] = closure
        down = WorkerLost(f"{link.task} is down", task=link.task)
        self._locked_do(self.queue.add_resource(closure.number, link.index), down)

    def _locked_complete(self, message: messages.Finished, frame: Frame, arrived: float) -> None:
        closure = self._closures.pop(message.closure)
        closure.value._set(message.value, frame)
        self._finished_numbers.append(closure.number)
        if not closure.resource:
            timers = self._timers
            timers["queue"].record(closure.sent_at - closure.scheduled_at + message.waited_s)
            timers["compute"].record(message.ran_s)
            travelled = arrived - closure.sent_at - message.waited_s - message.ran_s
            timers["send"].record(max(0.0, travelled))

    def _locked_set_window(self, link: WorkerLink, finished: Sequence[messages.Finished]) -> None:
        mean = sum(message.ran_s for message in finished) / len(finished)
        old = link.mean_run_s
        link.mean_run_s = mean if old == 0.0 else 0.75 * old + 0.25 * mean
        window = int(IN_FLIGHT_S / max(link.mean_run_s, 1e-6))
        self.queue.set_window(link.index, min(MAX_WINDOW, max(MIN_WINDOW, window)))

    def _locked_failure(self, link: WorkerLink, message: messages.Failed) -> None:
        closure = self._closures.get(message.closure)
        if closure is None:
            return
        error = exception_from(message.failure, may_unpickle=True, any_type=True)
        if not closure.resource and self._is_transient(message, error):
            actions = self.queue.retry(link.index, message.closure)
            if actions is not None:
                self._counters["retried"].add()
                _log.warning("%s: %s is retried: %s", link.task, closure.name, error)
                self._locked_do(actions)
            return
        actions = self.queue.failed(link.index, message.closure, error)
        if actions is None:
            return
        del self._closures[message.closure]
        closure.value._fail(error)
        self._finished_numbers.append(closure.number)
        if closure.resource:
            return  # it concerns nobody until somebody uses it (CCO-25)
        self._counters["failed"].add()
        self._locked_keep(closure, link.task, error, message.failure.traceback)
        self._locked_do(actions)

    def _is_transient(self, message: messages.Failed, error: BaseException) -> bool:
        """FLT-10 and FLT-11: the first reports of a server's trouble are not believed."""
        if message.blame == "server" and isinstance(error, ParameterServerLost):
            seen = self._server_reports.get(error.task, 0) + 1
            self._server_reports[error.task] = seen
            return seen < self.options.transient_ps_failures
        if message.blame == "deadline":
            limit = self.options.transient_timeouts
            self._deadlines += 1
            return self._deadlines < (limit if limit >= 0 else len(self.links) // 10)
        return False

    def _locked_do(self, actions: Sequence[Action], lost: WorkerLost | None = None) -> None:
        for action in actions:
            if isinstance(action, ResolveClosure):
                self._locked_settle(action, lost)
            elif isinstance(action, RecallClosures):
                self._watch.recall(action)  # not sent here: a send may wait

    def _locked_settle(self, action: ResolveClosure, lost: WorkerLost | None) -> None:
        closure = self._closures.pop(action.closure, None)
        if closure is None:
            return
        self._finished_numbers.append(closure.number)
        if action.fate is Fate.ABORTED:
            closure.value._abort(_aborted(lost))
        elif action.fate is Fate.CANCELLED:
            closure.value._fail(
                ClosureCancelled(
                    f"{closure.name} was cancelled because another closure failed; schedule it "
                    "again if it still matters."
                )
            )
        else:
            error = self._poisonous(closure, [self.links[n].task for n in action.workers])
            closure.value._fail(error)
            self._locked_keep(closure, error.workers[-1], error)
            self._locked_do(self.queue.stop(error))

    def _poisonous(self, closure: Closure, workers: Sequence[str]) -> ClosurePoisonous:
        return ClosurePoisonous(
            f"{closure.name} was lost with {len(workers)} workers in a row "
            f"({', '.join(workers)}) and is not tried again. It probably ends the process (out of "
            "memory, a crash in native code, os._exit), or keeps the worker from answering for "
            f"more than {self.options.heartbeat_limit_s:g} s.",
            closure=closure.name,
            workers=workers,
        )

    def _locked_keep(
        self, closure: Closure, worker: str, error: BaseException, trace: str = ""
    ) -> None:
        self.errors.append(
            ClosureRecord(
                closure=closure.number,
                function=closure.name,
                worker=worker,
                error=error,
                remote_traceback=trace,
            )
        )

    def _locked_released(self) -> list[int]:
        released = []
        while self._released:
            number = self._released.popleft()
            if self.resources.pop(number, None) is not None:
                released.append(number)
        return released


def _note(released: deque[int], number: int, _: Any) -> None:
    released.append(number)


def _aborted(lost: WorkerLost | None) -> ClosureAborted:
    return ClosureAborted(f"the worker holding this value is gone: {lost}", original_exception=lost)
