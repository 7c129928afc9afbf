"""Distribute datasets to replicas: split batches, transfer them to devices, read ahead.

Strategies call `distribute_dataset` and `distribute_datasets_from_function`. A worker of a cluster passes its
number among the input pipelines. The user iterates the result and passes its elements to ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, final

import torch

from stratagem._core.context import current_replica
from stratagem._core.user_contexts import InputContext
from stratagem._core.values import PerReplica
from stratagem._data import autoshard, batch_rows, nests, specs
from stratagem._data.background import Prefetcher
from stratagem._data.calling import UserFunction
from stratagem._data.combining import ConsecutiveNode, SideBySideNode
from stratagem._data.cursor import END, Cursor
from stratagem._data.dataset import Dataset, as_dataset
from stratagem._data.iteration import (
    ElementIterator,
    EpochCounter,
    EpochReader,
    EpochSource,
    outline,
)
from stratagem._data.node import Node
from stratagem._data.seeds import mix
from stratagem._data.transfer import DeviceTransfer
from stratagem._data.transforms import EnumerateNode
from stratagem.config import InputOptions, InputReplicationMode
from stratagem.errors import DataError, EndOfData

# Passing a step from thread to thread costs about 100 µs on two busy cores, and takes the GIL from the
# training step. In-memory pipelines make a step in 80 µs.
_WORTHWHILE_S = 300e-6


@dataclass(frozen=True)
class DistributionPlan:
    """Rule by which the steps of a pipeline become distributed values.

    Attributes:
        kind: a step is one element to "split", R "consecutive" ones, or one per pipeline "side_by_side".
        devices: one per replica.
        options: options of the user.
        functions: functions of `map`, applied to each replica's part.
        base_seed: seed of unseeded shuffles if workers must agree on it, else `None`.
    """

    kind: Literal["split", "consecutive", "side_by_side"]
    devices: tuple[torch.device, ...]
    options: InputOptions
    functions: tuple[UserFunction, ...] = ()
    base_seed: int | None = None

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.devices)


def distribute_dataset(
    dataset: Any,
    devices: Sequence[torch.device],
    options: InputOptions | None = None,
    *,
    num_input_pipelines: int = 1,
    input_pipeline_id: int = 0,
) -> DistributedDataset:
    """Return a dataset whose global batches are split for the replicas on `devices`.

    Args:
        dataset: any source that `as_dataset` takes.
        devices: one per replica.
        options: how parts reach the replicas.
        num_input_pipelines: number of workers that share the dataset, by its auto-shard policy.
        input_pipeline_id: number of this worker.

    Raises:
        NotImplementedError: PER_REPLICA, which needs a dataset function.
    """
    options = _checked(options)
    if options.replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA needs a dataset for each replica. Use "
            "strategy.distribute_datasets_from_function(dataset_fn, options)."
        )
    if isinstance(dataset, DistributedDataset):
        raise TypeError(f"{dataset!r} is distributed already. Pass the dataset it was made of.")
    found = as_dataset(dataset)
    share = autoshard.share(
        found.node,
        found.options.distribute.auto_shard_policy,
        num_workers=num_input_pipelines,
        index=input_pipeline_id,
    )
    seed = autoshard.SHARED_SEED if share.one_order and num_input_pipelines > 1 else None
    plan = DistributionPlan("split", tuple(devices), options, base_seed=seed)
    return DistributedDataset(share.node, plan)


def distribute_datasets_from_function(
    dataset_fn: Callable[[InputContext], Any],
    devices: Sequence[torch.device],
    options: InputOptions | None = None,
    *,
    num_input_pipelines: int = 1,
    input_pipeline_id: int = 0,
) -> DistributedDataset:
    """Return per-replica batches from a function: each step takes R consecutive ones.

    Calls the function at once, with the `InputContext` of the pipeline; with PER_REPLICA once per replica,
    each as a pipeline of its own.

    Raises:
        TypeError: `dataset_fn` is not a function, or did not return a dataset.
        ValueError: options contradict each other.
    """
    options = _checked(options)
    if not callable(dataset_fn):
        raise TypeError(
            f"dataset_fn={dataset_fn!r:.60} is not callable: expected a function that takes an "
            "InputContext and returns a dataset. For a dataset use distribute_dataset()."
        )
    per_replica = options.replication_mode is InputReplicationMode.PER_REPLICA
    if options.place_dataset_on_device and not per_replica:
        raise ValueError(
            "place_dataset_on_device=True needs replication_mode=InputReplicationMode.PER_REPLICA"
        )
    if options.place_dataset_on_device and options.fetch_to_device:
        raise ValueError(
            "place_dataset_on_device=True and fetch_to_device=True contradict each other: a dataset "
            "on the device need not be fetched there. Set fetch_to_device=False."
        )
    replicas = len(devices)
    each = replicas if per_replica else 1
    pipelines, first = num_input_pipelines * each, input_pipeline_id * each
    in_sync = num_input_pipelines * replicas
    made = [
        _made_by(dataset_fn, InputContext(pipelines, first + place, in_sync)).node
        for place in range(each)
    ]
    if per_replica:
        plan = DistributionPlan("side_by_side", tuple(devices), options)
        return DistributedDataset(SideBySideNode(tuple(made)), plan)
    plan = DistributionPlan("consecutive", tuple(devices), options)
    return DistributedDataset(ConsecutiveNode(made[0], replicas), plan)


def _made_by(dataset_fn: Callable[[InputContext], Any], context: InputContext) -> Dataset:
    made = dataset_fn(context)
    try:
        return as_dataset(made)
    except TypeError:
        raise TypeError(
            f"dataset_fn returned {type(made).__name__} {made!r:.60}; expected a dataset, such as "
            "sg.data.Dataset, or an iterable of per-replica batches"
        ) from None


def _checked(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"options={options!r} must be an sg.InputOptions")
    return options


@final
class DistributedDataset(EpochSource):
    """Steps for the replicas of a strategy; pass each one to ``run``.

    With one replica the steps are the elements of the dataset. With several, each leaf is a `PerReplica`:
    the batch is split in order into parts whose sizes differ by at most one, larger parts first. A replica
    without rows gets an empty part.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> batches = strategy.distribute_dataset(sg.data.Dataset.range(5).batch(3))
        >>> [[part.tolist() for part in strategy.local_results(batch)] for batch in batches]
        [[[0, 1], [2]], [[3], [4]]]
        >>> strategy.close()
    """

    def __init__(self, node: Node, plan: DistributionPlan) -> None:
        # Functions of `map` get a seed for each step.
        super().__init__(EnumerateNode(node, 0) if plan.functions else node, plan.base_seed)
        self._node = node
        self._plan = plan

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._begin(self._epochs))

    def _begin(self, epochs: EpochCounter) -> EpochReader:
        plan = self._plan
        wrap = lambda cursor, seed: _read_ahead(plan, cursor, seed)
        return EpochReader(epochs, self.node, wrap)

    @property
    def cardinality(self) -> int:
        """Number of steps, or `INFINITE`, or `UNKNOWN`."""
        return self._node.cardinality()

    def __len__(self) -> int:
        if self.cardinality < 0:
            raise TypeError(f"len() of {self!r}: its number of steps is not known")
        return self.cardinality

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes: those of the dataset with one replica, else `PerReplicaSpec` leaves.

        Reads the first step.

        Raises:
            DataError: the dataset is empty.
        """
        with DistributedIterator(self._begin(EpochCounter(base_seed=0))) as iterator:
            step = next(iterator, END)
        if step is END:
            raise DataError(f"{self!r} is empty, so its element_spec is not known")
        # With one element per replica, the last step may have empty parts.
        uneven = self._plan.kind != "split" and self._plan.replicas > 1
        rows_vary = uneven or self._node.rows_vary
        return nests.map_leaves(lambda leaf: _value_spec(leaf, rows_vary=rows_vary), step)

    def map(self, map_func: Callable[..., Any]) -> DistributedDataset:
        """Apply a function to each replica's part, on its device, in the background.

        Random numbers are seeded per step, replica and epoch, as in `Dataset.map`.

        Example:
            >>> import stratagem as sg
            >>> with sg.OneDeviceStrategy("cpu:0") as strategy:
            ...     steps = strategy.distribute_dataset(sg.data.Dataset.range(4).batch(2))
            ...     [x.tolist() for x in steps.map(lambda part: part * 10)]
            [[0, 10], [20, 30]]
        """
        functions = (*self._plan.functions, UserFunction(map_func, "map"))
        return DistributedDataset(self._node, replace(self._plan, functions=functions))

    def __reduce__(self) -> Any:
        return (DistributedDataset, (self._node, self._plan))

    def __repr__(self) -> str:
        return f"<DistributedDataset {outline(self._node)} for {self._plan.replicas} replica(s)>"


def _value_spec(leaf: Any, *, rows_vary: bool) -> Any:
    if not isinstance(leaf, PerReplica):
        return specs.leaf_spec(leaf, rows_vary=rows_vary)
    parts = [specs.leaf_spec(part, rows_vary=rows_vary) for part in leaf.values]
    if any(part != parts[0] for part in parts):  # the batch does not divide evenly
        parts = [specs.leaf_spec(part, rows_vary=True) for part in leaf.values]
    return specs.PerReplicaSpec(tuple(parts))


class _PreparedStep(NamedTuple):
    """Step for the user, and the copies to wait for before using it."""

    value: Any
    copies: list[tuple[torch.cuda.Stream, torch.cuda.Event]]


def _read_ahead(plan: DistributionPlan, cursor: Cursor, seed: int) -> Prefetcher:
    transfer = DeviceTransfer(
        plan.devices if plan.options.fetch_to_device else [None] * plan.replicas
    )
    return Prefetcher(
        cursor,
        plan.options.per_replica_buffer_size,
        name="stratagem-input",
        prepare=lambda raw: _prepare(raw, plan, transfer, seed),
        worthwhile_s=_WORTHWHILE_S if transfer.idle else 0.0,
    )


def _prepare(
    raw: Any, plan: DistributionPlan, transfer: DeviceTransfer, seed: int
) -> _PreparedStep:
    number = 0
    if plan.functions:
        number_tensor, raw = raw
        number = int(number_tensor)
    parts, rows = _parts(raw, plan)
    parts = [transfer.move(part, replica) for replica, part in enumerate(parts)]
    for place, function in enumerate(plan.functions):
        for replica, part in enumerate(parts):
            own = mix(seed, place, number, replica)
            parts[replica] = nests.to_element(function.call(part, number=number, seed=own))
        rows = [batch_rows.rows_of(part) for part in parts]
    value = parts[0]
    if plan.replicas > 1:
        value = nests.zip_leaves(lambda found: PerReplica(found, rows=rows), parts)
    return _PreparedStep(value, transfer.copies())


def _parts(raw: Any, plan: DistributionPlan) -> tuple[list[Any], list[int]]:
    """Return one part per replica, and the number of rows of each."""
    if plan.kind == "split":
        if plan.replicas == 1:
            return [raw], [0]
        what = f"a batch to be split for {plan.replicas} replicas"
        sizes = batch_rows.split_sizes(batch_rows.count_rows(raw, what=what), plan.replicas)
        return batch_rows.cut(raw, sizes), sizes
    found = list(raw) + [None] * (plan.replicas - len(raw))
    like = next(element for element in found if element is not None)
    parts = [batch_rows.without_rows(like) if element is None else element for element in found]
    rows = [0 if element is None else batch_rows.rows_of(element) for element in found]
    return parts, rows


@final
class OptionalElement:
    """Optional step, returned by `DistributedIterator.get_next_as_optional`.

    Example:
        >>> from stratagem.data import OptionalElement
        >>> OptionalElement(3).get_value(), OptionalElement().has_value()
        (3, False)
    """

    def __init__(self, value: Any = END) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Return whether there is a step."""
        return self._value is not END

    def get_value(self) -> Any:
        """Return the step.

        Raises:
            ValueError: there is none.
        """
        if self._value is END:
            raise ValueError("this optional has no value: the dataset has ended. Ask has_value().")
        return self._value

    def __repr__(self) -> str:
        return f"<OptionalElement {'empty' if self._value is END else 'with value'}>"


@final
class DistributedIterator(ElementIterator):
    """Iterator over the steps of a distributed dataset, with a position.

    Its threads end with the last step, an error, `close()`, or when the iterator is dropped.

    Example:
        >>> import stratagem as sg
        >>> with sg.OneDeviceStrategy("cpu:0") as strategy:
        ...     iterator = iter(strategy.distribute_dataset(sg.data.Dataset.range(3).batch(2)))
        ...     _ = iterator.get_next()
        ...     position = iterator.state_dict()
        >>> iterator.get_next()
        tensor([2])
        >>> iterator.load_state_dict(position)
        >>> iterator.get_next()
        tensor([2])
    """

    def _step(self) -> Any:
        if current_replica() is not None:
            raise ValueError(
                "a distributed iterator is advanced outside the replicas, once for all of them. "
                "Call next() first and pass what it returns: strategy.run(step, args=(batch,))."
            )
        prepared = self._reader.next()
        if prepared is END:
            return END
        if prepared.copies:
            DeviceTransfer.wait_for(prepared.value, prepared.copies)
        return prepared.value

    def __next__(self) -> Any:
        value = self._step()
        if value is END:
            raise StopIteration
        return value

    def get_next(self) -> Any:
        """Return the next step.

        Raises:
            EndOfData: (a StopIteration) after the last one.
        """
        value = self._step()
        if value is END:
            raise EndOfData(
                "the dataset has no more elements. Call iter() on it again for another pass, or "
                "add repeat() to the dataset."
            )
        return value

    def get_next_as_optional(self) -> OptionalElement:
        """Return the next step in an `OptionalElement`; an empty one after the last step."""
        return OptionalElement(self._step())
