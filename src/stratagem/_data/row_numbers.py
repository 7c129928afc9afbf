"""Steps over an in-memory source that only select row numbers.

Between an in-memory source and the first step that needs rows, the steps take, skip, shard, shuffle and
repeat only select row numbers. Their cursors then work on NumPy arrays of numbers (`CursorContext.numbers`),
and `RowsCursor` reads the rows at the end of that chain: one by one, or a batch at once.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from typing_extensions import override

from stratagem._data.cursor import END, Cursor, CursorContext
from stratagem._data.node import Node, Step


@dataclass(frozen=True, eq=False)
class IndexedSource(Node):
    """Source whose rows can be read by number, many at once."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of rows."""

    @abstractmethod
    def gather(self, indices: torch.Tensor) -> Any:
        """Return a batch of the rows at `indices` (int64)."""

    @abstractmethod
    def at(self, index: int) -> Any:
        """Return one row."""

    @override
    @final
    def cardinality(self) -> int:
        return self.size

    @final
    def open(self, context: CursorContext) -> Cursor:
        numbers = CountingCursor(self.size)
        return numbers if context.numbers else RowsCursor(numbers, self)


@dataclass(frozen=True, eq=False)
class SelectionStep(Step):
    """Step that selects and orders elements; over an in-memory source it runs on row numbers."""

    @final
    def open(self, context: CursorContext) -> Cursor:
        source = None if context.numbers else self._row_source()
        if source is None:
            return self._open(context)
        return RowsCursor(self._open(context.with_numbers()), source)

    def _open(self, context: CursorContext) -> Cursor:
        return self.CURSOR(self, context)

    def _row_source(self) -> IndexedSource | None:
        """Return the in-memory source, if all steps between it and this one select rows."""
        node = self.input
        while isinstance(node, SelectionStep):
            node = node.input
        return node if isinstance(node, IndexedSource) else None


@final
class CountingCursor(Cursor):
    """Row numbers of a source, in order."""

    KEPT = ("position",)

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    def next(self) -> Any:
        position = self._position
        if position >= self._size:
            return END
        self._position = position + 1
        return position

    @override
    def take(self, count: int) -> Any:
        start = self._position
        self._position = min(self._size, start + count)
        return np.arange(start, self._position, dtype=np.int64)

    @override
    def skip(self, count: int) -> int:
        count = min(count, self._size - self._position)
        self._position += count
        return count


@final
class RowsCursor(Cursor):
    """Rows of a source at the numbers that another cursor yields."""

    def __init__(self, numbers: Cursor, source: IndexedSource) -> None:
        self._children = (numbers,)
        self._numbers = numbers
        self._source = source

    def next(self) -> Any:
        number = self._numbers.next()
        return END if number is END else self._source.at(int(number))

    def take_batch(self, count: int) -> tuple[Any, int]:
        """Return the next `count` rows as a batch, and how many they are; 0 rows have no batch."""
        numbers = self._numbers.take(count)
        found = len(numbers)
        return (self._source.gather(torch.from_numpy(numbers)) if found else None), found

    @override
    def skip(self, count: int) -> int:
        return self._numbers.skip(count)
