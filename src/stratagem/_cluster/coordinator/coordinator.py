"""The public `ClusterCoordinator`: what people call.

It checks, waits and raises; the work is done by `engine.py`, the packing by `sending.py`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, final

from typing_extensions import override

from stratagem import metrics
from stratagem._cluster.contract import ClusterStrategy
from stratagem._cluster.coordinator.engine import Engine
from stratagem._cluster.coordinator.remote_values import ClosureRecord as ClosureRecord
from stratagem._cluster.coordinator.remote_values import (
    PerWorkerDataset,
    PerWorkerValues,
    RemoteValue,
    make_iterator,
    map_leaves,
)
from stratagem._cluster.coordinator.sender import Closure
from stratagem._cluster.coordinator.startup import await_workers, check_addresses
from stratagem._cluster.launch.tasks import cluster_key
from stratagem._core.asynchronous import refuse_async
from stratagem._owner import Owner
from stratagem.config import ClusterOptions
from stratagem.errors import DeadlineExceeded


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker as the coordinator sees it now.

    Example:
        >>> from stratagem._cluster.coordinator.coordinator import WorkerStatus
        >>> WorkerStatus(index=0, task="/job:worker/task:0", connected=True, life=2).life
        2
    """

    index: int
    task: str
    connected: bool
    life: int
    """How many lives it has begun for this coordinator: above 1, it was lost and came back."""


@final
class ClusterCoordinator(Owner):
    """Schedules functions on the workers of a parameter-server cluster.

    One coordinator per strategy: constructing it again gives the same object (CCO-1), and entering
    the strategy's scope makes it (PSS-5). It connects to the workers when it is constructed here, or
    at the first call of one that a scope has made. Close it, or use it as a context manager; the
    cluster then serves the next strategy.

    Args:
        strategy: a `ParameterServerStrategy`.
        options: limits; by default from the environment (`ClusterOptions.from_environment`).

    Raises:
        ValueError: `strategy` has no cluster, the address of a worker is none, or its coordinator works
            with other options already.
        UnavailableError: no worker answered within ``connect_timeout_s``, or all refused, which is
            not waited for; construct it again when they are there.

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

    _making: ClassVar[threading.Lock] = threading.Lock()

    _strategy: weakref.ref[ClusterStrategy]
    _starting: threading.RLock
    _running: Engine | None
    _closed: bool
    _joining: int

    def __new__(cls, strategy: Any, *, options: ClusterOptions | None = None) -> Self:
        """The strategy's coordinator, at work."""
        found = cls.of(strategy)
        found._start(options)
        return found

    def __init__(self, strategy: Any, *, options: ClusterOptions | None = None) -> None:
        """Everything happens in `__new__`: a second construction must not begin again."""

    @classmethod
    def of(cls, strategy: Any) -> Self:
        """The strategy's coordinator, which may not have begun to work (PSS-5).

        Example:
            >>> import stratagem as sg
            >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
            ...     with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            ...         with strategy.scope():  # makes the coordinator
            ...             pass
            ...         print(sg.ClusterCoordinator.of(strategy))
            <ClusterCoordinator [not connected]>
        """
        if not isinstance(strategy, ClusterStrategy):
            raise ValueError(
                f"{strategy!r} has no cluster: ClusterCoordinator needs a ParameterServerStrategy."
            )
        with cls._making:
            found = strategy._cluster_coordinator
            if found is None:
                found = super().__new__(cls)
                found._strategy = weakref.ref(strategy)  # which holds this coordinator
                found._starting = threading.RLock()
                found._running = None
                found._closed = False
                found._joining = 0
                strategy._cluster_coordinator = found
        assert isinstance(found, cls)
        return found

    @property
    def _engine(self) -> Engine:
        return self._running or self._start(None)

    def _start(self, options: ClusterOptions | None) -> Engine:
        """Connects to the workers, unless that is done."""
        with self._starting:
            if self._running is not None:
                if options is not None and options != self._running.options:
                    raise ValueError(
                        f"this strategy's coordinator works with {self._running.options!r} already, "
                        f"not with {options!r}: give the options when it is first constructed."
                    )
                return self._running
            strategy = self._strategy()
            if self._closed or strategy is None:
                raise _closed_error("ClusterCoordinator")
            resolver = strategy.cluster_resolver
            engine = Engine(
                resolver.cluster_spec(),
                strategy._cluster_views(),
                options or ClusterOptions.from_environment(),
                key=cluster_key(resolver.cluster_key_text()),
            )
            check_addresses(engine.links)
            engine.start()
            try:
                await_workers(engine)
            except BaseException:  # Ctrl-C while waiting, too: its threads run already
                engine.close()
                raise
            self._running = engine
            # One that is simply forgotten ends its threads (CCO-2). The engine knows nothing of us.
            weakref.finalize(self, engine.abandon).atexit = False
            return engine

    # ------------------------------------------------------------------ for the user

    @property
    def strategy(self) -> Any:
        """The strategy this coordinator works for."""
        return self._strategy()

    @property
    def errors(self) -> list[ClosureRecord]:
        """Every error so far (the last 1000), with worker, function and remote traceback."""
        with self._engine.lock:
            return list(self._engine.errors)

    @property
    def workers(self) -> list[WorkerStatus]:
        """Every worker, in order: whether it answers, and how often it had to come back."""
        return [
            WorkerStatus(
                index=link.task_index,
                task=link.task,
                connected=link.connected,
                life=link.incarnation,
            )
            for link in self._engine.links
        ]

    @property
    def worker_metrics(self) -> metrics.Snapshot:
        """What the workers measured (compute, read, push …), merged; about a second old."""
        with self._engine.lock:
            return metrics.merge(list(self._engine.facts.values()))

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        exactly_once: bool = True,
    ) -> RemoteValue:
        """Puts a call of `fn` in the queue; the next free worker runs it.

        Returns at once unless the queue is full. Strategy, model, optimizer, variables and per-worker
        values, captured or passed, arrive as the worker's view of the same thing.

        Args:
            fn: any callable, lambdas and functions of ``__main__`` included.
            args: its positional arguments, as they are now.
            kwargs: its keyword arguments.
            exactly_once: if a worker is lost and the call is repeated on another one, servers do not apply
                writes to variables again that they have applied. The function must make its writes in
                the same order each time. False: such writes count twice.

        Raises:
            TypeError: `fn` is not callable, or asynchronous (``async def``), `args` no tuple or list, `kwargs` no mapping, or one of them
                cannot be sent.
            ValueError: a `RemoteValue` among the arguments.
            Exception: the first error of an earlier closure, once (CCO-20).
        """
        if not callable(fn):
            raise TypeError(
                f"schedule({fn!r}): expected something callable, such as schedule(step, args=(it,))."
            )
        refuse_async(fn, "schedule()")
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError(
                f"args={args!r} is a {type(args).__name__}: expected a tuple or list of positional "
                "arguments, such as schedule(step, args=(it,))."
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(
                f"kwargs={kwargs!r} is a {type(kwargs).__name__}: expected a dict of keyword "
                "arguments, such as schedule(step, kwargs={'rate': 0.1})."
            )
        engine = self._engine
        self._refuse_if_closed("schedule")
        began = time.perf_counter()
        call = engine.sender.pack(fn, args, kwargs)
        value = RemoteValue(engine.bell, call.function.name)
        closure = Closure(0, call, value, began, exactly_once)
        with engine.changed:
            self._ready_to_schedule()
            worker = engine.locked_add(closure)
        if worker is not None:
            engine.pump(engine.links[worker])
        return value

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until every closure scheduled so far is done.

        Args:
            timeout_s: how long to wait; by default as long as it takes.

        Raises:
            DeadlineExceeded: not done within `timeout_s`; nothing is cancelled.
            Exception: the first error of a closure, once; the rest has been cancelled (CCO-22).
        """
        with self._engine.changed:
            self._joining += 1
            try:
                self._refuse_if_closed("join")
                if not self._engine.changed.wait_for(self._settled, timeout_s):
                    raise DeadlineExceeded(
                        f"join: not done within {timeout_s:g} s: {self._engine.queue!r}. Wait longer, or "
                        "look at coordinator.errors and the workers' log."
                    )
                self._raise_error()
                self._refuse_if_closed("join")
            finally:
                self._joining -= 1
                self._engine.changed.notify_all()

    def done(self) -> bool:
        """Whether every closure scheduled so far is done.

        Raises:
            Exception: the first error of a closure, once (CCO-20).
        """
        with self._engine.changed:
            self._refuse_if_closed("done")
            if self._engine.queue.error is not None:
                self._engine.changed.wait_for(self._settled)
                self._raise_error()
            return self._engine.queue.idle

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
        refuse_async(dataset_fn, "create_per_worker_dataset()")
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
        refuse_async(fn, "create_per_worker_resource()")
        self._refuse_if_closed("create_per_worker_resource")
        engine = self._engine
        call = engine.sender.pack(fn, args, kwargs)
        name = f"resource {call.function.name}"
        values = PerWorkerValues([RemoteValue(engine.bell, name) for _ in engine.links])
        engine.add_resource(call, values)
        return values

    @override
    def close(self) -> None:
        """Ends the work: what is not done is cancelled, workers and servers are free again.

        Variables of the strategy are freed on the servers. May be called again.
        """
        with self._starting:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        engine, strategy = self._running, self._strategy()
        if engine is not None:
            engine.close()
            engine.views.close(engine.options)
        elif strategy is not None:
            strategy._cluster_views().close()

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "a ClusterCoordinator was captured by or passed to a scheduled function (or pickled): it "
            "belongs to the program that made it, and only that schedules. Return what the next step "
            "depends on, and schedule it there."
        )

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("a ClusterCoordinator cannot be copied: there is one per strategy.")

    @override
    def __repr__(self) -> str:
        engine = self._running
        if engine is None:
            return f"<ClusterCoordinator [{'closed' if self._closed else 'not connected'}]>"
        state = "closed" if self._closed else repr(engine.queue)
        return f"<ClusterCoordinator {engine.name} [{state}, {engine.finished} done]>"

    # ------------------------------------------------------------------ inside

    def _create_iterators(self, source: object) -> PerWorkerValues:
        arguments = (source, tuple(link.task_index for link in self._engine.links))
        return self.create_per_worker_resource(make_iterator, args=arguments)

    def _ready_to_schedule(self) -> None:
        """Waits for room and for other threads' joins; raises what waits to be raised."""
        engine, queue = self._engine, self._engine.queue
        if engine.closed or queue.error is not None or self._joining or queue.full:
            engine.changed.wait_for(
                lambda: (
                    engine.closed
                    or (queue.error is not None and queue.quiet)
                    or (queue.error is None and not self._joining and not queue.full)
                )
            )
            self._refuse_if_closed("schedule")
            self._raise_error()

    def _settled(self) -> bool:
        queue = self._engine.queue
        return self._engine.closed or (queue.quiet if queue.error is not None else queue.idle)

    def _raise_error(self) -> None:
        error = self._engine.queue.clear_error()
        if error is not None:
            self._engine.changed.notify_all()
            raise error

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed or self._engine.closed:
            raise _closed_error(what)


def _closed_error(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what}: this coordinator is closed. Make a new strategy and a coordinator for it; the "
        "cluster can serve them."
    )
