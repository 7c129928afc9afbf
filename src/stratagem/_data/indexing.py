"""In-memory chains run by index arithmetic over whole batches.

Between an in-memory source and `batch()` the steps shard, shuffle, repeat, take and skip only choose
row numbers. Here they do so on NumPy arrays of numbers; the batch then gathers its rows at once.
The elements are those of the one-by-one cursors, exactly (tests compare the two).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from typing_extensions import override

from stratagem._data.node import CursorContext, Node, Positioned, State
from stratagem._data.seeds import BufferDraws, permutation
from stratagem._data.shuffling import ShuffleNode
from stratagem._data.sources import IndexedSource
from stratagem._data.transforms import OptionsNode, RepeatNode, ShardNode, SkipNode, TakeNode

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_NONE: Indices = np.empty(0, dtype=np.int64)
_SKIP_CHUNK = 1 << 20  # numbers thrown away at a time: 8 MB


class Numbers(Positioned, ABC):
    """A stream of row numbers."""

    @abstractmethod
    def take(self, count: int) -> Indices:
        """The next `count` numbers; fewer only at the end."""

    def skip(self, count: int) -> None:
        """Pass over up to `count` numbers."""
        while count > 0:
            found = len(self.take(min(count, _SKIP_CHUNK)))
            if found == 0:
                return
            count -= found


@dataclass(frozen=True, slots=True)
class Rows:
    """Row numbers, and the source whose rows they are."""

    source: IndexedSource
    numbers: Numbers

    def gather(self, indices: Indices) -> Any:
        """The rows at `indices`, as a batch."""
        return self.source.gather(torch.from_numpy(indices))


def open_rows(node: Node, frame: CursorContext) -> Rows | None:
    """The chain ending in `node` as row numbers, or `None` if some step needs the rows themselves.

    Frames are derived exactly as the cursors of the same nodes derive them, so seeds agree.
    """
    source = row_source(node)
    return None if source is None else Rows(source, _open(node, frame))


def row_source(node: Node) -> IndexedSource | None:
    """The in-memory source under a chain of steps that only choose rows."""
    while isinstance(
        node, ShardNode | ShuffleNode | RepeatNode | TakeNode | SkipNode | OptionsNode
    ):
        node = node.input
    return node if isinstance(node, IndexedSource) else None


def _open(node: Node, frame: CursorContext) -> Numbers:
    if isinstance(node, RepeatNode):
        return _Repeat(node, frame)
    if isinstance(node, IndexedSource):
        return _Counting(node.size)
    assert isinstance(node, ShardNode | ShuffleNode | TakeNode | SkipNode | OptionsNode)
    child = _open(node.input, frame.child())
    if isinstance(node, ShuffleNode):
        seed = node.order_seed(frame)
        if node.full:
            return _FullShuffle(child, seed, node.input.cardinality())
        assert node.buffer_size is not None
        return _BufferShuffle(child, seed, node.buffer_size)
    if isinstance(node, TakeNode):
        return child if node.count < 0 else _Take(child, node.count)
    if isinstance(node, SkipNode):
        return _Take(child, 0) if node.count < 0 else _Skip(child, node.count)
    if isinstance(node, ShardNode) and not node.is_hint:
        return _Shard(child, node.num_shards, node.index)
    return child


@final
class _Counting(Numbers):
    KEPT = ("position",)

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    @override
    def take(self, count: int) -> Indices:
        start = self._position
        self._position = min(self._size, start + count)
        return np.arange(start, self._position, dtype=np.int64)

    @override
    def skip(self, count: int) -> None:
        self._position = min(self._size, self._position + count)


class _Over(Numbers):
    """Numbers chosen from another stream of them."""

    PARTS = ("child",)

    def __init__(self, child: Numbers) -> None:
        self._child = child


@final
class _Shard(_Over):
    def __init__(self, child: Numbers, num_shards: int, index: int) -> None:
        super().__init__(child)
        self._num_shards = num_shards
        self._index = index

    @override
    def take(self, count: int) -> Indices:
        # Always whole rounds of num_shards, so a round starts at shard 0 every time.
        return self._child.take(count * self._num_shards)[self._index :: self._num_shards]


@final
class _Take(_Over):
    KEPT = ("left",)

    def __init__(self, child: Numbers, count: int) -> None:
        super().__init__(child)
        self._left = count

    @override
    def take(self, count: int) -> Indices:
        found = self._child.take(min(count, self._left)) if self._left else _NONE
        self._left -= len(found)
        return found


@final
class _Skip(_Over):
    KEPT = ("count",)

    def __init__(self, child: Numbers, count: int) -> None:
        super().__init__(child)
        self._count = count

    @override
    def take(self, count: int) -> Indices:
        if self._count:
            self._child.skip(self._count)
            self._count = 0
        return self._child.take(count)


@final
class _FullShuffle(Numbers):
    """A permutation, made when first asked; over a plain source no second array is needed."""

    KEPT = ("position",)

    def __init__(self, child: Numbers, seed: int, size: int) -> None:
        self._child = child
        self._seed = seed
        self._size = size
        self._order: Indices | None = None
        self._position = 0

    def _make(self) -> Indices:
        order = permutation(self._seed, self._size)
        if not isinstance(self._child, _Counting):
            order = self._child.take(self._size)[order]
        self._order = order
        return order

    @override
    def take(self, count: int) -> Indices:
        order = self._make() if self._order is None else self._order
        start = self._position
        self._position = min(len(order), start + count)
        return order[start : self._position]

    @override
    def skip(self, count: int) -> None:
        self._position = min(self._size, self._position + count)


@final
class _BufferShuffle(_Over):
    """The buffer of `BufferShuffleCursor`, holding row numbers."""

    KEPT = ("drawn",)

    def __init__(self, child: Numbers, seed: int, size: int) -> None:
        super().__init__(child)
        self._draws = BufferDraws(seed)
        self._size = size
        self._buffer: list[int] = []
        self._drawn = 0

    @override
    def take(self, count: int) -> Indices:
        buffer, draws, drawn = self._buffer, self._draws, self._drawn
        # One number refills the buffer before each draw, so exactly these are needed now.
        missing = self._size - len(buffer)
        fresh = self._child.take(missing + count - 1).tolist()
        buffer.extend(fresh[:missing])
        refill = iter(fresh[missing:])
        chosen: list[int] = []
        while buffer:
            place = draws.place(drawn, len(buffer))
            drawn += 1
            chosen.append(buffer[place])
            buffer[place] = buffer[-1]
            buffer.pop()
            if len(chosen) == count:
                break
            number = next(refill, -1)
            if number >= 0:
                buffer.append(number)
        self._drawn = drawn
        return np.array(chosen, dtype=np.int64)

    @override
    def state(self) -> State:
        return {**super().state(), "buffer": torch.tensor(self._buffer, dtype=torch.int64)}

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        self._buffer = state["buffer"].tolist()


@final
class _Repeat(Numbers):
    """One child stream per epoch."""

    KEPT = ("epoch", "empty", "count")

    def __init__(self, node: RepeatNode, frame: CursorContext) -> None:
        self._input = node.input
        self._frame = frame
        self._count = node.count
        self._epoch = 0
        self._empty = True
        self._child = self._open()

    def _open(self) -> Numbers:
        return _open(self._input, self._frame.in_epoch(self._epoch).child())

    @override
    def take(self, count: int) -> Indices:
        pieces: list[Indices] = []
        while count and (self._count is None or self._epoch < self._count):
            piece = self._child.take(count)
            if len(piece):
                self._empty = False
                pieces.append(piece)
                count -= len(piece)
                continue
            if self._empty:
                self._count = self._epoch
                break
            self._epoch += 1
            self._empty = True
            self._child = self._open()
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else _NONE

    @override
    def state(self) -> State:
        return {**super().state(), "child": self._child.state()}

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        self._child = self._open()  # of the epoch just restored
        self._child.restore(state["child"])
