"""Execute the decisions of the closure queue: send closures, store results, fence and release workers.

Events come from the threads of the links (`worker_link.py`), from the watch threads (`watch_threads.py`) and
from the user's threads (`coordinator.py`). Every event goes to the `ClosureQueue`; every action that the
queue returns is executed here.

Locks, always acquired in this order: the sender's packing lock; a link's `sending`, which keeps the order
of the messages to one worker; `lock` (of the condition `changed`), which guards the queue, the tables and
the remote values. A thread that holds `lock` never waits for I/O. Methods with ``locked_`` in their name are
called while holding it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import final

from stratagem import metrics
from stratagem._cluster.contract import StrategyOnCoordinator
from stratagem._cluster.coordinator import closure_actions as actions
from stratagem._cluster.coordinator.closure_actions import SENDING, Action, Sending
from stratagem._cluster.coordinator.closure_queue import ClosureQueue
from stratagem._cluster.coordinator.closure_table import (
    Cause,
    ClosureTable,
    ResourceTable,
    reported_advances,
)
from stratagem._cluster.coordinator.not_awaited import locked_not_awaited, log_at_exit
from stratagem._cluster.coordinator.packer import Encoded
from stratagem._cluster.coordinator.queue_state import ClosureChoice
from stratagem._cluster.coordinator.remote_values import PerWorkerValues, ResultCondition
from stratagem._cluster.coordinator.round_driver import RoundDriver
from stratagem._cluster.coordinator.sender import Call, Closure, Sender
from stratagem._cluster.coordinator.server_recoveries import ServerRecoveries
from stratagem._cluster.coordinator.shared_dataset import SharedDataset
from stratagem._cluster.coordinator.start_rules import SynchronousRounds, start_rule
from stratagem._cluster.coordinator.watch_threads import WatchThreads
from stratagem._cluster.coordinator.worker_link import WorkerLink, close_links, log_output
from stratagem._wire import messages
from stratagem._wire.failures import exception_from
from stratagem._wire.messages import Frame, Message
from stratagem.config import ClusterOptions
from stratagem.errors import (
    ClosureCancelled,
    CoordinatorReplaced,
    ParameterServerLost,
    UnavailableError,
    WorkerLost,
)

_log = logging.getLogger("stratagem.coordinator")


@final
class Engine:
    """Queue, links and closures of one coordinator.

    Args:
        views: what the coordinator asks of the strategy.
        options: limits.
        make_link: makes the link of a worker, from this engine, the worker's number and its task index.
        tasks: task indices of the first workers; `add_worker` adds more.
    """

    def __init__(
        self,
        views: StrategyOnCoordinator,
        options: ClusterOptions,
        make_link: Callable[[Engine, int, int], WorkerLink],
        tasks: Sequence[int] = (),
    ) -> None:
        self.name = f"coordinator-{uuid.uuid4().hex[:8]}"
        self.options = options
        self.views = views
        self.sender = Sender(views)
        self.lock = threading.Lock()
        self.result_condition = ResultCondition(self.lock, trusted=self.options.trust_workers)
        self.changed = self.result_condition.condition
        rule = start_rule(views.staleness)
        self.rounds: RoundDriver | None = None
        if isinstance(rule, SynchronousRounds):
            self.rounds = RoundDriver(self, rule)
            self.result_condition.on_wait = self.rounds.want
        self.queue = ClosureQueue(
            limit=options.queue_limit,
            poison_limit=options.poison_limit,
            server_failures=options.transient_ps_failures,
            deadlines=options.transient_timeouts,
            choice=ClosureChoice(
                part_of=lambda number: self.closures[number].part,
                inputs_of=lambda number: self.closures[number].inputs,
            ),
            rule=rule,
        )
        self.job = views.job
        # Incarnations of workers have larger numbers: those of an earlier coordinator of the job end here.
        self.before_first = 0 if self.job is None else self.job.first_incarnation
        self.replaced: CoordinatorReplaced | None = None  # by a newer coordinator of the job
        self.closures = ClosureTable(options.heartbeat_limit_s, self.job)
        self.links: dict[int, WorkerLink] = {}
        self.closed = False
        self.abandoned = threading.Event()  # by a finalizer: the watch thread closes the engine
        self._make_link = make_link
        self._started = False
        self._tasks: dict[int, str] = {}  # names of all workers ever, by number
        self._incarnations: dict[int, int] = {}  # the last one of each task index
        self._released_links: list[WorkerLink] = []
        self._resources = ResourceTable(self.result_condition)
        self._path_errors: dict[str, ParameterServerLost] = {}  # the last report about each server
        self.check_membership: Callable[[], None] | None = None  # follows the resolver
        self._watch = WatchThreads(self)
        self.recoveries = ServerRecoveries(self)
        for task in tasks:
            self.add_worker(task)

    def start(self) -> None:
        """Start the threads that connect to the workers and watch them."""
        self._started = True
        log_at_exit(self)
        if self.job is not None:
            self.job.connection.on_replaced(self.note_replaced)
        for link in self.links.values():
            link.start()
        self._watch.start()

    def close(self) -> None:
        """Cancel unfinished closures and end every thread. May be called again."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            lost = locked_not_awaited(self)
            self.closures.cancel_all(
                ClosureCancelled("the coordinator was closed before this closure was done.")
            )
            self.changed.notify_all()
        for text in lost if sys.exc_info()[0] is None else ():
            _log.warning("the coordinator closes: %s", text)
        self.recoveries.close()
        self.result_condition.run_callbacks()
        close_links([*self.links.values(), *self._released_links], self.options.close_timeout_s)
        self._watch.close(self.options.close_timeout_s)

    # ------------------------------------------------------------------ workers join and leave

    def add_worker(self, task_index: int) -> None:
        """Add a worker: connect to it, build the per-worker values on it, send it closures."""
        number = len(self._tasks)
        link = self._make_link(self, number, task_index)
        with self.changed:
            if self.closed:
                return
            self.queue.add_worker(number)
            self.links[number] = link
            self._tasks[number] = link.task
            new = WorkerLost(f"{link.task} is new", task=link.task)
            self._resources.worker_joined(number, new)
        if self._started:
            link.start()

    def drain_worker(self, number: int) -> None:
        """Let a worker finish its running closure, send it no more, then disconnect it."""
        self.handle(lambda: self.queue.drain_worker(number))

    # ------------------------------------------------------------------ events of the user

    @property
    def locked_full(self) -> bool:
        """True if `schedule` must wait: too many closures are queued, or their arguments are too large."""
        return self.queue.full or 0 < self.options.queue_bytes <= self.closures.argument_bytes

    def check_job(self) -> None:
        """Raise if a named job may not schedule: another coordinator has it, or it was not continued."""
        if self.replaced is not None:
            raise self.replaced
        if self.job is not None:
            self.job.check_resumed()

    def want_all(self) -> None:
        """Let all closures run that wait for others to run with."""
        if self.rounds is not None:
            self.rounds.want()

    def locked_add(self, closure: Closure, datasets: Sequence[SharedDataset] = ()) -> list[Sending]:
        """Queue a closure; return what to `execute` without the lock."""
        found = self.queue.add(self.closures.add(closure, datasets))
        return self.locked_execute(found) if found else []  # usually every worker is busy

    def locked_take_error(self) -> BaseException | None:
        """Return the error to raise, if any, and accept closures again."""
        error = self.result_condition.take_error()
        if self.queue.stopped:
            self.queue.resume()
            self.changed.notify_all()
        return error

    def add_resource(self, call: Call) -> PerWorkerValues:
        """Build a value on every worker, now and whenever a worker joins or returns."""
        pending: list[Sending] = []
        with self.changed:
            number, values = self._resources.add(call, self.links)
            for link in self.links.values():
                pending += self._locked_build(link, number, values)
        self.execute(pending)
        return values

    # ------------------------------------------------------------------ events of the links

    def new_incarnation(self, link: WorkerLink) -> int:
        """Return a number that no earlier incarnation of this task had."""
        with self.lock:
            number = self._incarnations.get(link.task_index, self.before_first) + 1
            self._incarnations[link.task_index] = number
            return number

    def worker_up(self, link: WorkerLink) -> None:
        """Handle a new session: bring the worker up to date, build its values, send closures."""
        self.sender.catch_up(link)
        if link.incarnation > self.before_first + 1:
            _log.info("%s is back (incarnation %d)", link.task, link.incarnation)
            metrics.event("worker_back", worker=link.task, incarnation=link.incarnation)
        with self.changed:
            if self.closed or link.number not in self.links:
                return
            up = self.queue.worker_up(link.number, incarnation=link.incarnation)
            pending = self.locked_execute(up)
            for resource, values in self._resources.live():
                pending += self._locked_build(link, resource, values)
            self.changed.notify_all()
        self.execute(pending)

    def worker_reports(self, link: WorkerLink, frames: Sequence[Frame]) -> None:
        """Handle results, errors and signs of life of a worker."""
        results: dict[int, Frame] = {}
        ran_s = 0.0
        others: list[Message] = []
        for frame in frames:
            message = frame.message
            if isinstance(message, messages.Finished):
                results[message.closure] = frame
                ran_s += message.ran_s
            elif isinstance(message, messages.LogLine):
                log_output(link.task, message)
            else:
                others.append(message)
        pending: list[Sending] = []
        with self.changed:
            if self.closed:
                return  # its closures have been cancelled
            done: list[Action] = []
            if results:
                done = self.queue.finished(link.number, tuple(results), ran_s / len(results))
                if self.rounds is not None:
                    frames = self.rounds.locked_hold(link, frames, results)
            pending += self.locked_advance(link, link.incarnation, frames, done)
            pending += self.locked_execute(done, results=results)
            for message in others:
                pending += self._locked_report(link, message)
            # With a hundred batches a second, waking a join for each would cost more than the rest.
            waiting = self.result_condition.waiting_for_values
            if waiting or others or self.queue.stopped or self.queue.idle:
                self.changed.notify_all()
        self.execute(pending)

    def worker_lost(self, link: WorkerLink, reason: Exception) -> None:
        """Fence the lost incarnation on every server, then let its closures run elsewhere."""
        if self.recoveries.ended_session(link.task_index, link.incarnation):
            _log.info("%s connects again, because %s", link.task, reason)
        else:
            _log.warning("%s is lost: %s; its closures run elsewhere", link.task, reason)
        metrics.event("worker_lost", worker=link.task, reason=str(reason))
        metrics.counter("coordinator.workers_lost").add()
        lost = WorkerLost(f"{link.task} was lost: {reason}", task=link.task)

        def event() -> list[Action]:
            if link.number in self.links:
                self.links[link.number].metrics = metrics.Snapshot()
            self._resources.worker_lost(link.number, lost)
            return self.queue.worker_lost(link.number)

        self.handle(event, Cause(lost))

    def worker_unreachable(self, link: WorkerLink, error: Exception) -> None:
        """Note a failed attempt to connect; the link tries again."""
        _log.debug("%s does not answer: %s", link.task, error)
        self.note_replaced(error)
        with self.changed:
            if isinstance(error, ParameterServerLost) and not self.recoveries.forgives(error.task):
                # The worker's trouble, until others have it.
                self.queue.worker_without_path(link.number, error.task)
                self._path_errors[error.task] = error
            self.changed.notify_all()  # a thread that waits for workers may go on without this one

    # ------------------------------------------------------------------ events of the watch threads

    def note_replaced(self, error: Exception) -> None:
        """Stop everything, for good, if the error says that a newer coordinator has the named job."""
        if isinstance(error, CoordinatorReplaced) and self.replaced is None:
            self.replaced = error
            self.handle(self.queue.server_lost, Cause(error))

    def server_lost(self, error: ParameterServerLost) -> None:
        """Begin to restore the server, or stop everything: the user's next call raises the error."""
        if self.recoveries.begin(error):
            return

        def event() -> list[Action]:
            held = [] if self.rounds is None else self.rounds.locked_give_up("given up")
            return [*self.queue.server_lost(), *held]

        self.handle(event, Cause(error, error.task))

    def servers_out_of_reach(self) -> dict[str, ParameterServerLost]:
        """Return the errors of servers that a majority of the workers does not reach."""
        with self.lock:
            return {task: self._path_errors[task] for task in self.queue.servers_out_of_reach()}

    def no_workers(self, waited_s: float) -> None:
        """Stop: closures have waited too long for any worker."""
        text = f"closures wait, but no worker has answered for {waited_s:g} s ({self.why_down()})."
        self.handle(self.queue.stop, Cause(UnavailableError(text, task="/job:worker")))

    def tick(self) -> None:
        """Let the queue rebalance, and free objects that are no longer referenced. May wait for a worker."""
        self.handle(self.queue.tick)
        with self.lock:
            released = self._resources.take_collected()
            ended, self.closures.ended = self.closures.ended, []
            links = list(self.links.values())
        self.sender.forget(links, released)
        if ended:
            self.views.servers.finish_closures(ended)

    def why_down(self) -> str:
        """Say which workers do not answer, their addresses and the last errors."""
        return "; ".join(link.why_down() for link in self.links.values() if not link.connected)

    # ------------------------------------------------------------------ executing actions

    def handle(self, event: Callable[[], list[Action]], cause: Cause | None = None) -> None:
        """Report an event to the queue and execute the actions it returns."""
        with self.changed:
            if self.closed:
                return
            found = event()
            pending = self.locked_execute(found, cause)
            if found:
                self.changed.notify_all()
        self.execute(pending)

    def execute(self, pending: Sequence[Sending]) -> None:
        """Execute the actions that may wait for a worker or a server."""
        for action in pending:
            if isinstance(action, actions.EndRound):
                assert self.rounds is not None
                self.rounds.apply(action)
                continue
            link = self.links.get(action.worker)
            if link is None:
                continue  # released meanwhile
            if isinstance(action, actions.SendClosures):
                self._send_closures(link)
            elif isinstance(action, actions.RecallClosures):
                link.notify(messages.Recall(closures=action.closures))
            elif isinstance(action, actions.SetAsideWorker):
                link.give_up(WorkerLost(action.why, task=link.task))
            else:
                self._fence(link, action.incarnation)
        if self.result_condition.callbacks:
            self.result_condition.run_callbacks()

    def _send_closures(self, link: WorkerLink) -> None:
        # Once: a thread that queues a closure after `take` calls this function, too, and waits for `sending`.
        with link.sending:
            with self.lock:
                was_full = self.queue.full
                closures = [self.closures[number] for number in self.queue.take(link.number)]
            if not closures:
                return
            batch: list[Encoded] = []
            for closure in closures:
                self.sender.add(link, closure, batch)
            sent_at = time.perf_counter()
            for closure in closures:
                closure.sent_at = sent_at
            if was_full:
                with self.changed:
                    self.changed.notify_all()  # schedule() may wait for a free place
            link.send(batch)

    def _fence(self, link: WorkerLink, incarnation: int) -> None:
        try:
            self.views.servers.fence(link.task_index, incarnation)
        except ParameterServerLost as error:
            self.server_lost(error)
        except Exception as error:  # noqa: BLE001 - after any error, join must not wait for it
            _log.exception("fencing %s failed: its closures are not repeated", link.task)
            self.handle(self.queue.stop, Cause(error))
        innocent = self.recoveries.ended_session(link.task_index, incarnation)
        self.handle(lambda: self.queue.worker_fenced(link.number, innocent=innocent))

    # ------------------------------------------------------------------ holding lock

    def locked_execute(
        self,
        found: Sequence[Action],
        cause: Cause | None = None,
        results: Mapping[int, Frame] | None = None,
    ) -> list[Sending]:
        """Execute what only changes tables and values; return the actions that may wait."""
        pending: list[Sending] = []
        for action in found:
            if isinstance(action, SENDING):
                pending.append(action)
            elif isinstance(action, actions.DeliverResults):
                assert results is not None
                self.closures.deliver([results[number] for number in action.closures])
            elif isinstance(action, actions.ResolveClosure):
                lost_with = [self._tasks[number] for number in action.workers]
                cause = self.closures.resolve(action, cause, lost_with)
            elif isinstance(action, actions.RequeueClosure):
                self.closures.note_requeued(action, cause)
            elif isinstance(action, actions.ReleaseWorker):
                link = self.links.pop(action.worker)
                link.leave()
                self._released_links.append(link)
                left = WorkerLost(f"{link.task} has left", task=link.task)
                self._resources.worker_left(link.number, left)
            else:
                assert cause is not None
                self.result_condition.error = cause.error
                self.result_condition.one_closure = action.closure is not None
                if action.closure is None:
                    _log.error("%s", cause.error)
                    self.closures.keep_error(cause)
        return pending

    def locked_advance(
        self, link: WorkerLink, incarnation: int, frames: Sequence[Frame], done: Sequence[Action]
    ) -> list[Sending]:
        """Make what closures did to schedulers, scalers and settings, before their results are known."""
        pending: list[Sending] = []
        for report, made in reported_advances(frames, done):
            try:
                self.views.advance(link.number, incarnation, report, made)
            except Exception as error:  # noqa: BLE001 - schedulers are users' classes
                pending += self.locked_execute(self.queue.stop(), Cause(error, link.task))
        return pending

    def _locked_report(self, link: WorkerLink, message: Message) -> list[Sending]:
        """Handle any report but a result."""
        if isinstance(message, messages.Returned):
            return self.locked_execute(self.queue.returned(link.number, message.closures))
        if isinstance(message, messages.Failed) and message.closure in self.closures:
            error = exception_from(
                message.failure,
                may_unpickle=True,
                any_type=True,
                trusted=self.options.trust_workers,
            )
            task, others_reach = "", False
            if isinstance(error, ParameterServerLost):
                task, others_reach = error.task, self.views.servers.reaches(error.task)
                self._path_errors[task] = error
            forgiven = bool(task) and self.recoveries.forgives(task)
            return self.locked_execute(
                self.queue.failed(
                    link.number,
                    message.closure,
                    blame=message.blame,
                    task=task,
                    others_reach=others_reach,
                    forgiven=forgiven,
                    lacks=message.lacks,
                    ended=message.ended,
                ),
                Cause(error, link.task, message.failure.traceback),
            )
        if isinstance(message, messages.Beat) and message.metrics and link.number in self.links:
            link.metrics = message.metrics
        return []

    def _locked_build(
        self, link: WorkerLink, resource: int, values: PerWorkerValues
    ) -> list[Sending]:
        """Queue the closure that builds one worker's part of a per-worker value."""
        call, value = self._resources.call(resource), values._by_worker[link.number]
        closure = Closure(0, call, value, time.perf_counter(), resource=resource)
        down = WorkerLost(f"{link.task} is down", task=link.task)
        found = self.queue.add_resource(self.closures.add(closure), link.number)
        return self.locked_execute(found, Cause(down))
