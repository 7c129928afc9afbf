"""The public `ClusterCoordinator`: checks arguments, waits, and raises errors of closures.

`engine.py` does the work, `sender.py` the packing.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, TypeVar, final

from typing_extensions import override

from stratagem import _faults as faults
from stratagem import metrics
from stratagem._cluster.contract import ClusterStrategy
from stratagem._cluster.coordinator import shared_dataset
from stratagem._cluster.coordinator.engine import Engine
from stratagem._cluster.coordinator.remote_values import ClosureRecord as ClosureRecord
from stratagem._cluster.coordinator.remote_values import (
    PerWorkerDataset,
    PerWorkerValues,
    RemoteValue,
    as_completed,
    as_iterable,
    make_iterator,
    refuse_in_callback,
)
from stratagem._cluster.coordinator.sender import Closure
from stratagem._cluster.coordinator.shared_dataset import SharedDataset
from stratagem._cluster.coordinator.startup import await_workers, make_engine
from stratagem._cluster.coordinator.worker_link import WorkerStatus, WorkersView
from stratagem._core import values
from stratagem._owner import Owner
from stratagem._ps.recovery_point import ServerRecovery
from stratagem._strategies.async_functions import refuse_async
from stratagem.config import ClusterOptions
from stratagem.errors import DeadlineExceeded, MisuseError

_T = TypeVar("_T")

_NOTHING: Final = nullcontext()
_making = threading.Lock()  # of the one coordinator of each strategy


class _OnePerStrategy(ABCMeta):
    """Makes a second construction return the strategy's coordinator."""

    def __call__(cls: type[_T], strategy: object, *, options: ClusterOptions | None = None) -> _T:
        coordinator = ClusterCoordinator.of(strategy)
        coordinator._start(options)
        assert isinstance(coordinator, cls)
        return coordinator


@final
class ClusterCoordinator(Owner, metaclass=_OnePerStrategy):
    """Scheduler of functions on the workers of a parameter-server cluster.

    A strategy has one coordinator: constructing it again returns the same object. Entering the
    strategy's scope also creates it. It connects to the workers when you construct it, or at its first
    use. Close it, or use it as a context manager; another strategy can then use the cluster.

    Args:
        strategy: a `ParameterServerStrategy`.
        options: limits; by default from the environment (`ClusterOptions.from_environment`).

    Raises:
        ValueError: `strategy` has no cluster, a worker's address is invalid, or the coordinator is
            already connected with other options.
        UnavailableError: no worker answered within ``connect_timeout_s``, or all refused. Construct the
            coordinator again when workers are available.

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

    def __init__(self, strategy: object) -> None:
        assert isinstance(strategy, ClusterStrategy), "`of` has checked it"
        self._strategy = weakref.ref(strategy)  # the strategy holds the coordinator
        self._starting = threading.RLock()
        self._running: Engine | None = None
        self._closed = False
        self._joining = 0

    @classmethod
    def of(cls, strategy: object) -> ClusterCoordinator:
        """Return the strategy's coordinator, which may not have connected yet."""
        if not isinstance(strategy, ClusterStrategy):
            raise ValueError(
                f"{strategy!r} has no cluster: ClusterCoordinator needs a ParameterServerStrategy."
            )
        with _making:
            found: ClusterCoordinator | None = strategy._cluster_coordinator
            if found is None:
                found = type.__call__(cls, strategy)
                strategy._cluster_coordinator = found
            return found

    @property
    def _engine(self) -> Engine:
        return self._running or self._start(None)

    def _start(self, options: ClusterOptions | None) -> Engine:
        """Connect to the workers, once."""
        with self._starting:
            if self._running is not None:
                if options is not None and options != self._running.options:
                    raise ValueError(
                        f"this strategy's coordinator already works with {self._running.options!r}, "
                        f"not with {options!r}: pass the options when it is first constructed."
                    )
                return self._running
            strategy = self._strategy()
            if self._closed or strategy is None:
                raise _closed_error("ClusterCoordinator")
            engine = make_engine(strategy, options or ClusterOptions.from_environment())
            engine.start()
            try:
                await_workers(engine)
            except BaseException:  # Ctrl-C too: the threads run already
                engine.close()
                raise
            self._running = engine
            # A coordinator that is not referenced any more ends its threads (CCO-2).
            weakref.finalize(self, engine.abandoned.set).atexit = False
            return engine

    # ------------------------------------------------------------------ for the user

    @property
    def strategy(self) -> Any:
        """The strategy this coordinator belongs to."""
        return self._strategy()

    @property
    def options(self) -> ClusterOptions:
        """The limits this coordinator works with."""
        return self._engine.options

    @property
    def errors(self) -> list[ClosureRecord]:
        """Every error so far (the last 1000), with worker, function and remote traceback."""
        with self._engine.lock:
            return list(self._engine.closures.errors)

    @property
    def recoveries(self) -> list[ServerRecovery]:
        """Parameter servers that were lost and restored, or replaced by a backup, oldest first."""
        return list(self._engine.recoveries.done)

    @property
    def workers(self) -> WorkersView:
        """State of every worker, in the order in which they joined: a live view.

        A worker that the resolver lists joins within ``membership_s``. A worker that it no longer lists leaves
        after its current closure.
        """
        engine = self._engine

        def states() -> list[WorkerStatus]:
            with engine.lock:
                return [
                    link.status(up=engine.queue.is_up(n), draining=engine.queue.is_draining(n))
                    for n, link in engine.links.items()
                ]

        return WorkersView(states)

    @property
    def worker_metrics(self) -> metrics.Snapshot:
        """Metrics of all workers (compute, read, push …), merged; about a second old."""
        return metrics.merge(self.metrics_by_worker.values())

    @property
    def metrics_by_worker(self) -> dict[int, metrics.Snapshot]:
        """Latest metrics of each worker by its index. Workers that are threads report only their steps."""
        with self._engine.lock:
            return {link.task_index: link.metrics for link in self._engine.links.values()}

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        exactly_once: bool = True,
    ) -> RemoteValue:
        """Queue a call of `fn`; the next free worker runs it.

        Returns at once unless the queue is full. The function may capture the strategy, models, optimizers,
        variables and per-worker values, or take them as arguments: a worker uses its own view of the same object.

        Args:
            fn: any callable, including lambdas and functions of ``__main__``.
            args: its positional arguments; their current values are sent.
            kwargs: its keyword arguments.
            exactly_once: if the call is repeated after the loss of a worker, servers skip the writes that they
                have already applied. The function must make its writes in the same order each time. False:
                such writes are applied twice.

        Raises:
            TypeError: `fn` is not callable or is asynchronous (``async def``), `args` is not a tuple or
                list, `kwargs` is not a mapping, or one of them cannot be sent.
            ValueError: a `RemoteValue` among the arguments.
            EndOfData: a `SharedDataset` among the arguments has reached the end of an epoch.
            Exception: the first error of an earlier closure, once.
        """
        if not callable(fn):
            raise TypeError(
                f"schedule({fn!r}): expected something callable, such as schedule(step, args=(it,))."
            )
        refuse_async(fn, "schedule()")
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError(
                f"args={args!r:.200} has type {type(args).__name__}: expected a tuple or list of positional "
                "arguments, such as schedule(step, args=(it,))."
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(
                f"kwargs={kwargs!r:.200} has type {type(kwargs).__name__}: expected a dict of keyword "
                "arguments, such as schedule(step, kwargs={'rate': 0.1})."
            )
        engine = self._engine
        self._refuse_if_closed("schedule")
        refuse_in_callback("schedule()")
        if engine.rounds is not None:
            engine.rounds.check_schedule(exactly_once=exactly_once)
        engine.check_job()
        began = time.perf_counter()
        call = engine.sender.pack(fn, args, kwargs)
        value = RemoteValue(engine.result_condition, call.function.name)
        closure = Closure(0, call, value, began, exactly_once)
        datasets = closure.datasets
        prepared = shared_dataset.prepared(datasets) if datasets else _NOTHING
        with prepared, engine.changed:
            self._ready_to_schedule()
            actions = engine.locked_add(closure, datasets)
        if faults.active is not None:
            faults.active.at("coordinator.scheduled")
        engine.execute(actions)
        return value

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until every closure scheduled so far is done.

        Args:
            timeout_s: how long to wait; by default without limit.

        Raises:
            DeadlineExceeded: not done within `timeout_s`; nothing is cancelled.
            Exception: the first error of a closure, once; queued closures have been cancelled.
        """
        engine = self._engine
        refuse_in_callback("join()")
        engine.want_all()
        with engine.changed:
            self._joining += 1
            try:
                self._refuse_if_closed("join")
                if not engine.changed.wait_for(self._is_done, timeout_s):
                    raise DeadlineExceeded(
                        f"join: not done within {timeout_s:g} s: {engine.queue!r}. Wait longer, or "
                        "look at coordinator.errors and the workers' log."
                    )
                self._raise_error()
                self._refuse_if_closed("join")
            finally:
                self._joining -= 1
                engine.changed.notify_all()

    def done(self) -> bool:
        """Return whether every closure scheduled so far is done.

        Raises:
            Exception: the first error of a closure, once.
        """
        engine = self._engine
        engine.want_all()
        with engine.changed:
            self._refuse_if_closed("done")
            if engine.queue.stopped:
                engine.changed.wait_for(self._is_done)
                self._raise_error()
            return engine.queue.idle

    def fetch(self, val: Any) -> Any:
        """Wait for every `RemoteValue` in a nest and return the nest with their results."""
        return values.map_leaves(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def as_completed(
        self, values: Iterable[RemoteValue], timeout_s: float | None = None
    ) -> Iterator[RemoteValue]:
        """Yield each value as soon as its closure has ended.

        Args:
            values: results of `schedule`; duplicates are yielded once.
            timeout_s: how long all of them may take together; by default without limit.

        Raises:
            DeadlineExceeded: not all are done within `timeout_s`.

        Example:
            >>> import stratagem as sg
            >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
            ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
            ...     with sg.ClusterCoordinator(strategy) as coordinator:
            ...         values = [coordinator.schedule(lambda n: n * n, args=(n,)) for n in (1, 2)]
            ...         [value.get() for value in coordinator.as_completed(values)]
            [1, 4]
        """
        return as_completed(values, timeout_s)

    def cancel(self) -> None:
        """Cancel every closure that no worker has started; their values raise `ClosureCancelled`.

        Running closures continue, and `join` waits for them. Use it to stop early with a long queue.

        Example:
            >>> import stratagem as sg
            >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
            ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
            ...     with sg.ClusterCoordinator(strategy) as coordinator:
            ...         for n in range(10_000):
            ...             value = coordinator.schedule(lambda: 0)
            ...         coordinator.cancel()
            ...         coordinator.join()
        """
        self._refuse_if_closed("cancel")
        self._engine.handle(self._engine.queue.cancel)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Return a dataset that every worker builds for itself; ``iter()`` starts an iterator on each.

        Args:
            dataset_fn: a function that returns a dataset, or a dataset. The function runs on the
                workers; with a parameter it receives an `InputContext`. Workers share a Ray dataset, or a
                pipeline over one: each batch of it goes to one worker.

        Raises:
            ValueError: `dataset_fn` is neither.
        """
        dataset_fn = as_iterable(dataset_fn)
        if not callable(dataset_fn) and not isinstance(dataset_fn, Iterable):
            raise ValueError(
                f"create_per_worker_dataset({dataset_fn!r}): expected a dataset, or a function that "
                "returns one."
            )
        refuse_async(dataset_fn, "create_per_worker_dataset()")
        return PerWorkerDataset(self, dataset_fn)

    def create_shared_dataset(
        self,
        dataset_fn: Any,
        *,
        at_least_once: bool = False,
        per_closure: int = 1,
        interleave: int = shared_dataset.INTERLEAVE,
    ) -> SharedDataset:
        """Return a dataset that all workers read together: each element is used once per epoch.

        Every scheduled function that receives the dataset gets the next elements, as an iterator. If its worker is
        lost, the function gets the same elements on another worker. Workers may join and leave.

        Args:
            dataset_fn: a dataset, or a function that returns one. The function runs here and on the workers, and
                must return the same dataset everywhere.
            at_least_once: repeat elements that a failed function may have used; by default they count as lost.
            per_closure: number of elements that each function gets.
            interleave: number of files or row groups that are read in turn.

        Raises:
            DataError: several processes cannot read the dataset in the same order, such as a DataLoader or `cache()`.
            TypeError: `dataset_fn` is neither a dataset nor a function.
        """
        refuse_async(dataset_fn, "create_shared_dataset()")
        self._refuse_if_closed("create_shared_dataset")
        return shared_dataset.make_shared_dataset(
            self._engine,
            dataset_fn,
            at_least_once=at_least_once,
            per_closure=per_closure,
            interleave=interleave,
        )

    def create_per_worker_resource(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> PerWorkerValues:
        """Run `fn` once on each worker, which keeps the result; run it again if a worker is replaced."""
        if not callable(fn):
            raise TypeError(f"create_per_worker_resource({fn!r}): expected something callable.")
        refuse_async(fn, "create_per_worker_resource()")
        self._refuse_if_closed("create_per_worker_resource")
        engine = self._engine
        return engine.add_resource(engine.sender.pack(fn, args, kwargs))

    @override
    def close(self) -> None:
        """Cancel unfinished closures, free all variables, release all tasks. May be called again."""
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
            "a ClusterCoordinator was captured by or passed to a scheduled function (or pickled): only "
            "the program that created it can schedule. Return the values that the next step needs, and "
            "schedule that step in the program."
        )

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("a ClusterCoordinator cannot be copied: there is one per strategy.")

    @override
    def __repr__(self) -> str:
        engine = self._running
        if engine is None:
            return f"<ClusterCoordinator [{'closed' if self._closed else 'not connected'}]>"
        state = "closed" if self._closed else repr(engine.queue)
        return f"<ClusterCoordinator {engine.name} [{state}, {engine.closures.finished} done]>"

    # ------------------------------------------------------------------ inside

    def _create_iterators(self, source: object) -> PerWorkerValues:
        with self._engine.lock:
            workers = tuple(link.task_index for link in self._engine.links.values())
        source, end_sharing = shared_dataset.share_ray_data(source)
        values = self.create_per_worker_resource(make_iterator, args=(source, workers))
        if end_sharing is not None:
            weakref.finalize(values, end_sharing)
        return values

    def _ready_to_schedule(self) -> None:
        """Wait for a place in the queue and for joins of other threads; raise a kept error."""
        engine, closures = self._engine, self._engine.queue
        if engine.closed or closures.stopped or self._joining or engine.locked_full:
            # Results make room for more arguments, so each of them wakes this thread.
            engine.result_condition.wait_for_value(
                lambda: (
                    engine.closed
                    or (closures.stopped and closures.quiet)
                    or not (closures.stopped or self._joining or engine.locked_full)
                ),
                None,
            )
            self._refuse_if_closed("schedule")
            self._raise_error()

    def _is_done(self) -> bool:
        queue = self._engine.queue
        return self._engine.closed or (queue.quiet if queue.stopped else queue.idle)

    def _raise_error(self) -> None:
        error = self._engine.locked_take_error()
        if error is not None:
            raise error

    def _refuse_if_closed(self, what: str) -> None:
        engine = self._engine
        if self._closed or engine.closed:
            raise _closed_error(what)
        if engine.replaced is not None:
            raise engine.replaced


def _closed_error(what: str) -> MisuseError:
    return MisuseError(
        f"{what}: this coordinator is closed. Make a new strategy and a coordinator for it; the "
        "cluster can serve them."
    )
