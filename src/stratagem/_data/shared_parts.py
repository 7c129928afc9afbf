"""Parts of a dataset that workers read independently, and the reader of leased elements on a worker.

A *part* is some row groups of a file, a file, or the whole dataset. A pipeline over one part yields the same elements
in every process: its random steps are seeded by the dataset's seed, the part and the epoch. So an element has a
number, (epoch, part, index), and any worker can read any element.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final, Self, final

from stratagem import metrics
from stratagem._data import batch_rows
from stratagem._data.batching import BatchNode
from stratagem._data.combining import InterleaveNode
from stratagem._data.cursor import END
from stratagem._data.dataset import Dataset
from stratagem._data.file_source import FilesNode, FileSource, ListFilesNode
from stratagem._data.iteration import EpochCounter, EpochReader, outline
from stratagem._data.node import Node, replaced, walk
from stratagem._data.parallel import MapNode, PrefetchNode
from stratagem._data.row_ranges import RangeSource, RowRange
from stratagem._data.seeds import mix
from stratagem._data.shuffling import CacheNode, ShuffleNode
from stratagem._data.transforms import OptionsNode, RepeatNode
from stratagem.errors import DataError, EndOfData

PART_BATCHES: Final = 16
"""Fewest batches of a part: its last batch is smaller, so that at most one batch in 16 is. Small row groups are put
together."""

_SAME_COUNT: Final = (MapNode, PrefetchNode, OptionsNode)
"""Steps that yield as many elements as they read."""


@final
@dataclass(frozen=True)
class Part:
    """Part of a dataset, as plain data; without ranges and files it is the whole dataset.

    Attributes:
        ranges: ranges of rows, for sources of columns.
        files: files, for other sources that read files.
        elements: number of elements; None if it is known only after reading the part.
    """

    ranges: tuple[RowRange, ...] = ()
    files: tuple[str, ...] = ()
    elements: int | None = None

    def __str__(self) -> str:
        if self.files:
            return ", ".join(self.files)
        if not self.ranges:
            return "the dataset"
        shown = [f"{one.path} {one.unit} {one.start} to {one.stop}" for one in self.ranges]
        return ", ".join(shown) if len(shown) < 3 else f"{shown[0]} … {shown[-1]}"


@final
@dataclass(frozen=True)
class PartedDataset:
    """A pipeline and its parts.

    Attributes:
        node: the pipeline, without `repeat()`.
        parts: its parts, in order.
        passes: epochs that `repeat()` asked for, 1 without it; None for no end.
    """

    node: Node
    parts: tuple[Part, ...]
    passes: int | None

    @classmethod
    def of(cls, dataset: Dataset, parts: Sequence[Part] | None = None) -> PartedDataset:
        """Divide a dataset into parts, or use parts that another process has found.

        Raises:
            DataError: the dataset cannot be read again from its beginning by several processes.
        """
        node, passes = _without_repeat(dataset.node)
        for each in walk(node):
            if isinstance(each, CacheNode):
                raise DataError(
                    f"{dataset!r} has a cache() step, but a worker reads only the elements that it is "
                    "given. Remove cache(), or create a dataset per worker."
                )
            if not each.inputs and not each.replayable:
                raise DataError(
                    f"{dataset!r} cannot be shared: its source {outline(each)} has its own order, "
                    "which differs from process to process. Share the dataset inside it: "
                    "sg.data.as_dataset(loader.dataset).shuffle().batch(n)."
                )
        if node.endless:
            raise DataError(
                f"{dataset!r} cannot be shared: it has no end. Use repeat() at the end only."
            )
        if parts is None:
            parts = _find_parts(node)
        if len(parts) == 1:
            node = _without_threads(node)
        return cls(node, tuple(parts), passes)

    @property
    def shuffles(self) -> bool:
        """True if the parts are read in another order in each epoch."""
        return any(isinstance(each, ShuffleNode) and each.each_epoch for each in walk(self.node))

    def over(self, part: int) -> Node:
        """Return the pipeline over one part."""
        return _over(self.node, self.parts[part])

    def count(self, part: int) -> int:
        """Return the number of elements of a part. Reads the part if that is not known otherwise."""
        known = self.parts[part].elements
        if known is not None:
            return known
        node = self.over(part)
        while isinstance(node, _SAME_COUNT):
            node = node.input
        # With any seed: a worker that finds another number of elements raises an error.
        reader = self.open(part, epoch=0, seed=0, node=node)
        try:
            found = 0
            while reader.next() is not END:
                found += 1
            return found
        finally:
            reader.close()

    def open(self, part: int, *, epoch: int, seed: int, node: Node | None = None) -> EpochReader:
        """Begin to read a part."""
        own = seed if len(self.parts) == 1 else mix(seed, part)
        counter = EpochCounter(number=epoch, base_seed=own)
        return EpochReader(counter, self.over(part) if node is None else node)

    @property
    def identity(self) -> str:
        """Text that is the same for the same pipeline over the same parts."""
        text = "|".join(str(part) for part in self.parts)
        return f"{outline(self.node)}, {len(self.parts)} parts, {mix(*text.encode()):016x}"


def _without_repeat(node: Node) -> tuple[Node, int | None]:
    """Return a pipeline without `repeat()`, and how often it is to be read."""
    if len(node.inputs) != 1:
        return node, 1
    inner, passes = _without_repeat(node.inputs[0])
    if isinstance(node, RepeatNode):
        if passes is None or node.count is None:
            return inner, None
        return inner, passes * node.count
    return node.with_inputs([inner]), passes


def _without_threads(node: Node) -> Node:
    """Read nothing ahead: of a dataset in one part, a worker uses only some elements."""
    if len(node.inputs) != 1:
        return node
    inner = _without_threads(node.inputs[0])
    if isinstance(node, PrefetchNode):
        return inner
    node = node.with_inputs([inner])
    return replace(node, parallel=0) if isinstance(node, MapNode) else node


def _find_parts(node: Node) -> list[Part]:
    sources = [each for each in walk(node) if not each.inputs]
    steps = [each for each in walk(node) if each.inputs]
    # Ten rows of every part are not ten rows of the dataset.
    divisible = len(sources) == 1 and all(step.keeps_rows for step in steps)
    source = sources[0]
    if divisible and isinstance(source, RangeSource) and not source.drop_remainder:
        return _range_parts(node, source)
    opens_files = any(isinstance(step, InterleaveNode) for step in steps)
    by_file = isinstance(source, FilesNode) or (isinstance(source, ListFilesNode) and opens_files)
    if divisible and by_file and isinstance(source, FileSource) and len(source.files) > 1:
        return [Part(files=(path,)) for path in source.files]
    size = node.cardinality()
    return [Part(elements=size if size >= 0 else None)]


def _range_parts(node: Node, source: RangeSource) -> list[Part]:
    """Put consecutive ranges together until they have enough rows for some batches."""
    enough = PART_BATCHES * (node.rows_per_batch or 1)
    parts: list[Part] = []
    ranges: list[RowRange] = []
    rows = 0
    for each in source.ranges:
        ranges.append(each)
        rows += each.rows if each.rows is not None else enough
        if rows >= enough:
            parts.append(_range_part(node, source, ranges))
            ranges, rows = [], 0
    if ranges:
        parts.append(_range_part(node, source, ranges))
    return parts or [Part(elements=0)]


def _range_part(node: Node, source: RangeSource, ranges: Sequence[RowRange]) -> Part:
    rows = [each.rows for each in ranges]
    known = source.format.counts_rows and None not in rows
    total = sum(each or 0 for each in rows)
    return Part(ranges=tuple(ranges), elements=_elements(node, total) if known else None)


def _elements(node: Node, rows: int) -> int | None:
    """Return how many elements a pipeline makes of this many rows; None if its functions decide that."""
    while isinstance(node, _SAME_COUNT):
        node = node.input
    below = list(walk(node))
    recuts = all(
        isinstance(each, ShuffleNode | BatchNode | OptionsNode | RangeSource) for each in below
    )
    return -(-rows // node.rows_per_batch) if recuts and node.rows_per_batch else None


def _over(node: Node, part: Part) -> Node:
    source = next(each for each in walk(node) if not each.inputs)
    if part.ranges:
        assert isinstance(source, RangeSource)
        # Several parts are open at a time, and each thread reads ahead in one.
        threads = 1 if source.threads < 0 else source.threads
        chosen = replace(source, only=part.ranges, threads=threads)
        return replaced(node, source, chosen)
    if part.files:
        assert isinstance(source, FileSource)
        return replaced(node, source, source.with_files(part.files))
    return node


@dataclass(slots=True)
class _OpenPart:
    reader: EpochReader
    position: int = 0


@final
@dataclass(slots=True)
class _Reading:
    """Elements that the running closure may read."""

    seed: int
    epoch: int
    part: int
    first: int
    count: int
    size: int
    taken: int = 0
    rows: int = 0


@final
class LeasedReader:
    """Iterator over the elements that the running closure was given.

    Args:
        dataset: the dataset, as this worker has built it.
        keep_open: parts that stay open, to continue reading them without opening them again.

    Example:
        >>> import stratagem as sg
        >>> reader = LeasedReader(PartedDataset.of(sg.data.Dataset.range(6).batch(2)), keep_open=1)
        >>> reader.begin(seed=0, epoch=0, part=0, first=1, count=2, size=3)
        >>> [batch.tolist() for batch in reader], reader.end()
        ([[2, 3], [4, 5]], (2, 4))
    """

    def __init__(self, dataset: PartedDataset, *, keep_open: int) -> None:
        self._dataset = dataset
        self._keep_open = keep_open
        self._open: OrderedDict[tuple[int, int, int], _OpenPart] = OrderedDict()
        self._lease: _Reading | None = None
        self._waited = metrics.timer("input.next")
        weakref.finalize(self, _close_all, self._open)

    def begin(self, *, seed: int, epoch: int, part: int, first: int, count: int, size: int) -> None:
        """Let the running closure read `count` elements of a part of `size` elements, from element `first`."""
        self._lease = _Reading(seed, epoch, part, first, count, size)

    def end(self) -> tuple[int, int]:
        """End the lease; return how many elements and rows were read."""
        lease, self._lease = self._lease, None
        return (0, 0) if lease is None else (lease.taken, lease.rows)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        lease = self._lease
        if lease is None:
            raise DataError(
                "next() of a shared dataset outside of a scheduled function: each scheduled function that "
                "receives the dataset gets its own elements."
            )
        if lease.taken == lease.count:
            raise EndOfData(
                f"this function was given {lease.count} elements of the shared dataset, and has read them. Give "
                "functions more: create_shared_dataset(..., per_closure=n)."
            )
        began = perf_counter()
        element = self._read(lease)
        self._waited.record(perf_counter() - began)
        lease.taken += 1
        lease.rows += batch_rows.rows_of(element)
        return element

    def get_next(self) -> Any:
        """Return the next element."""
        return self.__next__()

    def close(self) -> None:
        """Close all files and end all threads; idempotent."""
        _close_all(self._open)

    def _read(self, lease: _Reading) -> Any:
        wanted = lease.first + lease.taken
        opened = self._part(lease, wanted)
        if opened.position < wanted:
            opened.position += opened.reader.cursor.skip(wanted - opened.position)
        element = opened.reader.next() if opened.position == wanted else END
        is_last = wanted + 1 == lease.size
        if element is END or (is_last and opened.reader.next() is not END):
            found = f"only {opened.position}" if element is END else f"more than {lease.size}"
            raise DataError(
                f"{self._dataset.parts[lease.part]} has {found} elements on this worker, but the coordinator "
                f"has counted {lease.size}. Give all tasks the same files, and give filter() a function that "
                "draws no random numbers."
            )
        opened.position += 1
        return element

    def _part(self, lease: _Reading, wanted: int) -> _OpenPart:
        """Return the open part, at the element or before it."""
        key = lease.seed, lease.epoch, lease.part
        opened = self._open.get(key)
        if opened is not None and (opened.position > wanted or not opened.reader.is_open):
            self._open.pop(key).reader.close()  # a closure runs again, or reading failed
            opened = None
        if opened is None:
            reader = self._dataset.open(lease.part, epoch=lease.epoch, seed=lease.seed)
            opened = self._open[key] = _OpenPart(reader)
            while len(self._open) > self._keep_open:
                self._open.popitem(last=False)[1].reader.close()
        self._open.move_to_end(key)
        return opened


def _close_all(opened: OrderedDict[tuple[int, int, int], _OpenPart]) -> None:
    while opened:
        opened.popitem()[1].reader.close()
