"""Batch and unbatch: rows to batches and back (`column_cursors.py` has batches of columns)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from stratagem._data import batch_rows
from stratagem._data.column_cursors import RebatchCursor
from stratagem._data.cursor import END, Cursor, CursorContext, StepCursor
from stratagem._data.node import UNKNOWN, Step
from stratagem._data.row_numbers import RowsCursor


@final
class BatchCursor(StepCursor["BatchNode"]):
    """Stacks elements; over an in-memory source it gathers whole batches by row number."""

    def __init__(self, node: BatchNode, context: CursorContext) -> None:
        super().__init__(node, context)
        self._rows = self._child if isinstance(self._child, RowsCursor) else None

    def next(self) -> Any:
        if self._rows is not None:
            batch, found = self._rows.take_batch(self._node.size)
            return END if self._too_few(found) else batch
        elements = self._child.take(self._node.size)
        return END if self._too_few(len(elements)) else batch_rows.stack(elements)

    def _too_few(self, found: int) -> bool:
        return found == 0 or (self._node.drop_remainder and found < self._node.size)

    @override
    def skip(self, count: int) -> int:
        for done in range(count):
            if self._too_few(self._child.skip(self._node.size)):
                return done
        return count


@final
@dataclass(frozen=True, eq=False)
class BatchNode(Step):
    """`size` consecutive elements stacked; the last batch may be smaller."""

    CURSOR = BatchCursor
    size: int
    drop_remainder: bool

    @override
    def open(self, context: CursorContext) -> Cursor:
        columns = self.rows_per_batch is not None
        return RebatchCursor(self, context) if columns else BatchCursor(self, context)

    @property
    @override
    def rows_per_batch(self) -> int | None:
        return None if self.input.rows_per_batch is None else self.size

    @override
    def cardinality(self) -> int:
        rows = self.input.cardinality()
        if self.rows_per_batch is not None and rows > 0:
            return UNKNOWN
        if rows < 0:
            return rows
        return rows // self.size if self.drop_remainder else -(-rows // self.size)

    @property
    @override
    def rows_vary(self) -> bool:
        return not self.drop_remainder

    @property
    @override
    def keeps_rows(self) -> bool:
        # If every worker dropped a remainder, more rows would be lost than the user agreed to.
        return not self.drop_remainder


@final
class UnbatchCursor(StepCursor["UnbatchNode"]):
    """Yields the rows of one batch after the other; the state holds the current batch."""

    KEPT = ("batch", "rows", "row")
    _batch: Any = None
    _rows = 0  # rows of the current batch
    _row = 0  # next of them

    def next(self) -> Any:
        while self._row >= self._rows:
            self._batch, self._rows = None, 0
            element = self._child.next()
            if element is END:
                return END
            self._rows = batch_rows.count_rows(element, what="the element given to unbatch()")
            self._batch, self._row = element, 0
        self._row += 1
        return batch_rows.row(self._batch, self._row - 1)


@final
@dataclass(frozen=True, eq=False)
class UnbatchNode(Step):
    """Rows of each element, one by one."""

    CURSOR = UnbatchCursor
    keeps_rows = True
    rows_per_batch = None
    rows_vary = False

    @override
    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN
