"""Transformations that select whole elements: take, skip, shard, repeat; and enumerate, with_options.

Shuffle and cache are in `shuffling.py`, batch and unbatch in `batching.py`, steps that use threads in
`parallel.py`, steps with several inputs in `combining.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from typing_extensions import override

from stratagem._data.cursor import (
    END,
    ChainCursor,
    Cursor,
    CursorContext,
    SelectionCursor,
    StepCursor,
)
from stratagem._data.node import INFINITE, UNKNOWN, Step
from stratagem._data.options import Options
from stratagem._data.row_numbers import SelectionStep


@final
class TakeCursor(SelectionCursor["TakeNode"]):
    """Counts elements up to the limit."""

    KEPT = ("taken",)
    _taken = 0

    def take(self, count: int) -> Any:
        limit = self._node.count
        if limit >= 0:
            count = min(count, limit - self._taken)
        if count == 0:
            self.close()
            return self._nothing()
        found = self._child.take(count)
        self._taken += len(found)
        return found


@final
@dataclass(frozen=True, eq=False)
class TakeNode(SelectionStep):
    """First `count` elements; all elements if `count` is negative."""

    CURSOR = TakeCursor
    count: int

    @property
    @override
    def endless(self) -> bool:
        return self.count < 0 and self.input.endless

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count < 0:
            return size
        if size == INFINITE:
            return self.count
        return UNKNOWN if size == UNKNOWN and self.count else min(max(size, 0), self.count)


@final
class SkipCursor(SelectionCursor["SkipNode"]):
    """Skips the first elements when the first one after them is read."""

    KEPT = ("skipped",)
    _skipped = False

    def take(self, count: int) -> Any:
        if self._node.count < 0:
            return self._nothing()
        if not self._skipped:
            self._child.skip(self._node.count)
            self._skipped = True
        return self._child.take(count)


@final
@dataclass(frozen=True, eq=False)
class SkipNode(SelectionStep):
    """Elements after the first `count`; none if `count` is negative."""

    CURSOR = SkipCursor
    count: int

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count < 0:
            return 0
        return size if size < 0 else max(0, size - self.count)


@final
class ShardCursor(SelectionCursor["ShardNode"]):
    """Skips the elements of the other shards, without making them where the input can do that."""

    KEPT = ("begun",)
    _begun = False

    def take(self, count: int) -> Any:
        shards, index = self._node.num_shards, self._node.index
        if self._context.numbers:  # whole rounds, so that every round starts at shard 0
            return self._child.take(count * shards)[index::shards]
        found: list[Any] = []
        while len(found) < count:
            others = shards - 1 if self._begun else index
            if self._child.skip(others) < others or (element := self._child.next()) is END:
                break
            self._begun = True
            found.append(element)
        return found


@final
@dataclass(frozen=True, eq=False)
class ShardNode(SelectionStep):
    """Every `num_shards`-th element, from `index` on; autosharding fills in a hint."""

    CURSOR = ShardCursor
    num_shards: int
    index: int

    @property
    def is_hint(self) -> bool:
        """True if autosharding has to fill in the numbers."""
        return self.num_shards < 0

    @override
    def _open(self, context: CursorContext) -> Cursor:
        # A hint that was not filled in means one worker: the whole dataset.
        return self.input.open(context.child()) if self.is_hint else ShardCursor(self, context)

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size < 0 or self.is_hint:
            return size
        return max(0, -(-(size - self.index) // self.num_shards))


@final
class RepeatCursor(ChainCursor["RepeatNode"]):
    """Opens the input again for every epoch."""

    def _open_at(self, place: int) -> Cursor:
        return self._node.input.open(self._context.in_epoch(place).child())

    def _ends_before(self, place: int) -> bool:
        # An epoch without elements ends the data: repeating it without end would never return.
        return place == self._node.count or (place > 0 and self._empty)


@final
@dataclass(frozen=True, eq=False)
class RepeatNode(SelectionStep):
    """`count` passes over the input, each one an epoch; without end if `count` is `None`."""

    CURSOR = RepeatCursor
    keeps_rows = True
    count: int | None

    @property
    @override
    def endless(self) -> bool:
        return self.count is None

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count == 0 or size == 0:
            return 0
        if self.count is None:
            return INFINITE
        return size if size < 0 else size * self.count


@final
class EnumerateCursor(StepCursor["EnumerateNode"]):
    """Counts elements."""

    KEPT = ("counted",)
    _counted = 0

    def next(self) -> Any:
        element = self._child.next()
        if element is END:
            return END
        self._counted += 1
        return (torch.tensor(self._node.start + self._counted - 1), element)

    @override
    def skip(self, count: int) -> int:
        done = self._child.skip(count)
        self._counted += done
        return done


@final
@dataclass(frozen=True, eq=False)
class EnumerateNode(Step):
    """Pairs (number, element)."""

    CURSOR = EnumerateCursor
    rows_per_batch = None
    start: int


@final
@dataclass(frozen=True, eq=False)
class OptionsNode(SelectionStep):
    """Elements of the input, with options attached."""

    keeps_rows = True
    options: Options

    @override
    def _open(self, context: CursorContext) -> Cursor:
        return self.input.open(context.child())
