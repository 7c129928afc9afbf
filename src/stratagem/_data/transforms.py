"""Transformations that keep elements whole: take, skip, shard, repeat, filter, enumerate, options.

Shuffle and cache are in `shuffling.py`, batch and unbatch in `batching.py`, what runs in threads
in `parallel.py`, what has several inputs in `combining.py`.
"""

from __future__ import annotations

from typing import Any, final

import torch
from typing_extensions import override

from stratagem._data.node import (
    END,
    INFINITE,
    UNKNOWN,
    ChainCursor,
    ChoosingStep,
    Cursor,
    CursorContext,
    Node,
    Step,
    StepCursor,
)
from stratagem._data.options import Options


@final
class TakeNode(ChoosingStep):
    """The first `count` elements; all of them when `count` is negative."""

    def __init__(self, input: Node, count: int) -> None:
        super().__init__(input)
        self.count = count

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return TakeCursor(self.input.open(frame.child()), self.count)

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count < 0:
            return size
        if size == INFINITE:
            return self.count
        return UNKNOWN if size == UNKNOWN and self.count else min(max(size, 0), self.count)


@final
class TakeCursor(StepCursor):
    """Counts down."""

    KEPT = ("left",)

    def __init__(self, child: Cursor, count: int) -> None:
        super().__init__(child)
        self._left = count

    @override
    def next(self) -> Any:
        if self._left == 0:
            self._child.close()
            return END
        element = self._child.next()
        if element is END:
            self._left = 0
        elif self._left > 0:
            self._left -= 1
        return element


@final
class SkipNode(ChoosingStep):
    """Everything after the first `count` elements; nothing when `count` is negative."""

    def __init__(self, input: Node, count: int) -> None:
        super().__init__(input)
        self.count = count

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return SkipCursor(self.input.open(frame.child()), self.count)

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count < 0:
            return 0
        return size if size < 0 else max(0, size - self.count)


@final
class SkipCursor(StepCursor):
    """Skips when first asked."""

    KEPT = ("count",)

    def __init__(self, child: Cursor, count: int) -> None:
        super().__init__(child)
        self._count = count

    @override
    def next(self) -> Any:
        if self._count < 0:
            return END
        if self._count:
            self._child.skip(self._count)
            self._count = 0
        return self._child.next()


@final
class ShardNode(ChoosingStep):
    """Every `num_shards`-th element, from `index` on; a *hint* is filled in by autosharding."""

    def __init__(self, input: Node, num_shards: int, index: int) -> None:
        super().__init__(input)
        self.num_shards = num_shards
        self.index = index

    @property
    def is_hint(self) -> bool:
        """Whether it waits for the number of workers."""
        return self.num_shards < 0

    @override
    def open(self, frame: CursorContext) -> Cursor:
        child = self.input.open(frame.child())
        # A hint nobody filled in means one worker: the whole dataset.
        return child if self.is_hint else ShardCursor(child, self.num_shards, self.index)

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size < 0 or self.is_hint:
            return size
        return max(0, -(-(size - self.index) // self.num_shards))


@final
class ShardCursor(StepCursor):
    """Passes over the others' elements without making them, where the input can."""

    KEPT = ("ahead",)

    def __init__(self, child: Cursor, num_shards: int, index: int) -> None:
        super().__init__(child)
        self._gap = num_shards - 1
        self._ahead = index

    @override
    def next(self) -> Any:
        if self._child.skip(self._ahead) < self._ahead:
            return END
        self._ahead = self._gap
        return self._child.next()


@final
class RepeatNode(ChoosingStep):
    """`count` passes, each its own epoch; without end when `count` is `None`."""

    keeps_rows = True

    def __init__(self, input: Node, count: int | None) -> None:
        super().__init__(input)
        self.count = count

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return RepeatCursor(self.input, frame, self.count)

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count == 0 or size == 0:
            return 0
        if self.count is None:
            return INFINITE
        return size if size < 0 else size * self.count


@final
class RepeatCursor(ChainCursor):
    """Opens its input anew for each epoch."""

    KEPT = ("epoch", "empty", "count")

    def __init__(self, input: Node, frame: CursorContext, count: int | None) -> None:
        self._input = input
        self._frame = frame
        self._count = count
        self._epoch = 0
        self._empty = True

    @override
    def _open(self) -> Cursor:
        return self._input.open(self._frame.in_epoch(self._epoch).child())

    @override
    def next(self) -> Any:
        while self._count is None or self._epoch < self._count:
            if self._child is None:
                self._child = self._open()
            element = self._child.next()
            if element is not END:
                self._empty = False
                return element
            self.close()
            if self._empty:  # a pass without elements: repeating it without end would hang
                self._count = self._epoch
                break
            self._epoch += 1
            self._empty = True
        return END


@final
class EnumerateNode(Step):
    """Pairs (number, element)."""

    def __init__(self, input: Node, start: int) -> None:
        super().__init__(input)
        self._start = start

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return EnumerateCursor(self.input.open(frame.child()), self._start)


@final
class EnumerateCursor(StepCursor):
    """Counts up."""

    KEPT = ("number",)

    def __init__(self, child: Cursor, start: int) -> None:
        super().__init__(child)
        self._number = start

    @override
    def next(self) -> Any:
        element = self._child.next()
        if element is END:
            return END
        number = torch.tensor(self._number)
        self._number += 1
        return (number, element)

    @override
    def skip(self, count: int) -> int:
        done = self._child.skip(count)
        self._number += done
        return done


@final
class OptionsNode(ChoosingStep):
    """Its input, with options attached."""

    keeps_rows = True

    def __init__(self, input: Node, options: Options) -> None:
        super().__init__(input)
        self.options = options

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return self.input.open(frame.child())
