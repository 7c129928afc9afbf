"""The coordinator: takes closures, sees them through, and answers for what became of them.

Decisions are made by `closures.ClosureQueue`; this module carries them out. Its threads: the user's
(schedule, join, fetch), one per worker (`link.py`), and two that watch (`watch.py`).

Locks, taken in this order, never the other way round:

- `_packing`: one thread packs functions and arguments at a time;
- a link's `sending`: keeps the order of what one worker is told;
- `_lock` (of the condition `_changed`): the queue, the tables of closures, remote values. Nothing
  that can wait is done while it is held.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Final, Self, final

from typing_extensions import override

from stratagem import metrics
from stratagem._cluster import output
from stratagem._cluster.closures import Action, ClosureQueue, Fate, Recall, Settle
from stratagem._cluster.link import WorkerLink
from stratagem._cluster.remote import (
    PerWorkerDataset,
    PerWorkerValues,
    RemoteValue,
    make_iterator,
    map_leaves,
)
from stratagem._cluster.shipping import Encoded, Shipment, Shipper
from stratagem._cluster.tasks import cluster_key
from stratagem._cluster.views import ClusterStrategy, CoordinatorViews, PlainViews
from stratagem._cluster.watch import Watch
from stratagem._wire import messages
from stratagem._wire.failures import exception_from
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Frame
from stratagem.config import ClusterOptions
from stratagem.errors import (
    ClosureAborted,
    ClosureCancelled,
    ClosureInputError,
    ClosurePoisonous,
    DeadlineExceeded,
    ParameterServerLost,
    UnavailableError,
    WorkerLost,
)

_log = logging.getLogger("stratagem.coordinator")

IN_FLIGHT_S: Final = 0.005
"""Work sent ahead to a worker, in seconds: several times a wake-up, short against any fault."""

MAX_WINDOW: Final = 64
MIN_WINDOW: Final = 2

ERRORS_KEPT: Final = 1000
"""Errors kept in `coordinator.errors`; the oldest go first."""


@dataclass(frozen=True, kw_only=True)
class ClosureRecord:
    """One error: whose it was, where, and what happened.

    Example:
        >>> from stratagem._cluster.coordinator import ClosureRecord
        >>> ClosureRecord(
        ...     closure=3,
        ...     function="step",
        ...     worker="/job:worker/task:1",
        ...     error=ValueError("no"),
        ...     remote_traceback="...",
        ... ).error
        ValueError('no')
    """

    closure: int | None
    function: str
    worker: str
    error: BaseException
    remote_traceback: str


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker as the coordinator sees it now.

    Example:
        >>> from stratagem._cluster.coordinator import WorkerStatus
        >>> WorkerStatus(index=0, task="/job:worker/task:0", connected=True, life=2).life
        2
    """

    index: int
    task: str
    connected: bool
    life: int
    """How many lives it has begun for this coordinator: above 1, it was lost and came back."""


@dataclass(slots=True, eq=False)
class _Closure:
    number: int
    function: Shipment
    arguments: Shipment | None
    value: RemoteValue
    exactly_once: bool
    version: int
    resource: int
    scheduled_at: float
    sent_at: float = 0.0


@final
class ClusterCoordinator:
    """Schedules functions on the workers of a parameter-server cluster.

    One coordinator per strategy: constructing it again gives the same object (CCO-1). Close it, or
    use it as a context manager; the cluster then serves the next strategy.

    Args:
        strategy: a `ParameterServerStrategy`.
        options: limits; by default from the environment (`ClusterOptions.from_environment`).

    Raises:
        ValueError: `strategy` has no cluster.
        UnavailableError: no worker answered within ``connect_timeout_s``.

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=2, ps=1, in_process=True) as cluster:
        ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
        ...     with sg.ClusterCoordinator(strategy) as coordinator:
        ...         squares = [coordinator.schedule(lambda n: n * n, args=(n,)) for n in range(4)]
        ...         coordinator.join()
        ...         coordinator.fetch(squares)
        [0, 1, 4, 9]
    """

    # Weak on both sides: a coordinator (its errors' tracebacks, for one) may lead to its strategy.
    _of: ClassVar[weakref.WeakKeyDictionary[Any, weakref.ref[ClusterCoordinator]]] = (
        weakref.WeakKeyDictionary()
    )
    _of_lock = threading.Lock()

    def __new__(cls, strategy: Any, *, options: ClusterOptions | None = None) -> Self:
        """The strategy's coordinator, made at the first call."""
        if not isinstance(strategy, ClusterStrategy):
            raise ValueError(
                f"{strategy!r} has no cluster: ClusterCoordinator needs a ParameterServerStrategy."
            )
        with cls._of_lock:
            known = cls._of.get(strategy)
            found = known() if known is not None else None
            if found is None:
                found = super().__new__(cls)
                found._begin(strategy, options or ClusterOptions.from_environment())
                cls._of[strategy] = weakref.ref(found)
        assert isinstance(found, cls)
        return found

    def __init__(self, strategy: Any, *, options: ClusterOptions | None = None) -> None:
        """Everything happens in `__new__`: a second construction must not begin again."""

    def _begin(self, strategy: ClusterStrategy, options: ClusterOptions) -> None:
        spec = strategy.cluster_resolver.cluster_spec()
        workers = spec.task_indices("worker")
        self.name = f"coordinator-{uuid.uuid4().hex[:8]}"
        self.options = options
        self._strategy = weakref.ref(strategy)
        self._views: CoordinatorViews = strategy._cluster_views()
        self._packing = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue = ClosureQueue(
            len(workers), limit=options.queue_limit, poison_limit=options.poison_limit
        )
        self._shipper = Shipper(self._views)
        self._closures: dict[int, _Closure] = {}
        self._numbers = itertools.count(1)
        self._lives = [0] * len(workers)
        self._resources: dict[int, tuple[weakref.ref[PerWorkerValues], Shipment, Any]] = {}
        self._resource_numbers = itertools.count(1)
        self._released: deque[int] = deque()
        self._once_done: list[int] = []
        self._version = 0
        self._updates: deque[tuple[int, Shipment]] = deque()
        self._joining = 0
        self._closed = False
        self._errors: deque[ClosureRecord] = deque(maxlen=ERRORS_KEPT)
        self._server_reports: dict[str, int] = {}
        self._deadlines = 0
        self._finished = 0
        self._facts: dict[int, metrics.Snapshot] = {}
        self._timers = {
            phase: metrics.timer(f"closure.{phase}") for phase in ("queue", "send", "compute")
        }
        self._counters = {
            what: metrics.counter(f"coordinator.{what}")
            for what in (
                "scheduled",
                "completed",
                "failed",
                "retried",
                "workers_lost",
                "closures_repeated",
            )
        }
        key = cluster_key()
        self._links = [
            WorkerLink(
                self,
                number,
                workers=len(workers),
                address=spec.task_address("worker", task),
                key=key,
            )
            for number, task in enumerate(workers)
        ]
        self._watch = Watch(self)
        for link in self._links:
            link.start()
        self._watch.start()
        self._await_workers()

    def _await_workers(self) -> None:
        limit_s = self.options.connect_timeout_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._queue.workers_up() == len(self._links), timeout=limit_s
            )
            up = self._queue.workers_up()
        if up == 0:
            reasons = "; ".join(f"{link.task}: {link.last_error}" for link in self._links)
            self.close()
            raise UnavailableError(
                f"no worker answered within {limit_s:g} s ({reasons}). Start the workers, or raise "
                "STRATAGEM_CONNECT_TIMEOUT_S.",
                task="/job:worker",
            )
        if up < len(self._links):
            _log.warning(
                "%d of %d workers answer after %g s; going on with them",
                up,
                len(self._links),
                limit_s,
            )

    # ------------------------------------------------------------------ for the user

    @property
    def strategy(self) -> Any:
        """The strategy this coordinator works for."""
        return self._strategy()

    @property
    def errors(self) -> list[ClosureRecord]:
        """Every error so far (the last 1000), with worker, function and remote traceback."""
        with self._lock:
            return list(self._errors)

    @property
    def workers(self) -> list[WorkerStatus]:
        """Every worker, in order: whether it answers, and how often it had to come back."""
        return [
            WorkerStatus(
                index=link.index,
                task=link.task,
                connected=link.connected,
                life=link.incarnation,
            )
            for link in self._links
        ]

    @property
    def worker_metrics(self) -> metrics.Snapshot:
        """What the workers measured (compute, read, push …), merged; about a second old."""
        with self._lock:
            return metrics.merge(list(self._facts.values()))

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        exactly_once: bool = False,
    ) -> RemoteValue:
        """Puts a call of `fn` in the queue; the next free worker runs it.

        Returns at once unless the queue is full. Strategy, model, optimizer, variables and per-worker
        values, captured or passed, arrive as the worker's view of the same thing.

        Args:
            fn: any callable, lambdas and functions of ``__main__`` included.
            args: its positional arguments, as they are now.
            kwargs: its keyword arguments.
            exactly_once: if the worker is lost and the call is repeated elsewhere, writes to
                variables that were already applied are not applied again. The function must make
                the same writes in the same order each time.

        Raises:
            TypeError: `fn` is not callable, or cannot be sent.
            ValueError: a `RemoteValue` among the arguments.
            Exception: the first error of an earlier closure, once (CCO-20).
        """
        if not callable(fn):
            raise TypeError(f"schedule({fn!r}): expected something callable.")
        began = time.perf_counter()
        with self._packing:
            function = self._shipper.function(fn)
            arguments = None
            if args or kwargs:
                arguments = self._shipper.arguments(args or (), dict(kwargs or {}))
            version = self._take_updates()
        with self._changed:
            self._ready_to_schedule()
            number = next(self._numbers)
            closure = _Closure(
                number,
                function,
                arguments,
                RemoteValue(self._changed, function.name),
                exactly_once,
                version,
                0,
                began,
            )
            self._closures[number] = closure
            self._queue.add(number)
            worker = self._queue.hungriest()
        self._counters["scheduled"].add()
        if worker is not None:
            self._pump(self._links[worker])
        return closure.value

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until every closure scheduled so far is done.

        Args:
            timeout_s: how long to wait; by default as long as it takes.

        Raises:
            DeadlineExceeded: not done within `timeout_s`; nothing is cancelled.
            Exception: the first error of a closure, once; the rest has been cancelled (CCO-22).
        """
        with self._changed:
            self._joining += 1
            try:
                self._refuse_if_closed("join")
                if not self._changed.wait_for(self._settled, timeout_s):
                    raise DeadlineExceeded(
                        f"join: not done within {timeout_s:g} s: {self._queue!r}. Wait longer, or "
                        "look at coordinator.errors and the workers' log."
                    )
                self._raise_error()
                self._refuse_if_closed("join")
            finally:
                self._joining -= 1
                self._changed.notify_all()

    def done(self) -> bool:
        """Whether every closure scheduled so far is done.

        Raises:
            Exception: the first error of a closure, once (CCO-20).
        """
        with self._changed:
            self._refuse_if_closed("done")
            if self._queue.error is not None:
                self._changed.wait_for(self._settled)
                self._raise_error()
            return self._queue.idle

    def fetch(self, val: Any) -> Any:
        """Waits for every `RemoteValue` in a nest and puts the result in its place (RMV-4)."""
        return map_leaves(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """A dataset every worker builds for itself; iterate over it to get one iterator per worker.

        Args:
            dataset_fn: a function that returns a dataset (it runs on the workers; with a parameter it
                receives an `InputContext`), or a dataset.

        Raises:
            ValueError: neither.
        """
        if not callable(dataset_fn) and not isinstance(dataset_fn, Iterable):
            raise ValueError(
                f"create_per_worker_dataset({dataset_fn!r}): expected a dataset, or a function that "
                "returns one."
            )
        return PerWorkerDataset(self, dataset_fn)

    def create_per_worker_resource(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> PerWorkerValues:
        """Runs `fn` once on each worker, which keeps the result; again when a worker is replaced."""
        if not callable(fn):
            raise TypeError(f"create_per_worker_resource({fn!r}): expected something callable.")
        with self._packing:
            function = self._shipper.function(fn)
            arguments = None
            if args or kwargs:
                arguments = self._shipper.arguments(args or (), dict(kwargs or {}))
            self._take_updates()
        number = next(self._resource_numbers)
        values = PerWorkerValues(
            [RemoteValue(self._changed, f"resource {function.name}") for _ in self._links]
        )
        values._resource = number
        released = self._released
        with self._changed:
            self._refuse_if_closed("create_per_worker_resource")
            # The callback only notes the number: it may run in any thread, at any time (CCO-32).
            reference = weakref.ref(values, functools.partial(_note, released, number))
            self._resources[number] = (reference, function, arguments)
            for link in self._links:
                self._build_resource(link, number, values)
        for link in self._links:
            self._pump(link)
        return values

    def close(self) -> None:
        """Ends the work: what is not done is cancelled, workers and servers are free again.

        Variables of the strategy are freed on the servers. May be called again.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            error = ClosureCancelled("the coordinator was closed before this closure was done.")
            for closure in self._closures.values():
                closure.value._fail(error)
            self._closures.clear()
            self._changed.notify_all()
        self._watch.close(self.options.close_timeout_s)
        for link in self._links:
            link.close(self.options.close_timeout_s)
        self._views.close()
        self._views = PlainViews()  # lets go of the strategy and all it holds
        self._shipper = Shipper(self._views)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("a ClusterCoordinator cannot be copied: there is one per strategy.")

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else repr(self._queue)
        return f"<ClusterCoordinator {self.name} [{state}, {self._finished} done]>"

    # ------------------------------------------------------------------ scheduling, inside

    def _create_iterators(self, source: object) -> PerWorkerValues:
        values = self.create_per_worker_resource(make_iterator, args=(source, len(self._links)))
        values._iterators = True
        return values

    def _ready_to_schedule(self) -> None:
        """Waits for room and for other threads' joins; raises what waits to be raised."""
        self._refuse_if_closed("schedule")
        if self._queue.error is None and not self._joining and not self._queue.full:
            return
        self._changed.wait_for(
            lambda: (
                self._closed
                or (self._queue.error is not None and self._queue.quiet)
                or (self._queue.error is None and not self._joining and not self._queue.full)
            )
        )
        self._refuse_if_closed("schedule")
        self._raise_error()

    def _settled(self) -> bool:
        if self._closed:
            return True
        return self._queue.quiet if self._queue.error is not None else self._queue.idle

    def _raise_error(self) -> None:
        error = self._queue.clear_error()
        if error is not None:
            self._changed.notify_all()
            raise error

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(
                f"{what}: this coordinator is closed. Make a new strategy and a coordinator for it; "
                "the cluster can serve them."
            )

    def _take_updates(self) -> int:
        """Notes what moved since the last schedule; the closure's version. Holds `_packing`."""
        version = self._views.snapshot()
        if version != self._version:
            shipment = self._pack_updates(self._version, version)
            if shipment is not None:
                self._updates.append((version, shipment))
            self._version = version
        return version

    def _pack_updates(self, after: int, upto: int) -> Shipment | None:
        updates = self._views.updates(after, upto)
        return self._shipper.updates(updates) if updates else None

    # ------------------------------------------------------------------ sending

    def _pump(self, link: WorkerLink) -> None:
        """Sends the worker what it may have now."""
        with link.sending:
            while True:
                with self._lock:
                    numbers = self._queue.take(link.index)
                    if not numbers:
                        return
                    closures = [self._closures[number] for number in numbers]
                batch: list[Encoded] = []
                for closure in closures:
                    self._add_closure(link, closure, batch)
                sent_at = time.perf_counter()
                for closure in closures:
                    closure.sent_at = sent_at
                if not link.send(batch):
                    return

    def _add_closure(self, link: WorkerLink, closure: _Closure, batch: list[Encoded]) -> None:
        function, arguments = closure.function, closure.arguments
        for token in function.tokens:
            self._add_definition(link, token, batch)
        if closure.version > link.version:
            for version, shipment in tuple(self._updates):
                if link.version < version <= closure.version:
                    self._add_updates(link, shipment, batch)
            link.version = closure.version
        if function.digest not in link.functions:
            link.functions.add(function.digest)
            define = messages.Define(value=function.packed, function=function.digest)
            batch.append((define, function.buffers))
        buffers: Sequence[Buffer] = ()
        if arguments is not None:
            for token in arguments.tokens:
                self._add_definition(link, token, batch)
            buffers = arguments.buffers
        run = messages.Run(
            closure=closure.number,
            function=function.digest,
            arguments=arguments.packed if arguments is not None else None,
            exactly_once=closure.exactly_once,
            resource=closure.resource,
        )
        batch.append((run, buffers))

    def _add_updates(self, link: WorkerLink, shipment: Shipment, batch: list[Encoded]) -> None:
        for token in shipment.tokens:
            self._add_definition(link, token, batch)
        batch.append((messages.Update(updates=shipment.packed), shipment.buffers))

    def _add_definition(self, link: WorkerLink, token: Any, batch: list[Encoded]) -> None:
        if token in link.tokens:
            return
        link.tokens.add(token)
        encoded, nested = self._shipper.definitions[token]
        for inner in nested:
            self._add_definition(link, inner, batch)
        batch.append(encoded)

    # ------------------------------------------------------------------ what links tell us

    def setup_object(self) -> object:
        """What a worker needs to open a life."""
        return self._views.worker_setup()

    def next_incarnation(self, worker: int) -> int:
        """A number no earlier life of the worker had."""
        with self._lock:
            self._lives[worker] += 1
            return self._lives[worker]

    def worker_up(self, link: WorkerLink) -> None:
        """A life began: it gets the present state, then its resources, then work."""
        with self._packing:
            version = self._version
            shipment = self._pack_updates(0, version)
        with link.sending:
            link.version = version
            if shipment is not None:
                batch: list[Encoded] = []
                self._add_updates(link, shipment, batch)
                link.send(batch)
        with self._changed:
            if self._closed:
                return
            self._queue.worker_up(link.index, incarnation=link.incarnation)
            for number, (reference, _, _) in list(self._resources.items()):
                values = reference()
                if values is not None:
                    self._build_resource(link, number, values)
            self._changed.notify_all()
        if link.incarnation > 1:
            _log.info("%s is back (life %d)", link.task, link.incarnation)
        self._pump(link)

    def worker_reports(self, link: WorkerLink, frames: Sequence[Frame]) -> None:
        """Results, errors and signs of life."""
        finished: list[messages.Finished] = []
        arrived = time.perf_counter()
        for frame in frames:
            if isinstance(frame.message, messages.LogLine):
                output.log_line(link.task, frame.message)
        with self._changed:
            if self._closed:
                return  # its closures have been cancelled
            for frame in frames:
                message = frame.message
                if isinstance(message, messages.Finished):
                    if self._queue.completed(link.index, message.closure):
                        self._complete(link, message, frame, arrived)
                        finished.append(message)
                elif isinstance(message, messages.Failed):
                    self._report_failure(link, message)
                elif isinstance(message, messages.Returned):
                    self._carry_out(self._queue.returned(link.index, message.closures))
                elif isinstance(message, messages.Beat) and message.facts:
                    self._facts[link.index] = metrics.Snapshot.from_plain(message.facts)
            if finished:
                self._set_window(link, finished)
                self._finished += len(finished)
                self._counters["completed"].add(len(finished))
            self._changed.notify_all()
        self._pump(link)
        self._feed_others(link)

    def _feed_others(self, link: WorkerLink) -> None:
        """Closures that came back (retries, recalls) may be for somebody who waits for nothing."""
        with self._lock:
            worker = self._queue.hungriest()
        if worker is not None and worker != link.index:
            self._pump(self._links[worker])

    def worker_lost(self, link: WorkerLink, reason: Exception) -> None:
        """Fences the life on every server, then lets its closures run elsewhere (contract 6)."""
        _log.warning("%s is lost: %s; its closures run elsewhere", link.task, reason)
        metrics.event("worker_lost", worker=link.task, reason=str(reason))
        self._counters["workers_lost"].add()
        lost = WorkerLost(f"{link.task} was lost: {reason}", task=link.task)
        with self._changed:
            if self._closed:
                return
            self._facts.pop(link.index, None)
            self._counters["closures_repeated"].add(len(self._queue.at_worker(link.index)))
            self._carry_out(self._queue.worker_lost(link.index), lost=lost)
            for reference, _, _ in self._resources.values():
                values = reference()
                if values is not None:
                    values.values[link.index]._abort(_aborted(lost))
            self._changed.notify_all()
        try:
            self._views.fence(link.index, link.incarnation)
        except ParameterServerLost as error:
            self.server_lost(error)
        with self._changed:
            self._carry_out(self._queue.fenced(link.index))
            self._changed.notify_all()
        for other in self._links:
            self._pump(other)

    def worker_unreachable(self, link: WorkerLink, error: Exception) -> None:
        """An attempt to begin a life failed; the link tries again."""
        _log.debug("%s does not answer: %s", link.task, error)
        if isinstance(error, ParameterServerLost):
            self.server_lost(error)

    # ------------------------------------------------------------------ what the watch tells us

    @property
    def views(self) -> CoordinatorViews:
        """The strategy's side, for the watch."""
        return self._views

    @property
    def finished(self) -> int:
        """Closures that ended well so far."""
        return self._finished

    def server_lost(self, error: ParameterServerLost) -> None:
        """A server is gone for good: everything stops, the next call raises it."""
        with self._changed:
            if not self._closed and self._queue.error is None:
                _log.error("%s", error)
                self._keep(None, "", error.task, error)
                self._carry_out(self._queue.stop(error))
                # What runs waits for that server, or is about to: nobody should wait with it.
                for number in self._queue.abandon():
                    self._closures.pop(number).value._fail(error)
            self._changed.notify_all()

    def no_workers(self, waited_s: float) -> None:
        """Closures have waited too long for any worker to come."""
        reasons = "; ".join(f"{link.task}: {link.last_error}" for link in self._links)
        error = UnavailableError(
            f"closures wait, but no worker has answered for {waited_s:g} s ({reasons}).",
            task="/job:worker",
        )
        with self._changed:
            self._keep(None, "", "/job:worker", error)
            self._carry_out(self._queue.stop(error))
            self._changed.notify_all()

    def tick(self, now: float) -> None:
        """Looks after silence, idle workers, and things nobody needs any more."""
        options = self.options
        with self._lock:
            actions = self._queue.rebalance()
            released = self._take_released()
            with_room = self._queue.hungriest()
            once_done, self._once_done = self._once_done, []
        for action in actions:
            if isinstance(action, Recall):
                self._links[action.worker].notify(messages.Recall(closures=action.closures))
        for link in self._links:
            if link.connected and now - link.heard_at > options.heartbeat_limit_s:
                link.give_up(
                    WorkerLost(f"no sign of life for {now - link.heard_at:.1f} s", task=link.task)
                )
        if released or self._shipper.evicted:
            self._forget(released)
        if once_done:
            self._views.forget_closures(once_done)
        if with_room is not None:
            self._pump(self._links[with_room])

    def beat(self) -> None:
        """Tells every worker that its coordinator lives."""
        for link in self._links:
            if link.connected:
                link.notify(messages.Beat())

    def waiting_without_workers(self) -> bool:
        """Whether closures wait and there is nobody to run them."""
        with self._lock:
            return not self._queue.idle and self._queue.workers_up() == 0

    def describe_work(self) -> str:
        """For the watchdog."""
        with self._lock:
            return f"{self._queue!r}, error: {self._queue.error!r}"

    def is_busy(self) -> bool:
        """Whether closures are queued or in flight."""
        with self._lock:
            return not self._queue.idle

    # ------------------------------------------------------------------ inside, holding _lock

    def _build_resource(self, link: WorkerLink, resource: int, values: PerWorkerValues) -> None:
        _, function, arguments = self._resources[resource]
        number = next(self._numbers)
        closure = _Closure(
            number,
            function,
            arguments,
            values.values[link.index],
            False,
            0,
            resource,
            time.perf_counter(),
        )
        self._closures[number] = closure
        down = WorkerLost(f"{link.task} is down", task=link.task)
        self._carry_out(self._queue.add_resource(number, link.index), lost=down)

    def _complete(
        self, link: WorkerLink, message: messages.Finished, frame: Frame, arrived: float
    ) -> None:
        closure = self._closures.pop(message.closure)
        closure.value._set(message.value, frame)
        if closure.exactly_once:
            self._once_done.append(closure.number)
        if not closure.resource:
            timers = self._timers
            timers["queue"].record(closure.sent_at - closure.scheduled_at + message.waited_s)
            timers["compute"].record(message.ran_s)
            travelled = arrived - closure.sent_at - message.waited_s - message.ran_s
            timers["send"].record(max(0.0, travelled))

    def _set_window(self, link: WorkerLink, finished: Sequence[messages.Finished]) -> None:
        mean = sum(message.ran_s for message in finished) / len(finished)
        old = link.mean_run_s
        link.mean_run_s = mean if old == 0.0 else 0.75 * old + 0.25 * mean
        window = int(IN_FLIGHT_S / max(link.mean_run_s, 1e-6))
        self._queue.set_window(link.index, min(MAX_WINDOW, max(MIN_WINDOW, window)))

    def _report_failure(self, link: WorkerLink, message: messages.Failed) -> None:
        closure = self._closures.get(message.closure)
        if closure is None:
            return
        error = exception_from(message.failure, may_unpickle=True)
        if closure.resource:
            if self._queue.failed(link.index, message.closure, error) is not None:
                self._closures.pop(message.closure).value._fail(error)
            return
        if self._is_transient(message, error):
            actions = self._queue.retry(link.index, message.closure)
            if actions is not None:
                self._counters["retried"].add()
                _log.warning("%s: %s is retried: %s", link.task, closure.function.name, error)
                self._carry_out(actions)
            return
        actions = self._queue.failed(link.index, message.closure, error)
        if actions is None:
            return
        del self._closures[message.closure]
        closure.value._fail(error)
        self._counters["failed"].add()
        trace = message.failure.traceback
        self._keep(closure.number, closure.function.name, link.task, error, trace)
        if isinstance(error, ClosureInputError):
            _log.error("%s: an input of %s failed to build", link.task, closure.function.name)
        self._carry_out(actions)

    def _is_transient(self, message: messages.Failed, error: BaseException) -> bool:
        """FLT-10 and FLT-11: the first reports of a server's trouble are not believed."""
        if message.blame == "server" and isinstance(error, ParameterServerLost):
            seen = self._server_reports.get(error.task, 0) + 1
            self._server_reports[error.task] = seen
            return seen < self.options.transient_ps_failures
        if message.blame == "deadline":
            limit = self.options.transient_timeouts
            if limit < 0:
                limit = len(self._links) // 10
            self._deadlines += 1
            return self._deadlines < limit
        return False

    def _carry_out(self, actions: Sequence[Action], lost: WorkerLost | None = None) -> None:
        for action in actions:
            if isinstance(action, Settle):
                self._settle(action, lost)
            elif isinstance(action, Recall):
                # Not sent here: the lock is held, and a send may wait.
                self._watch.recall(action)

    def _settle(self, action: Settle, lost: WorkerLost | None) -> None:
        closure = self._closures.pop(action.closure, None)
        if closure is None:
            return
        if action.fate is Fate.ABORTED:
            closure.value._abort(_aborted(lost))
        elif action.fate is Fate.CANCELLED:
            closure.value._fail(
                ClosureCancelled(
                    f"{closure.function.name} was cancelled because another closure failed; "
                    "schedule it again if it still matters."
                )
            )
        else:
            workers = [self._links[number].task for number in action.workers]
            error = ClosurePoisonous(
                f"{closure.function.name} was lost with {len(workers)} workers in a row "
                f"({', '.join(workers)}) and is not tried again. It probably ends the process "
                f"(out of memory, a crash in native code, os._exit), or keeps the worker from "
                f"answering for more than {self.options.heartbeat_limit_s:g} s.",
                closure=closure.function.name,
                workers=workers,
            )
            closure.value._fail(error)
            self._keep(closure.number, closure.function.name, workers[-1], error)
            self._carry_out(self._queue.stop(error))
        if closure.exactly_once:
            self._once_done.append(closure.number)

    def _keep(
        self,
        closure: int | None,
        function: str,
        worker: str,
        error: BaseException,
        trace: str = "",
    ) -> None:
        self._errors.append(
            ClosureRecord(
                closure=closure,
                function=function,
                worker=worker,
                error=error,
                remote_traceback=trace,
            )
        )

    def _take_released(self) -> list[int]:
        released = []
        while self._released:
            number = self._released.popleft()
            if self._resources.pop(number, None) is not None:
                released.append(number)
        return released

    def _forget(self, resources: Sequence[int]) -> None:
        with self._packing:
            functions, self._shipper.evicted = tuple(self._shipper.evicted), []
        for link in self._links:
            with link.sending:
                known = tuple(digest for digest in functions if digest in link.functions)
                link.functions.difference_update(known)
                if resources or known:
                    link.notify(messages.Forget(functions=known, resources=tuple(resources)))
        oldest = min((link.version for link in self._links if link.connected), default=0)
        with self._packing:
            while self._updates and self._updates[0][0] <= oldest:
                self._updates.popleft()


def _note(released: deque[int], number: int, _: object) -> None:
    released.append(number)


def _aborted(lost: WorkerLost | None) -> ClosureAborted:
    return ClosureAborted(f"the worker holding this value is gone: {lost}", original_exception=lost)
