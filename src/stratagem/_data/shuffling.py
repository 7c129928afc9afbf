"""Shuffle and cache: the steps that hold many elements.

Over batches of columns both shuffle rows, see `column_cursors.py`. Else a full shuffle (no buffer size, or one at least as large as the input) is a permutation of the element
numbers, drawn from (seed, epoch). A buffered shuffle draws the buffer place that each element leaves from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from typing_extensions import override

from stratagem._data.column_cursors import ColumnShuffleCursor
from stratagem._data.cursor import END, Cursor, CursorContext, SelectionCursor, State, StepCursor
from stratagem._data.nests import copied
from stratagem._data.node import UNKNOWN, Step
from stratagem._data.row_numbers import CountingCursor, SelectionStep
from stratagem._data.seeds import BufferDraws, permutation


@final
@dataclass(frozen=True, eq=False)
class ShuffleNode(SelectionStep):
    """Elements in random order."""

    keeps_rows = True
    buffer_size: int | None
    seed: int | None
    each_epoch: bool

    def __post_init__(self) -> None:
        if self.buffer_size is None and self.input.endless:
            raise ValueError(
                "shuffle() without a buffer_size shuffles everything, and this dataset has no end. "
                "Give a buffer_size, or call shuffle() before repeat()."
            )

    @override
    def _open(self, context: CursorContext) -> Cursor:
        if self.rows_per_batch is not None:
            return ColumnShuffleCursor(self, context)
        size = self.input.cardinality()
        full = self.buffer_size is None or 0 <= size <= self.buffer_size
        return FullShuffleCursor(self, context) if full else BufferShuffleCursor(self, context)

    @override
    def cardinality(self) -> int:
        # Batches of columns are cut again, so their number is known only if all were full.
        known = self.rows_per_batch is None or not self.input.inputs
        return self.input.cardinality() if known else UNKNOWN

    def order_seed(self, context: CursorContext) -> int:
        """Return the seed of this epoch's order."""
        return context.seed(self.seed, per_epoch=self.each_epoch)

    @property
    @override
    def wants_seed(self) -> bool:
        return self.seed is None or self.input.wants_seed


@final
class FullShuffleCursor(SelectionCursor[ShuffleNode]):
    """Reads all elements, then yields them in the order of a permutation.

    The position is one number: after resuming, the elements are read again. The state holds the elements
    only if reading them again could give others (a loader with a random order of its own).
    """

    KEPT = ("position",)
    _position = 0
    _shuffled: Any = None  # list of elements, or array of row numbers

    def _shuffle(self, elements: Any = None) -> Any:
        if elements is None and self._context.numbers:
            order = permutation(self._order_seed, self._node.input.cardinality())
            # The numbers of a whole source are its order itself: no second array.
            plain = isinstance(self._child, CountingCursor)
            self._shuffled = order if plain else self._child.take(len(order))[order]
        else:
            elements = self._child.take(sys.maxsize) if elements is None else elements
            self._child.close()
            order = permutation(self._order_seed, len(elements))
            self._shuffled = [elements[place] for place in order.tolist()]
        return self._shuffled

    @property
    def _order_seed(self) -> int:
        return self._node.order_seed(self._context)

    def take(self, count: int) -> Any:
        shuffled = self._shuffle() if self._shuffled is None else self._shuffled
        start = self._position
        self._position = min(len(shuffled), start + count)
        return shuffled[start : self._position]

    @override
    def state(self) -> State:
        again = self._shuffled is None or self._node.input.replayable
        return {"position": self._position, "shuffled": None if again else list(self._shuffled)}

    @override
    def restore(self, state: State) -> None:
        self._position = state["position"]
        self._shuffled = state["shuffled"]


@final
class BufferShuffleCursor(SelectionCursor[ShuffleNode]):
    """Keeps a buffer full and yields random places of it; the state holds the buffer."""

    KEPT = ("drawn",)
    _drawn = 0

    def __init__(self, node: ShuffleNode, context: CursorContext) -> None:
        super().__init__(node, context)
        self._draws = BufferDraws(node.order_seed(context))
        self._buffer: list[Any] = []

    def take(self, count: int) -> Any:
        assert self._node.buffer_size is not None
        buffer, draws, drawn = self._buffer, self._draws, self._drawn
        # One element refills the buffer before each draw, so exactly these are needed now.
        missing = self._node.buffer_size - len(buffer)
        taken = self._child.take(missing + count - 1)
        fresh: list[Any] = taken.tolist() if self._context.numbers else list(taken)
        buffer.extend(fresh[:missing])
        refill = iter(fresh[missing:])
        chosen: list[Any] = []
        while buffer:
            place = draws.place(drawn, len(buffer))
            drawn += 1
            chosen.append(buffer[place])
            buffer[place] = buffer[-1]
            buffer.pop()
            if len(chosen) == count:
                break
            item = next(refill, END)
            if item is not END:
                buffer.append(item)
        self._drawn = drawn
        return np.array(chosen, dtype=np.int64) if self._context.numbers else chosen

    @override
    def state(self) -> State:
        numbers = self._context.numbers
        held = torch.tensor(self._buffer, dtype=torch.int64) if numbers else list(self._buffer)
        return {**super().state(), "buffer": held}

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        held = state["buffer"]
        self._buffer = held.tolist() if self._context.numbers else list(held)


@final
class CacheCursor(StepCursor["CacheNode"]):
    """Reads and keeps elements in the first epoch, yields the kept ones in later epochs.

    The position is one number, as for `FullShuffleCursor`.
    """

    _position = 0

    def __init__(self, node: CacheNode, context: CursorContext) -> None:
        super().__init__(node, context)
        kept = context.run.caches.get(context.path)
        self._complete = kept is not None
        self._elements: list[Any] = kept or []

    @override
    def _open_inputs(self) -> Sequence[Cursor]:
        # Always epoch 0: the kept elements must not depend on the epoch that reads them.
        return [self._node.input.open(replace(self._context, epoch=0).child())]

    def next(self) -> Any:
        while len(self._elements) <= self._position:
            if self._complete:
                return END
            element = self._child.next()
            if element is END:
                self._keep()
            else:
                self._elements.append(element)
        self._position += 1
        # A copy: later epochs must not see what the program writes into an element.
        return copied(self._elements[self._position - 1])

    def _keep(self) -> None:
        self._complete = True
        self._context.run.caches.setdefault(self._context.path, self._elements)
        self.close()

    @override
    def state(self) -> State:
        state: State = {"position": self._position, "elements": None}
        if not self._node.input.replayable:
            state.update(elements=list(self._elements), complete=self._complete, **super().state())
        return state

    @override
    def restore(self, state: State) -> None:
        self._position = state["position"]
        if state["elements"] is not None:
            self._elements = list(state["elements"])
            if state["complete"]:
                self._keep()
            else:
                super().restore(state)


@final
@dataclass(frozen=True, eq=False)
class CacheNode(Step):
    """Elements kept in memory: every epoch yields those of the first one."""

    CURSOR = CacheCursor
    keeps_rows = True
