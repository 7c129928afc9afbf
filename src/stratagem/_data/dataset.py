"""`Dataset`: a lazy pipeline with the methods of tf.data.

A dataset is a description. Nothing is read before it is iterated, and each `iter()` is a new epoch. This module
has the transformations with their arguments and checks; `dataset_sources.py` has the sources.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from typing import Any, final

import torch

from stratagem._data import adapters, nests, specs
from stratagem._data.batching import BatchNode, UnbatchNode
from stratagem._data.calling import UserFunction
from stratagem._data.combining import ConcatenateNode, InterleaveNode, ZipNode
from stratagem._data.cursor import END
from stratagem._data.dataset_sources import DatasetSources
from stratagem._data.iteration import (
    DatasetIterator,
    EpochCounter,
    EpochReader,
    EpochSource,
    outline,
)
from stratagem._data.node import INFINITE, UNKNOWN, Node, walk
from stratagem._data.options import SHARD_HINT, DistributeOptions, Options
from stratagem._data.parallel import AUTOTUNE, FilterNode, MapNode, PrefetchNode
from stratagem._data.row_ranges import RangeSource
from stratagem._data.shuffling import CacheNode, ShuffleNode
from stratagem._data.transforms import (
    EnumerateNode,
    OptionsNode,
    RepeatNode,
    ShardNode,
    SkipNode,
    TakeNode,
)
from stratagem.errors import DataError


@final
class Dataset(EpochSource, DatasetSources):
    """Lazy pipeline of elements: nests of tensors.

    Each method returns a new dataset and leaves this one unchanged. A function given to a method gets a
    tuple's items as separate arguments, and an `ElementRng` if it has a parameter named ``rng``.

    Example:
        >>> import stratagem as sg
        >>> dataset = sg.data.Dataset.range(6).map(lambda x: x * x).batch(4)
        >>> [batch.tolist() for batch in dataset]
        [[0, 1, 4, 9], [16, 25]]
    """

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise TypeError(
                "Dataset() is not called directly. Use Dataset.from_tensor_slices(...), .range(...), "
                f".from_files(...), or sg.data.as_dataset({node!r:.40})."
            )
        super().__init__(node)
        self._spec: Any = None

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        *,
        seed: int | None = None,
    ) -> Dataset:
        """Apply a function to each element; keep the order.

        Random numbers in the function are seeded per element and epoch: those of torch automatically,
        others through a parameter named ``rng``. The elements do not depend on the threads.

        Args:
            map_func: gets an element (a tuple's items as arguments), returns an element.
            num_parallel_calls: number of threads; `AUTOTUNE` for one per core; by default no thread.
            seed: seed of the function's random numbers; by default that of the dataset.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(3).map(lambda x: x + 1, 2)]
            [1, 2, 3]
        """
        parallel = 0 if num_parallel_calls is None else num_parallel_calls
        _check("num_parallel_calls", parallel, least=0, also=AUTOTUNE)
        return Dataset(MapNode(self.node, seed, UserFunction(map_func, "map"), parallel))

    def filter(self, predicate: Callable[..., Any], *, seed: int | None = None) -> Dataset:
        """Keep the elements for which a function returns true.

        For batches of columns the function returns one bool per row, and rows with True are kept.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(5).filter(lambda x: x % 2 == 0)]
            [0, 2, 4]
        """
        return Dataset(FilterNode(self.node, seed, UserFunction(predicate, "filter")))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stack consecutive elements; the last batch is smaller, or dropped.

        Batches of columns are cut into batches of another size instead.

        Example:
            >>> import stratagem as sg
            >>> [b.tolist() for b in sg.data.Dataset.range(5).batch(2)]
            [[0, 1], [2, 3], [4]]
        """
        _check("batch_size", batch_size, least=1)
        if isinstance(self.node, RangeSource):
            return Dataset(self.node.with_batches(batch_size, drop_remainder=drop_remainder))
        return Dataset(BatchNode(self.node, batch_size, drop_remainder))

    def unbatch(self) -> Dataset:
        """Split each element into its rows.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(3).batch(2).unbatch()]
            [0, 1, 2]
        """
        return Dataset(UnbatchNode(self.node))

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
    ) -> Dataset:
        """Put the elements in random order, a different order in each epoch.

        For batches of columns it shuffles rows, within windows of `buffer_size` rows.

        Args:
            buffer_size: number of elements to choose from at a time; `None` shuffles everything.
            seed: seed of the orders; by default the dataset's own, from torch's generator.
            reshuffle_each_iteration: False keeps one order for all epochs.

        Raises:
            ValueError: the dataset has no end and no buffer size is given.

        Example:
            >>> import stratagem as sg
            >>> sorted(int(x) for x in sg.data.Dataset.range(4).shuffle(seed=7))
            [0, 1, 2, 3]
        """
        if buffer_size is not None:
            _check("buffer_size", buffer_size, least=1)
        return Dataset(ShuffleNode(self.node, buffer_size, seed, reshuffle_each_iteration))

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat the dataset `count` times, each time as a new epoch; without end for `None` or -1.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(2).repeat(2)]
            [0, 1, 0, 1]
        """
        if count is not None:
            _check("count", count, least=0, also=-1)
        return Dataset(RepeatNode(self.node, None if count == -1 else count))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keep elements index, index + num_shards, …; `SHARD_HINT` for both lets the cluster choose.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(7).shard(3, 1)]
            [1, 4]
        """
        if (num_shards, index) != (SHARD_HINT, SHARD_HINT):
            _check("num_shards", num_shards, least=1)
            _check("index", index, least=0)
            if index >= num_shards:
                raise ValueError(f"index={index!r} must be smaller than num_shards={num_shards!r}")
        return Dataset(ShardNode(self.node, num_shards, index))

    def take(self, count: int) -> Dataset:
        """Keep the first `count` elements; all for -1.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(9).take(2)]
            [0, 1]
        """
        _check("count", count, least=0, also=-1)
        return Dataset(TakeNode(self.node, count))

    def skip(self, count: int) -> Dataset:
        """Drop the first `count` elements; all for -1.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(4).skip(2)]
            [2, 3]
        """
        _check("count", count, least=0, also=-1)
        return Dataset(SkipNode(self.node, count))

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Combine the elements of several datasets, in the same nest; end with the shortest dataset.

        Example:
            >>> import stratagem as sg
            >>> a, b = sg.data.Dataset.range(2), sg.data.Dataset.range(5, 9)
            >>> list(sg.data.Dataset.zip(a, b))
            [(tensor(0), tensor(5)), (tensor(1), tensor(6))]
        """
        nest = datasets[0] if len(datasets) == 1 else datasets
        found = nests.leaves(nest)
        for dataset in found:
            if not isinstance(dataset, Dataset):
                raise TypeError(
                    f"zip() takes datasets, got {type(dataset).__name__} {dataset!r:.60}"
                )
        numbers = iter(builtins.range(len(found)))
        structure = nests.map_leaves(lambda _: next(numbers), nest)
        return Dataset(ZipNode(tuple(dataset.node for dataset in found), structure))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Append another dataset.

        Example:
            >>> import stratagem as sg
            >>> one = sg.data.Dataset.range(2)
            >>> [int(x) for x in one.concatenate(one)]
            [0, 1, 0, 1]
        """
        return Dataset(ConcatenateNode((self.node, as_dataset(dataset).node)))

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int = 4,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
    ) -> Dataset:
        """Create a dataset from each element, and read several of these datasets in turn.

        Args:
            map_func: gets an element, returns a dataset.
            cycle_length: how many datasets are open at a time.
            block_length: how many elements a dataset yields per turn.
            num_parallel_calls: with a value other than `None`, 0 and 1, a thread per open dataset reads
                ahead; the order stays the same.

        Example:
            >>> import stratagem as sg
            >>> def twice(x):
            ...     return sg.data.Dataset.from_tensors(x).repeat(2)
            >>> [int(x) for x in sg.data.Dataset.range(3).interleave(twice, cycle_length=2)]
            [0, 1, 0, 1, 2, 2]
        """
        _check("cycle_length", cycle_length, least=1)
        _check("block_length", block_length, least=1)
        ahead = 0 if num_parallel_calls in (None, 0, 1) else 2
        function = UserFunction(map_func, "interleave")
        return Dataset(
            InterleaveNode(self.node, function, _inner_node, cycle_length, block_length, ahead)
        )

    def flat_map(self, map_func: Callable[..., Any]) -> Dataset:
        """Create a dataset from each element, and read these datasets one after the other.

        Example:
            >>> import stratagem as sg
            >>> rows = sg.data.Dataset.from_tensor_slices([[1, 2], [3, 4]])
            >>> [int(x) for x in rows.flat_map(sg.data.Dataset.from_tensor_slices)]
            [1, 2, 3, 4]
        """
        return self.interleave(map_func, cycle_length=1)

    def prefetch(self, buffer_size: int | None = None) -> Dataset:
        """Read ahead in a thread; two elements by default.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(3).prefetch(1)]
            [0, 1, 2]
        """
        size = AUTOTUNE if buffer_size is None else buffer_size
        _check("buffer_size", size, least=0, also=AUTOTUNE)
        return Dataset(PrefetchNode(self.node, size))

    def cache(self) -> Dataset:
        """Keep the elements in memory: later epochs yield the elements of the first one.

        Example:
            >>> import stratagem as sg
            >>> calls = []
            >>> dataset = sg.data.Dataset.range(2).map(lambda x: calls.append(x) or x).cache()
            >>> len([*dataset, *dataset]), len(calls)
            (4, 2)
        """
        return Dataset(CacheNode(self.node))

    def enumerate(self, start: int = 0) -> Dataset:
        """Number the elements: pairs (number, element).

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.range(5, 7).enumerate())
            [(tensor(0), tensor(5)), (tensor(1), tensor(6))]
        """
        return Dataset(EnumerateNode(self.node, operator.index(start)))

    def apply(self, transformation: Callable[[Dataset], Any]) -> Dataset:
        """Return ``transformation(self)``, so that you can chain your own steps like the others.

        Example:
            >>> import stratagem as sg
            >>> len(sg.data.Dataset.range(5).apply(lambda d: d.batch(2)))
            3
        """
        return as_dataset(transformation(self))

    def with_options(self, options: Options | DistributeOptions) -> Dataset:
        """Attach options that decide how workers share the dataset.

        Example:
            >>> import stratagem as sg
            >>> off = sg.data.DistributeOptions(auto_shard_policy=sg.data.AutoShardPolicy.OFF)
            >>> sg.data.Dataset.range(3).with_options(off)
            <Dataset Options(Range), 3 elements>
        """
        if isinstance(options, DistributeOptions):
            options = Options(distribute=options)
        if not isinstance(options, Options):
            raise TypeError(
                f"with_options() takes sg.data.Options or sg.data.DistributeOptions, got {options!r}"
            )
        return Dataset(OptionsNode(self.node, options))

    @property
    def options(self) -> Options:
        """Options attached last, or the defaults."""
        node = self.node
        while not isinstance(node, OptionsNode):
            if len(node.inputs) != 1:
                return Options()
            (node,) = node.inputs
        return node.options

    def cardinality(self) -> int:
        """Return the number of elements, or `INFINITE`, or `UNKNOWN`.

        Example:
            >>> import stratagem as sg
            >>> sg.data.Dataset.range(5).batch(2).cardinality()
            3
        """
        return self.node.cardinality()

    def __len__(self) -> int:
        size = self.node.cardinality()
        if size < 0:
            kind = "has no end" if size == INFINITE else "must be read to know its length"
            raise TypeError(f"len() of {outline(self.node)}, which {kind}")
        return size

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of the elements, as a nest of `TensorSpec`.

        Reads the first element. A size that may differ from element to element is `None`.

        Raises:
            DataError: the dataset is empty.
        """
        if self._spec is None:
            epochs = EpochCounter(base_seed=0)  # this look is not an epoch of the dataset
            with DatasetIterator(EpochReader(epochs, self.node)) as iterator:
                element = next(iterator, END)
            if element is END:
                raise DataError(f"{self!r} is empty, so its element_spec is not known")
            self._spec = specs.spec_of(element, rows_vary=self.node.rows_vary)
        return self._spec

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Yield the elements with NumPy arrays instead of tensors.

        Example:
            >>> import stratagem as sg
            >>> [x.dtype.name for x in sg.data.Dataset.range(1).as_numpy_iterator()]
            ['int64']
        """
        for element in self:
            yield nests.map_leaves(_to_numpy, element)

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(EpochReader(self._epochs, self.node))

    def __reduce__(self) -> Any:
        return (Dataset, (self.node,))  # without epochs, seeds and caches

    def __repr__(self) -> str:
        if any(isinstance(node, RangeSource) for node in walk(self.node)):
            return f"<Dataset {outline(self.node)}>"  # counting would read files
        size = self.node.cardinality()
        count = {INFINITE: "without end", UNKNOWN: "unknown length"}.get(size, f"{size} elements")
        return f"<Dataset {outline(self.node)}, {count}>"


def as_dataset(source: Any) -> Dataset:
    """Return a `Dataset` over any object that yields elements: a loader, another dataset, an iterable.

    Example:
        >>> import stratagem as sg
        >>> [x.tolist() for x in sg.data.as_dataset([[1, 2], [3]])]
        [[1, 2], [3]]
    """
    return source if isinstance(source, Dataset) else Dataset(adapters.node_of(source))


def _inner_node(made: Any) -> Node:
    return as_dataset(made).node


def _to_numpy(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf


def _check(name: str, value: Any, *, least: int, also: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (value < least and value != also):
        special = "" if also is None else f", or {also}"
        raise ValueError(
            f"{name}={value!r} is out of range: expected a whole number >= {least}{special}"
        )
