"""Return values of `schedule` and `create_per_worker_*`: results that arrive later, or stay on workers.

`RemoteValue` is the result of one closure, `PerWorkerValues` one value per worker, `PerWorkerDataset`
makes one iterator per worker. The engine sets them.
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
from stratagem.errors import ClosureAborted, DeadlineExceeded, WrongArgumentType

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.coordinator import ClusterCoordinator


@final
class ResultCondition:
    """A condition that counts the threads waiting for a result, so that others are woken less often.

    Args:
        lock: guards everything that waiting threads read.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.condition = threading.Condition(lock)
        self.waiting_for_values = 0
        """Threads inside `RemoteValue.get`: they must be woken by every result."""

    def wait_for_value(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait, holding the lock, until a value is there; return False after the timeout."""
        self.waiting_for_values += 1
        try:
            return self.condition.wait_for(ready, timeout_s)
        finally:
            self.waiting_for_values -= 1


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

    __slots__ = ("__weakref__", "_condition", "_error", "_name", "_raw", "_status", "_value")

    def __init__(self, condition: ResultCondition, name: str) -> None:
        self._condition = condition
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
            ClosureCancelled: another closure failed first, or the coordinator was closed.
            DeadlineExceeded: there is no result within `timeout_s`.
            Exception: the exception of the function.
        """
        with self._condition.condition:
            self._wait(timeout_s)
            if self._error is not None:
                raise self._error
            if self._raw is not None:
                # Unpacked here and not on arrival: most results of training steps are never read.
                packed, frame = self._raw
                self._value = unpack(packed, frame)
                self._raw = None
            return self._value

    def fetch(self, timeout_s: float | None = None) -> Any:
        """Return the result as `get` does, with tensors as NumPy arrays (bfloat16 as float32)."""
        return map_leaves(_to_numpy, self.get(timeout_s))

    def _wait(self, timeout_s: float | None) -> None:
        if self._status is RemoteValueStatus.NOT_READY and not self._condition.wait_for_value(
            lambda: self._status is not RemoteValueStatus.NOT_READY, timeout_s
        ):
            raise DeadlineExceeded(f"{self._name} has no result after {timeout_s:g} s.")

    # Called by the engine, holding the condition's lock.

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


def build_dataset(source: object, *, index: int, workers: int) -> Iterable[object]:
    """Return the dataset of one worker: `source` itself, or the result of the function `source`.

    A function with a parameter receives an `InputContext` with the worker's index.
    """
    if not callable(source):
        dataset = source
    elif _takes_context(source):
        dataset = source(InputContext(num_input_pipelines=workers, input_pipeline_id=index))
    else:
        dataset = source()
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
    return iter(build_dataset(source, index=place, workers=len(workers)))


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """Apply a function to the leaves of lists, tuples, named tuples and dictionaries.

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
