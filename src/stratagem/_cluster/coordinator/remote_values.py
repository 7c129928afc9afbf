"""Return values of `schedule` and `create_per_worker_*`: results that arrive later, or stay on workers.

`RemoteValue` is the result of one closure, `PerWorkerValues` one value per worker, `PerWorkerDataset`
makes one iterator per worker. The engine sets them.
"""

from __future__ import annotations

import enum
import inspect
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from typing_extensions import override

from stratagem._cluster.timed_iterator import TimedIterator
from stratagem._core import context, values
from stratagem._core.user_contexts import InputContext
from stratagem._wire.codec import unpack
from stratagem._wire.messages import Frame, Packed
from stratagem.errors import ClosureAborted, DeadlineExceeded, MisuseError, WrongArgumentType

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.coordinator import ClusterCoordinator

_log = logging.getLogger("stratagem.coordinator")

_in_callback: set[int] = set()  # threads that run a callback now


def refuse_in_callback(what: str) -> None:
    """Raise if a callback of `add_done_callback` calls something that waits: results would not arrive."""
    if threading.get_ident() in _in_callback:
        raise MisuseError(
            f"{what} in a callback of add_done_callback: the thread that runs the callback receives the "
            "results that the call waits for. Use the callback to note or queue something, and call "
            f"{what} in the program's own thread."
        )


@final
class ResultCondition:
    """State that threads which wait for results share with the engine. The lock guards every attribute.

    Attributes:
        waiting_for_values: threads that every result must wake, such as those inside `RemoteValue.get`.
        error: the first error, to be raised at the user's next call.
        one_closure: whether it is the error of one closure, not of a server or of the cluster.
        error_delivered: whether `RemoteValue.get` has raised it already.
        trusted: whether workers may run code here, see `ClusterOptions.trust_workers`.
        callbacks: callbacks of values that are done. The engine runs them without the lock.
        on_wait: called, without the lock, with the number of a closure that the program begins to wait for.
    """

    def __init__(self, lock: threading.Lock, *, trusted: bool = False) -> None:
        self.condition = threading.Condition(lock)
        self.trusted = trusted
        self.waiting_for_values = 0
        self.error: BaseException | None = None
        self.one_closure = False
        self.error_delivered = False
        self.callbacks: deque[tuple[Callable[[RemoteValue], object], RemoteValue]] = deque()
        self.on_wait: Callable[[int], None] | None = None

    def wait_for_value(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait, holding the lock, until a value is there; return False after the timeout."""
        self.waiting_for_values += 1
        try:
            return self.condition.wait_for(ready, timeout_s)
        finally:
            self.waiting_for_values -= 1

    def take_error(self) -> BaseException | None:
        """Return the error to raise, if any. Called holding the lock.

        The error of a closure is raised once, here or by `RemoteValue.get`.
        """
        error = None if self.error_delivered and self.one_closure else self.error
        self.error, self.error_delivered = None, False
        return error

    def run_callbacks(self) -> None:
        """Run the callbacks of values that are done. Called without the lock."""
        while self.callbacks:
            try:
                callback, value = self.callbacks.popleft()
            except IndexError:  # another thread took it
                return
            run_callback(callback, value)


def run_callback(callback: Callable[[RemoteValue], object], value: RemoteValue) -> None:
    """Run one callback; log its error, as concurrent.futures does."""
    thread = threading.get_ident()
    nested = thread in _in_callback
    _in_callback.add(thread)
    try:
        callback(value)
    except Exception:  # noqa: BLE001 - the thread that runs it has other values to deliver
        _log.exception("a callback of %r failed", value)
    finally:
        if not nested:
            _in_callback.discard(thread)


class RemoteValueStatus(enum.Enum):
    """State of a remote value."""

    NOT_READY = "not ready"
    READY = "ready"
    ABORTED = "aborted"


@final
class RemoteValue:
    """The result of a scheduled function.

    Made by `ClusterCoordinator.schedule`. `get` and `fetch` wait for the result. Both raise the
    exception of the function, every time.

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
        ...     with sg.ClusterCoordinator(strategy) as coordinator:
        ...         value = coordinator.schedule(lambda a, b: a + b, args=(1, 2))
        ...         value.fetch(timeout_s=30)
        3
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_closure",
        "_condition",
        "_error",
        "_name",
        "_raw",
        "_status",
        "_value",
    )

    def __init__(self, condition: ResultCondition, name: str) -> None:
        self._callbacks: list[Callable[[RemoteValue], object]] | None = None
        self._condition = condition
        self._closure = 0  # number of the closure
        self._name = name
        self._status = RemoteValueStatus.NOT_READY
        self._error: BaseException | None = None
        self._raw: tuple[Packed, Frame] | None = None
        self._value: object = None

    @property
    def status(self) -> RemoteValueStatus:
        """Not ready, ready (a value or an error), or aborted (its worker was lost)."""
        return self._status

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for the result and return it, tensors as tensors.

        Args:
            timeout_s: how long to wait; by default without limit.

        Raises:
            ClosureCancelled: another closure failed first, `cancel` was called, or the coordinator was closed.
            DeadlineExceeded: there is no result within `timeout_s`.
            Exception: the exception of the function.
        """
        self._want()
        with self._condition.condition:
            self._wait(timeout_s)
            if self._error is not None:
                if self._error is self._condition.error:
                    self._condition.error_delivered = True
                raise self._error
            if self._raw is not None:
                # Unpacked here and not on arrival: most results of training steps are never read.
                packed, frame = self._raw
                self._value = unpack(packed, frame, trusted=self._condition.trusted)
                self._raw = None
            return self._value

    def fetch(self, timeout_s: float | None = None) -> Any:
        """Return the result as `get` does, with tensors as NumPy arrays (bfloat16 as float32)."""
        return values.map_leaves(_to_numpy, self.get(timeout_s))

    def add_done_callback(self, fn: Callable[[RemoteValue], object]) -> None:
        """Call ``fn(value)`` once, when the closure has ended; at once if it already has.

        A thread of the coordinator runs `fn`, so `fn` should be short and must not wait: `schedule`, `join` and
        `get` of an unfinished value raise inside it. An exception of `fn` is logged.

        Example:
            >>> import stratagem as sg
            >>> finished = []
            >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
            ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
            ...     with sg.ClusterCoordinator(strategy) as coordinator:
            ...         value = coordinator.schedule(lambda: 3)
            ...         value.add_done_callback(lambda value: finished.append(value.get()))
            ...         coordinator.join()
            >>> finished
            [3]
        """
        with self._condition.condition:
            if self._status is RemoteValueStatus.NOT_READY:
                self._callbacks = [*(self._callbacks or ()), fn]
                return
        run_callback(fn, self)

    def _want(self) -> None:
        """Let the closure run now if it waits for others to run with."""
        on_wait = self._condition.on_wait
        if on_wait is not None and self._status is RemoteValueStatus.NOT_READY:
            on_wait(self._closure)

    def _wait(self, timeout_s: float | None) -> None:
        if self._status is not RemoteValueStatus.NOT_READY:
            return
        refuse_in_callback("get()")
        if not self._condition.wait_for_value(
            lambda: self._status is not RemoteValueStatus.NOT_READY, timeout_s
        ):
            raise DeadlineExceeded(f"{self._name} has no result after {timeout_s:g} s.")

    # Called by the engine, holding the condition's lock.

    def _set(self, value: Packed | None, frame: Frame | None) -> None:
        if value is not None and frame is not None:
            self._raw = (value, frame)
        self._end(None, RemoteValueStatus.READY)

    def _fail(self, error: BaseException) -> None:
        self._end(error, RemoteValueStatus.READY)

    def _abort(self, error: ClosureAborted) -> None:
        self._raw = None
        self._value = None
        self._end(error, RemoteValueStatus.ABORTED)

    def _end(self, error: BaseException | None, status: RemoteValueStatus) -> None:
        self._error = error
        self._status = status
        if self._callbacks:
            self._condition.callbacks.extend((fn, self) for fn in self._callbacks)
            self._callbacks = None

    @override
    def __repr__(self) -> str:
        error = f": {self._error!r}" if self._error is not None else ""
        return f"<RemoteValue of {self._name} [{self._status.value}{error}]>"


def as_completed(
    values: Iterable[RemoteValue], timeout_s: float | None = None
) -> Iterator[RemoteValue]:
    """Yield each value as soon as it is done; see `ClusterCoordinator.as_completed`."""
    refuse_in_callback("as_completed()")
    waiting = list(dict.fromkeys(values))
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    done: queue.SimpleQueue[RemoteValue] = queue.SimpleQueue()
    for value in waiting:
        value.add_done_callback(done.put)
    for value in waiting:
        value._want()
    for number in range(len(waiting)):
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            yield done.get(timeout=left_s)
        except queue.Empty:
            raise DeadlineExceeded(
                f"as_completed: {number} of {len(waiting)} values are done after {timeout_s:g} s. Wait "
                "longer, or look at coordinator.workers."
            ) from None


@final
class PerWorkerValues:
    """One value per worker; each stays on its worker.

    Made by the coordinator only. When passed to `schedule`, the function receives the value of the
    worker that runs it.

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
        ...     with sg.ClusterCoordinator(strategy) as coordinator:
        ...         counters = coordinator.create_per_worker_resource(lambda: [40])
        ...         coordinator.schedule(lambda mine: mine[0] + 2, args=(counters,)).fetch()
        42
    """

    __slots__ = ("__weakref__", "_by_worker", "_name", "_resource")

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        for value in values:
            if not isinstance(value, RemoteValue):
                raise WrongArgumentType(
                    f"PerWorkerValues holds {value!r}: expected RemoteValues only; they are made by "
                    "create_per_worker_dataset and create_per_worker_resource."
                )
        # By the worker's number. The engine adds the workers that join and drops those that leave.
        self._by_worker = dict(enumerate(values))
        self._resource = 0
        self._name = ""

    @classmethod
    def _make(cls, name: str, resource: int) -> PerWorkerValues:
        made = cls(())
        made._name, made._resource = name, resource
        return made

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """The state of each worker's value. The values themselves stay on the workers."""
        return tuple(self._by_worker.values())

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "next() of per-worker iterators cannot run on the coordinator: pass them to a "
            "scheduled function and call next() there."
        )

    @override
    def __repr__(self) -> str:
        states = ", ".join(value.status.value for value in self.values)
        return f"<PerWorkerValues [{states}]>"


@final
class PerWorkerDataset:
    """A dataset that every worker builds for itself; ``iter()`` starts one iterator per worker.

    Made by `ClusterCoordinator.create_per_worker_dataset`.
    """

    def __init__(self, coordinator: ClusterCoordinator, source: object) -> None:
        self._coordinator = coordinator
        self._source = source
        self._spec: object = None

    def __iter__(self) -> PerWorkerValues:
        return self._coordinator._create_iterators(self._source)

    @override
    def __reduce__(self) -> NoReturn:
        raise ValueError(
            f"{self!r} was captured by or passed to a scheduled function (or pickled). Pass its iterators "
            "instead: iterators = iter(dataset), then schedule(step, args=(iterators,)); the function calls "
            "next() on its own."
        )

    @property
    def element_spec(self) -> object:
        """Shapes and types of an element, from the dataset built once on the coordinator."""
        if self._spec is None:
            dataset: Any = build_dataset(self._source, index=0, workers=1)
            self._spec = dataset.element_spec
        return self._spec

    @override
    def __repr__(self) -> str:
        return f"<PerWorkerDataset of {self._source!r}>"


@dataclass(frozen=True, kw_only=True)
class ClosureRecord:
    """One error of a scheduled function, with its worker and remote traceback.

    Example:
        >>> from stratagem._cluster.coordinator.remote_values import ClosureRecord
        >>> ClosureRecord(closure=3, function="step", worker="w", error=ValueError("no")).error
        ValueError('no')
    """

    closure: int | None
    function: str
    worker: str
    error: BaseException
    remote_traceback: str = ""


def call_dataset_fn(source: object, *, index: int, workers: int) -> object:
    """Return `source` itself, or the result of the function `source`.

    A function with a parameter receives an `InputContext` with the worker's index.
    """
    if not callable(source):
        return source
    if _takes_context(source):
        return source(InputContext(num_input_pipelines=workers, input_pipeline_id=index))
    return source()


def build_dataset(source: object, *, index: int, workers: int) -> Iterable[object]:
    """Return the dataset of one worker, see `call_dataset_fn`."""
    dataset = as_iterable(call_dataset_fn(source, index=index, workers=workers))
    if not isinstance(dataset, Iterable):
        raise TypeError(
            f"the dataset function returned {dataset!r}: expected an iterable, such as an "
            "sg.data.Dataset or a DataLoader."
        )
    return dataset


def _takes_context(function: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    needed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in needed and p.default is inspect.Parameter.empty for p in parameters)


def make_iterator(source: object, workers: Sequence[int]) -> Iterator[object]:
    """Start the iterator of the worker that runs this. `workers`: task indices of all workers."""
    index = context.get_current_worker_index()
    if index not in workers and callable(source) and _takes_context(source):
        raise ValueError(
            f"worker {index} joined after this dataset was made for the workers {list(workers)}, which "
            "share its rows by InputContext: create the per-worker dataset again."
        )
    place = workers.index(index) if index in workers else 0
    return TimedIterator(iter(build_dataset(source, index=place, workers=len(workers))))


def _to_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach().cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()[()]


def as_iterable(source: object) -> object:
    """Return a dataset over a Ray dataset or iterator; anything else unchanged."""
    if "ray.data" not in sys.modules:
        return source
    from stratagem._data.dataset import as_dataset
    from stratagem._data.ray_source import is_ray_data

    return as_dataset(source) if is_ray_data(source) else source
