"""What `schedule` and `create_per_worker_*` give back: values that are, or will be, elsewhere.

`RemoteValue` is one closure's result, `PerWorkerValues` one value per worker, `PerWorkerDataset`
makes one iterator per worker. The coordinator fills them in; they decide nothing.
"""

from __future__ import annotations

import enum
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from typing_extensions import override

from stratagem._core import context
from stratagem._core.user_contexts import InputContext
from stratagem._wire.codec import unpack
from stratagem._wire.messages import Frame, Packed
from stratagem.errors import ClosureAborted, ClosureCancelled, DeadlineExceeded

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.coordinator import ClusterCoordinator


@final
class ResultCondition:
    """A condition that knows who waits for what, so that nobody is woken for nothing.

    Args:
        lock: guards everything the waiters look at.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.condition = threading.Condition(lock)
        self.waiting_for_values = 0
        """Threads inside `RemoteValue.get`: they want to see every result."""

    def wait_for_value(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits, with the lock held, until a value is there; False when the time is over."""
        self.waiting_for_values += 1
        try:
            return self.condition.wait_for(ready, timeout_s)
        finally:
            self.waiting_for_values -= 1


class RemoteValueStatus(enum.Enum):
    """Where a remote value stands (RMV-1)."""

    NOT_READY = "not ready"
    READY = "ready"
    ABORTED = "aborted"


@final
class RemoteValue:
    """The result of a scheduled function, once it is there.

    Made by `ClusterCoordinator.schedule`. `get` and `fetch` wait for it; an exception of the
    function is raised by both, every time.

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
        ...     with sg.ClusterCoordinator(strategy) as coordinator:
        ...         value = coordinator.schedule(lambda a, b: a + b, args=(1, 2))
        ...         value.fetch(timeout_s=30)
        3
    """

    __slots__ = ("__weakref__", "_bell", "_error", "_name", "_raw", "_status", "_value")

    def __init__(self, bell: ResultCondition, name: str) -> None:
        self._bell = bell
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
        """Waits for the value and gives it, tensors as tensors.

        Args:
            timeout_s: how long to wait; by default as long as it takes.

        Raises:
            ClosureCancelled: another closure failed first, or the coordinator was closed.
            DeadlineExceeded: not there within `timeout_s`.
            Exception: what the function raised.
        """
        with self._bell.condition:
            self._wait(timeout_s)
            if self._error is not None:
                raise self._error
            if self._status is RemoteValueStatus.ABORTED:
                raise ClosureCancelled(f"{self._name} was lost with its worker; schedule it again.")
            if self._raw is not None:
                # Unpacked here, not when it arrives: most results of a training step are not read.
                packed, frame = self._raw
                self._value = unpack(packed, frame)
                self._raw = None
            return self._value

    def fetch(self, timeout_s: float | None = None) -> Any:
        """As `get`, with tensors as NumPy arrays (bfloat16 as float32) and scalars as numbers."""
        return map_leaves(_to_numpy, self.get(timeout_s))

    def _wait(self, timeout_s: float | None) -> None:
        if self._status is RemoteValueStatus.NOT_READY and not self._bell.wait_for_value(
            lambda: self._status is not RemoteValueStatus.NOT_READY, timeout_s
        ):
            raise DeadlineExceeded(f"{self._name} was not there within {timeout_s:g} s.")

    # What the coordinator does, holding the condition's lock.

    def _set(self, value: Packed | None, frame: Frame | None) -> None:
        if value is not None and frame is not None:
            self._raw = (value, frame)
        self._error = None
        self._status = RemoteValueStatus.READY

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._status = RemoteValueStatus.READY

    def _abort(self, error: ClosureAborted) -> None:
        self._error = error
        self._raw = None
        self._value = None
        self._status = RemoteValueStatus.ABORTED

    @override
    def __repr__(self) -> str:
        error = f": {self._error!r}" if self._error is not None else ""
        return f"<RemoteValue of {self._name} [{self._status.value}{error}]>"


@final
class PerWorkerValues:
    """One value per worker, each held by its worker.

    Made by the coordinator only. Passed to `schedule`, the function receives the executing
    worker's own value.

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
        ...     with sg.ClusterCoordinator(strategy) as coordinator:
        ...         counters = coordinator.create_per_worker_resource(lambda: [40])
        ...         coordinator.schedule(lambda mine: mine[0] + 2, args=(counters,)).fetch(
        ...             timeout_s=30
        ...         )
        42
    """

    __slots__ = ("__weakref__", "_resource", "_values")

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        for value in values:
            if not isinstance(value, RemoteValue):
                raise AssertionError(
                    f"PerWorkerValues holds {value!r}: expected RemoteValues only; they are made by "
                    "create_per_worker_dataset and create_per_worker_resource."
                )
        self._values = tuple(values)
        self._resource = 0

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """State of each worker's value (the values themselves stay with the workers)."""
        return self._values

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "next() of per-worker iterators cannot run on the coordinator: pass them to a "
            "scheduled function and call next() there."
        )

    @override
    def __repr__(self) -> str:
        states = ", ".join(value.status.value for value in self._values)
        return f"<PerWorkerValues [{states}]>"


@final
class PerWorkerDataset:
    """A dataset that is built anew by every worker; `iter` of it starts an iterator on each.

    Made by `ClusterCoordinator.create_per_worker_dataset`.
    """

    def __init__(self, coordinator: ClusterCoordinator, source: object) -> None:
        self._coordinator = coordinator
        self._source = source
        self._spec: object = None

    def __iter__(self) -> PerWorkerValues:
        return self._coordinator._create_iterators(self._source)

    @property
    def element_spec(self) -> object:
        """Shape and kind of an element, from the dataset built once on the coordinator (CCO-30)."""
        if self._spec is None:
            dataset: Any = build_dataset(self._source, index=0, workers=1)
            self._spec = dataset.element_spec
        return self._spec

    @override
    def __repr__(self) -> str:
        return f"<PerWorkerDataset of {self._source!r}>"


@dataclass(frozen=True, kw_only=True)
class ClosureRecord:
    """One error: whose it was, where, and what happened.

    Example:
        >>> from stratagem._cluster.coordinator.remote_values import ClosureRecord
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
    remote_traceback: str = ""


def build_dataset(source: object, *, index: int, workers: int) -> Iterable[object]:
    """The dataset of one worker: `source` itself, or what the function `source` returns.

    A function with a parameter receives an `InputContext` that says which worker this is.
    """
    if not callable(source):
        dataset = source
    elif _takes_context(source):
        dataset = source(InputContext(num_input_pipelines=workers, input_pipeline_id=index))
    else:
        dataset = source()
    if not isinstance(dataset, Iterable):
        raise TypeError(
            f"the dataset function returned {dataset!r}: expected something to iterate over, such "
            "as an sg.data.Dataset or a DataLoader."
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
    """Runs on a worker: its iterator over its own dataset. `workers`: the indices of all of them."""
    index = workers.index(context.get_current_worker_index())
    return iter(build_dataset(source, index=index, workers=len(workers)))


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """Applies a function to the leaves of lists, tuples, named tuples and dictionaries.

    Example:
        >>> map_leaves(lambda leaf: leaf * 2, {"a": (1, [2])})
        {'a': (2, [4])}
    """
    if isinstance(nest, tuple):
        leaves = [map_leaves(function, leaf) for leaf in nest]
        fields = getattr(nest, "_fields", None)
        return type(nest)(*leaves) if fields is not None else tuple(leaves)
    if isinstance(nest, list):
        return [map_leaves(function, leaf) for leaf in nest]
    if isinstance(nest, dict):
        return {key: map_leaves(function, leaf) for key, leaf in nest.items()}
    return function(nest)


def _to_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach().cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()[()]
