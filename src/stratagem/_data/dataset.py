"""`Dataset`: a lazy pipeline with tf.data's verbs.

A dataset is a description; nothing is read before it is iterated, and each `iter()` is a new pass (an
epoch). The steps live in the other files of this room; here are their names, arguments and checks.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from typing import Any, final

from typing_extensions import override

from stratagem._data import adapters, nests, specs
from stratagem._data.batching import BatchNode, UnbatchNode
from stratagem._data.calling import UserFunction
from stratagem._data.combining import ConcatenateNode, InterleaveNode, InterleavePlan, ZipNode
from stratagem._data.file_source import FilesNode, ListFilesNode, OnError, expand
from stratagem._data.iteration import DatasetIterator, Passes, Playback, outline
from stratagem._data.node import INFINITE, UNKNOWN, Node
from stratagem._data.options import SHARD_HINT, DistributeOptions, Options
from stratagem._data.parallel import AUTOTUNE, FilterNode, MapNode, PrefetchNode
from stratagem._data.readers import Reader, reader_for
from stratagem._data.shuffling import CacheNode, ShuffleNode
from stratagem._data.sources import GeneratorNode, RangeNode, SlicesNode, TensorsNode
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
class Dataset:
    """A lazy pipeline of elements: nests of tensors.

    Each method returns a new dataset; the old one stays as it was. Functions get a tuple's items as
    separate arguments, and an `ElementRng` if they have a parameter named ``rng``.

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
        self.node = node
        self._passes = Passes()
        self._peeked: Any = None

    # --- sources ------------------------------------------------------------------------------

    @staticmethod
    def range(*args: int) -> Dataset:
        """Integers, with the arguments of Python's `range`.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(1, 6, 2)]
            [1, 3, 5]
        """
        return Dataset(RangeNode(builtins.range(*map(operator.index, args))))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """One element: the nest itself.

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.from_tensors([1, 2]))
            [tensor([1, 2])]
        """
        return Dataset(TensorsNode(tensors))

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """The rows of a nest of arrays, tensors or lists of one length; lists are stacked.

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.from_tensor_slices({"x": [1, 2], "y": [3, 4]}))
            [{'x': tensor(1), 'y': tensor(3)}, {'x': tensor(2), 'y': tensor(4)}]
        """
        return Dataset(SlicesNode(tensors))

    @staticmethod
    def from_generator(generator: Callable[..., Any], args: tuple[Any, ...] = ()) -> Dataset:
        """What the iterable returned by ``generator(*args)`` yields; called anew each pass.

        Example:
            >>> import stratagem as sg
            >>> def squares(n):
            ...     yield from (i * i for i in range(n))
            >>> [int(x) for x in sg.data.Dataset.from_generator(squares, args=(4,))]
            [0, 1, 4, 9]
        """
        return Dataset(GeneratorNode(generator, tuple(args)))

    @staticmethod
    def list_files(patterns: Any) -> Dataset:
        """Paths, or what patterns match (sorted), as text; see `from_files` to read them.

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.list_files(["b.txt", "a.txt"]))
            ['b.txt', 'a.txt']
        """
        return Dataset(ListFilesNode(expand(patterns)))

    @staticmethod
    def from_files(
        patterns: Any, reader: Reader | str | None = None, *, on_error: OnError = "raise"
    ) -> Dataset:
        r"""The records of files, in order.

        Args:
            patterns: a path or pattern, or a list of them.
            reader: a `Reader`, or "lines", "csv", "numpy", "parquet", "tfrecord"; by default what
                the names end in tells.
            on_error: "raise", or "skip" to pass over unreadable records and files: the iterator's
                ``skipped`` lists them, and a warning at the end counts them.

        Example:
            >>> import stratagem as sg, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "a.csv")
            >>> _ = path.write_text("x\n1\nbad\n3\n")
            >>> [int(r["x"]) for r in sg.data.Dataset.from_files(path).take(1)]
            [1]
        """
        paths = expand(patterns)
        return Dataset(FilesNode(paths, reader_for(reader, paths), on_error))

    # --- transformations ----------------------------------------------------------------------

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        *,
        seed: int | None = None,
    ) -> Dataset:
        """Apply a function to each element; order is kept.

        Randomness in it is seeded per element and epoch: torch's random functions by themselves,
        others through a parameter named ``rng``. The elements do not depend on the threads.

        Args:
            map_func: gets an element (a tuple's items as arguments), returns an element.
            num_parallel_calls: threads; `AUTOTUNE` for one per core; none by default.
            seed: of its randomness; by default the dataset's own.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(3).map(lambda x: x + 1, 2)]
            [1, 2, 3]
        """
        parallel = 0 if num_parallel_calls is None else num_parallel_calls
        _check("num_parallel_calls", parallel, least=0, also=AUTOTUNE)
        return Dataset(MapNode(self.node, UserFunction(map_func, "map"), parallel, seed))

    def filter(self, predicate: Callable[..., Any], *, seed: int | None = None) -> Dataset:
        """Keep the elements a function answers true to.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(5).filter(lambda x: x % 2 == 0)]
            [0, 2, 4]
        """
        return Dataset(FilterNode(self.node, UserFunction(predicate, "filter"), seed))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stack consecutive elements; the last batch is smaller, or dropped.

        Example:
            >>> import stratagem as sg
            >>> [b.tolist() for b in sg.data.Dataset.range(5).batch(2)]
            [[0, 1], [2, 3], [4]]
        """
        _check("batch_size", batch_size, least=1)
        return Dataset(BatchNode(self.node, batch_size, drop_remainder))

    def unbatch(self) -> Dataset:
        """The rows of each element.

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
        """Random order, another one each epoch.

        Args:
            buffer_size: elements to choose from at a time; `None` shuffles everything.
            seed: of the orders; by default the dataset's own, from torch's generator.
            reshuffle_each_iteration: False keeps one order for all epochs.

        Raises:
            ValueError: no buffer size for a dataset without end.

        Example:
            >>> import stratagem as sg
            >>> sorted(int(x) for x in sg.data.Dataset.range(4).shuffle(seed=7))
            [0, 1, 2, 3]
        """
        if buffer_size is not None:
            _check("buffer_size", buffer_size, least=1)
        return Dataset(ShuffleNode(self.node, buffer_size, seed, reshuffle_each_iteration))

    def repeat(self, count: int | None = None) -> Dataset:
        """So many passes, each an epoch; without end for `None` or -1.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(2).repeat(2)]
            [0, 1, 0, 1]
        """
        if count is not None:
            _check("count", count, least=0, also=-1)
        return Dataset(RepeatNode(self.node, None if count == -1 else count))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Elements index, index + num_shards, …; `SHARD_HINT` twice leaves both to the cluster.

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
        """The first elements; all for -1.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(9).take(2)]
            [0, 1]
        """
        _check("count", count, least=0, also=-1)
        return Dataset(TakeNode(self.node, count))

    def skip(self, count: int) -> Dataset:
        """All but the first elements; none for -1.

        Example:
            >>> import stratagem as sg
            >>> [int(x) for x in sg.data.Dataset.range(4).skip(2)]
            [2, 3]
        """
        _check("count", count, least=0, also=-1)
        return Dataset(SkipNode(self.node, count))

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Elements side by side, in the nest the datasets come in; ends with the shortest.

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
        return Dataset(ZipNode([dataset.node for dataset in found], structure))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """This one, then another.

        Example:
            >>> import stratagem as sg
            >>> one = sg.data.Dataset.range(2)
            >>> [int(x) for x in one.concatenate(one)]
            [0, 1, 0, 1]
        """
        return Dataset(ConcatenateNode([self.node, as_dataset(dataset).node]))

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int = 4,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
    ) -> Dataset:
        """Datasets made of the elements, taking turns.

        Args:
            map_func: gets an element, returns a dataset.
            cycle_length: how many are open at a time.
            block_length: how many elements each gives per turn.
            num_parallel_calls: anything but `None`, 0 and 1 reads each open one ahead in a thread
                of its own; the order stays the same.

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
        plan = InterleavePlan(function, _inner_node, cycle_length, block_length, ahead)
        return Dataset(InterleaveNode(self.node, plan))

    def flat_map(self, map_func: Callable[..., Any]) -> Dataset:
        """Datasets made of the elements, one after the other.

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
        """Keep the elements in memory: later passes yield what the first one saw.

        Example:
            >>> import stratagem as sg
            >>> calls = []
            >>> dataset = sg.data.Dataset.range(2).map(lambda x: calls.append(x) or x).cache()
            >>> len([*dataset, *dataset]), len(calls)
            (4, 2)
        """
        return Dataset(CacheNode(self.node))

    def enumerate(self, start: int = 0) -> Dataset:
        """Pairs (number, element).

        Example:
            >>> import stratagem as sg
            >>> list(sg.data.Dataset.range(5, 7).enumerate())
            [(tensor(0), tensor(5)), (tensor(1), tensor(6))]
        """
        return Dataset(EnumerateNode(self.node, operator.index(start)))

    def apply(self, transformation: Callable[[Dataset], Any]) -> Dataset:
        """``transformation(self)``, so that one's own steps read like the others.

        Example:
            >>> import stratagem as sg
            >>> len(sg.data.Dataset.range(5).apply(lambda d: d.batch(2)))
            3
        """
        return as_dataset(transformation(self))

    def with_options(self, options: Options | DistributeOptions) -> Dataset:
        """The same elements, with options on how workers share them.

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

    # --- questions ----------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The options attached last, or the defaults."""
        return find_options(self.node)

    def cardinality(self) -> int:
        """Number of elements, or `INFINITE`, or `UNKNOWN`.

        Example:
            >>> import stratagem as sg
            >>> sg.data.Dataset.range(5).batch(2).cardinality()
            3
        """
        return self.node.cardinality()

    def __len__(self) -> int:
        size = self.node.cardinality()
        if size < 0:
            kind = "has no end" if size == INFINITE else "has a length only reading it tells"
            raise TypeError(f"len() of {outline(self.node)}, which {kind}")
        return size

    def __bool__(self) -> bool:
        return True

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of the elements, as a nest of `TensorSpec`.

        Where only an element tells (after `map`, from files or generators), the first one is read.

        Raises:
            DataError: the dataset is empty and nothing else tells.
        """
        spec = self.node.spec()
        if spec is not None:
            return spec
        if self._peeked is None:
            self._peeked = self._peek()
        return self._peeked

    def _peek(self) -> Any:
        passes = Passes(base_seed=0)  # a pass of its own: looking must not count as an epoch
        with DatasetIterator(Playback(passes.begin(self.node))) as iterator:
            for element in iterator:
                spec = specs.spec_of(element)
                return specs.first_dimension(spec, None) if self.node.rows_vary else spec
        raise DataError(f"{self!r} is empty, so its element_spec cannot be told")

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold the elements: ``state = reduce_func(state, element)``.

        Example:
            >>> import stratagem as sg
            >>> int(sg.data.Dataset.range(4).reduce(0, lambda total, x: total + x))
            6
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Elements with NumPy arrays instead of tensors.

        Example:
            >>> import stratagem as sg
            >>> [x.dtype.name for x in sg.data.Dataset.range(1).as_numpy_iterator()]
            ['int64']
        """
        for element in self:
            yield nests.map_leaves(_to_numpy, element)

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(Playback(self._passes.begin(self.node)))

    @override
    def __reduce__(self) -> Any:
        return (Dataset, (self.node,))  # passes, seeds and caches stay behind

    @override
    def __repr__(self) -> str:
        size = self.node.cardinality()
        count = {INFINITE: "without end", UNKNOWN: "unknown length"}.get(size, f"{size} elements")
        return f"<Dataset {outline(self.node)}, {count}>"


def as_dataset(source: Any) -> Dataset:
    """A `Dataset` of whatever yields elements: loaders, other libraries' datasets, iterables.

    Example:
        >>> import stratagem as sg
        >>> [x.tolist() for x in sg.data.as_dataset([[1, 2], [3]])]
        [[1, 2], [3]]
    """
    return source if isinstance(source, Dataset) else Dataset(adapters.node_of(source))


def find_options(node: Node) -> Options:
    """The options nearest to the end of a pipeline."""
    while True:
        if isinstance(node, OptionsNode):
            return node.options
        if len(node.inputs) != 1:
            return Options()
        (node,) = node.inputs


def _inner_node(made: Any) -> Node:
    return as_dataset(made).node


def _to_numpy(leaf: Any) -> Any:
    import torch

    return leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf


def _check(name: str, value: Any, *, least: int, also: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (value < least and value != also):
        special = "" if also is None else f", or {also}"
        raise ValueError(
            f"{name}={value!r} is out of range: expected a whole number >= {least}{special}"
        )
