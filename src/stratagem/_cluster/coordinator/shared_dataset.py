"""`SharedDataset`: one dataset that all workers read together, with an account of its elements.

Each scheduled function that receives the dataset gets the next elements, at the time of `schedule`. They are read by
the worker that runs the function (`_data/shared_parts.py`). `LeaseLedger` decides; the engine's lock guards it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, final

from torch.utils.data import Dataset as TorchDataset
from typing_extensions import override

from stratagem._cluster.coordinator.lease_ledger import Lease, LeaseLedger, LeaseOrder
from stratagem._cluster.coordinator.remote_values import PerWorkerValues, call_dataset_fn
from stratagem._data.dataset import as_dataset
from stratagem._data.iteration import outline
from stratagem._data.seeds import fresh_seed
from stratagem._data.shared_parts import LeasedReader, Part, PartedDataset
from stratagem._wire.messages import LeasedElements
from stratagem.errors import DataError, EndOfData, MisuseError

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine


_VERSION: Final = 2  # of the format of positions

INTERLEAVE: Final = 8
"""Parts read in turn: enough that each of some workers has parts of its own. Each open part costs a worker the memory
of 65,536 decoded rows, 20 MB for 40 columns."""


@final
@dataclass(frozen=True, kw_only=True)
class LeasedRows:
    """Consecutive elements of a shared dataset.

    Attributes:
        epoch: the pass over the data, from 0.
        source: the part of the data: a file and its rows, or "the dataset".
        first: first element of the part, in the part's order of this epoch.
        stop: end, exclusive.

    Example:
        >>> import stratagem as sg
        >>> sg.LeasedRows(epoch=0, source="a.parquet rows 0 to 1000", first=2, stop=5).stop
        5
    """

    epoch: int
    source: str
    first: int
    stop: int


@final
@dataclass(frozen=True, kw_only=True)
class InputLedger:
    """Account of the elements of a shared dataset.

    Attributes:
        epoch: the epoch of the elements that were leased last, from 0.
        rows_trained: rows that finished functions have read, in all epochs. A coordinator that continues a job does
            not know the rows of functions that ran when its predecessor was lost.
        trained: elements of this epoch that were trained.
        running: elements of functions that are queued or running.
        repeated: elements of all epochs that may have been trained twice.
        lost: elements of all epochs that may not have been trained, and will not be: the function failed, or did
            not read them.

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
        ...     with sg.ClusterCoordinator(strategy) as coordinator:
        ...         data = coordinator.create_shared_dataset(sg.data.Dataset.range(6).batch(2))
        ...         results = list(strategy.run_steps(lambda batch: None, data))
        ...         ledger = data.ledger
        >>> ledger.rows_trained, ledger.lost
        (6, ())
    """

    epoch: int
    rows_trained: int
    trained: tuple[LeasedRows, ...]
    running: tuple[LeasedRows, ...]
    repeated: tuple[LeasedRows, ...]
    lost: tuple[LeasedRows, ...]


class HeldLease(NamedTuple):
    """Elements of one dataset that a closure holds."""

    dataset: SharedDataset
    lease: Lease

    @property
    def part(self) -> tuple[int, ...] | None:
        """The part that a worker has to open; None for a dataset in one part, which all workers open."""
        if len(self.dataset._dataset.parts) == 1:
            return None
        return self.dataset._resource, self.lease.epoch, self.lease.part

    @property
    def message(self) -> LeasedElements:
        """The lease as it is sent to a worker."""
        order, (_, epoch, part, first, count) = self.dataset._ledger.order, self.lease
        size = order.sizes[part]
        assert size is not None
        return LeasedElements(self.dataset._resource, order.seed, epoch, part, first, count, size)


@final
class SharedDataset:
    """A dataset that all workers read together. Made by `ClusterCoordinator.create_shared_dataset`.

    Pass it to `schedule`: the function receives an iterator over its elements. On the coordinator, the dataset has a
    length and a position, and `ledger` accounts for every element.

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=2, ps=1, in_process=True) as cluster:
        ...     strategy = sg.ParameterServerStrategy(cluster.resolver)
        ...     with sg.ClusterCoordinator(strategy) as coordinator:
        ...         data = coordinator.create_shared_dataset(sg.data.Dataset.range(10).batch(4))
        ...         values = [
        ...             coordinator.schedule(lambda it: next(it), args=(data,))
        ...             for _ in range(len(data))
        ...         ]
        ...         [value.get().tolist() for value in values]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self, engine: Engine, values: PerWorkerValues, dataset: PartedDataset, ledger: LeaseLedger
    ) -> None:
        self._engine = engine
        self._values = values  # workers drop their readers when it is collected
        self._resource = values._resource
        self._dataset = dataset
        self._ledger = ledger
        self._scheduling = threading.RLock()  # of the thread that leases elements
        self._pinned: Callable[[Collection[int]], dict[str, Any]] | None = None

    # ------------------------------------------------------------------ for the user

    def __len__(self) -> int:
        """Return how many functions an epoch feeds. Counts the elements of all files that were not read yet."""
        with self._scheduling:
            for part in range(len(self._dataset.parts)):
                self._measure(part)
            return sum(1 for _ in self._ledger.order.leases_of(0))

    def __bool__(self) -> bool:
        return True

    @property
    def ledger(self) -> InputLedger:
        """Account of the elements that were trained, repeated and lost."""
        with self._engine.lock:
            ledger = self._ledger
            return InputLedger(
                epoch=ledger.order.epoch,
                rows_trained=ledger.rows,
                trained=self._rows(ledger.trained(ledger.order.epoch)),
                running=self._rows(ledger.held),
                repeated=self._rows(ledger.repeated),
                lost=self._rows(ledger.lost),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values, for any number of workers.

        Functions that no worker has received count as not trained. A program that continues at this position repeats
        the elements of running functions, or counts them as lost (`ledger`). After `join` there are none.
        """
        with self._engine.lock:
            pinned = self._pinned or self._ledger.snapshot()
            return self._with_identity(pinned(self._engine.queue.unsent()))

    def state_dict_when_finished(self) -> dict[str, Any]:
        """Return the position that will be current when all functions scheduled so far have finished."""
        with self._engine.lock:
            return self._with_identity(self._ledger.state_when_finished())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position.

        Raises:
            ValueError: the position belongs to another dataset.
            MisuseError: functions with elements of this dataset are queued or running.
        """
        found = {
            name: state.get(name) for name in ("version", "dataset", "per_closure", "interleave")
        }
        expected = self._identity()
        if found != expected:
            raise ValueError(
                f"this position was saved by a shared dataset {found}, but this one is {expected}. Create the "
                "same dataset, from the same files, to continue."
            )
        with self._scheduling, self._engine.lock:
            if self._ledger.held:
                raise MisuseError(
                    f"load_state_dict: {len(self._ledger.held)} scheduled functions have elements of this "
                    "dataset. Call coordinator.join() first."
                )
            for part, size in enumerate(state["sizes"]):
                if size is not None:
                    self._ledger.order.sizes[part] = size
            self._ledger.load(state)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Return a context manager in which `state_dict` returns the position at entry, while training continues.

        Functions that have finished when the context is entered count as trained. Functions that no worker has
        received when `state_dict` is called count as not trained.
        """
        with self._engine.lock:
            self._pinned = self._ledger.snapshot()
        try:
            yield
        finally:
            self._pinned = None

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "next() of a shared dataset cannot run on the coordinator: pass the dataset to a scheduled "
            "function and call next() there."
        )

    @override
    def __repr__(self) -> str:
        return f"<SharedDataset of {outline(self._dataset.node)}, {self._ledger!r}>"

    # ------------------------------------------------------------------ inside

    def _identity(self) -> dict[str, Any]:
        order = self._ledger.order
        return {
            "version": _VERSION,
            "dataset": self._dataset.identity,
            "per_closure": order.per_closure,
            "interleave": order.interleave,
        }

    def _with_identity(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**self._identity(), "sizes": list(self._ledger.order.sizes), **state}

    def _rows(self, leases: Iterable[Lease]) -> tuple[LeasedRows, ...]:
        """Return leases, with those that follow each other in a part put together."""
        found: list[LeasedRows] = []
        for lease in sorted(leases, key=lambda one: (one.epoch, one.part, one.first)):
            last = found[-1] if found else None
            first, stop = lease.first, lease.first + lease.elements
            source = str(self._dataset.parts[lease.part])
            if last and (last.epoch, last.source, last.stop) == (lease.epoch, source, first):
                first = found.pop().first
            found.append(LeasedRows(epoch=lease.epoch, source=source, first=first, stop=stop))
        return tuple(found)

    def _measure(self, part: int) -> None:
        """Find the size of a part, without the engine's lock: that may read the part."""
        if self._ledger.order.sizes[part] is None:
            size = self._dataset.count(part)
            with self._engine.lock:
                self._ledger.order.sizes[part] = size

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Let this thread lease elements: the sizes of the parts that come next are known."""
        with self._scheduling:
            while (part := self._ledger.order.unsized) is not None:
                self._measure(part)
            yield

    def _locked_lease(self, closure: int) -> HeldLease:
        lease = self._ledger.lease(closure)
        if lease is None:
            raise EndOfData(
                f"epoch {self._ledger.order.epoch} of the shared dataset has ended: every element was given to a "
                "scheduled function. The next call of schedule() begins the next epoch; repeat() on the "
                "dataset continues without this error."
            )
        return HeldLease(self, lease)


def make_shared_dataset(
    engine: Engine, source: Any, *, at_least_once: bool, per_closure: int, interleave: int
) -> SharedDataset:
    """Divide a dataset into parts, and let every worker open it."""
    numbers: dict[str, Any] = {"per_closure": per_closure, "interleave": interleave}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number of at least 1.")
    made = as_dataset(call_dataset_fn(source, index=0, workers=1))
    dataset = PartedDataset.of(made)
    order = LeaseOrder(
        [part.elements for part in dataset.parts],
        interleave=min(interleave, len(dataset.parts)),
        per_closure=per_closure,
        seed=fresh_seed() if dataset.node.wants_seed else 0,
        shuffled=dataset.shuffles,
    )
    ledger = LeaseLedger(order, passes=dataset.passes, at_least_once=at_least_once)
    sent = source if callable(source) and not isinstance(source, TorchDataset) else made
    args = (sent, dataset.parts, outline(dataset.node), order.interleave)
    values = engine.add_resource(engine.sender.pack(open_reader, args, None))
    return SharedDataset(engine, values, dataset, ledger)


def open_reader(source: Any, parts: Sequence[Part], shape: str, keep_open: int) -> LeasedReader:
    """Return the reader of the worker that runs this."""
    dataset = PartedDataset.of(as_dataset(call_dataset_fn(source, index=0, workers=1)), parts)
    if outline(dataset.node) != shape:
        raise DataError(
            f"the dataset function made {outline(dataset.node)} on this worker, but {shape} on the coordinator: "
            "a shared dataset must be the same in every process."
        )
    return LeasedReader(dataset, keep_open=keep_open)


def prepared(datasets: Sequence[SharedDataset]) -> AbstractContextManager[object]:
    """Let this thread lease elements of these datasets."""
    if len(datasets) == 1:
        return datasets[0]._prepared()
    stack = ExitStack()
    for dataset in sorted(datasets, key=lambda one: one._resource):  # one order for all threads
        stack.enter_context(dataset._prepared())
    return stack


def lease_all(closure: int, datasets: Sequence[SharedDataset]) -> tuple[HeldLease, ...]:
    """Lease elements of each dataset to a closure. Holds the engine's lock.

    Raises:
        EndOfData: one of them has no more elements. The closure gets none of any.
    """
    leases: list[HeldLease] = []
    try:
        for dataset in datasets:
            leases.append(dataset._locked_lease(closure))  # noqa: PERF401 - EndOfData would end a generator
    except EndOfData:
        for held in leases:
            held.dataset._ledger.ended(closure, ran=False)
        raise
    return tuple(leases)


def share_ray_data(source: object) -> tuple[object, Callable[[], None] | None]:
    """Return a dataset whose Ray datasets are shared by all workers, and a function that ends the sharing.

    The source itself and None if it reads no Ray dataset.
    """
    if "ray.data" not in sys.modules:
        return source, None
    from stratagem._data.dataset import Dataset, as_dataset
    from stratagem._data.ray_source import is_ray_data, share_node
    from stratagem._strategies.worker_strategy import UnbuiltDataset

    inner = source.source if isinstance(source, UnbuiltDataset) else source
    if not isinstance(inner, Dataset) and not is_ray_data(inner):
        return source, None
    dataset = as_dataset(inner)
    node, end = share_node(dataset.node)
    if end is None:
        return source, None
    shared = Dataset(node)
    return (source.with_source(shared) if isinstance(source, UnbuiltDataset) else shared), end
