"""Batch and unbatch: rows to batches, and back."""

from __future__ import annotations

from typing import Any, final

from typing_extensions import override

from stratagem._data import indexing, nests, specs
from stratagem._data.node import END, UNKNOWN, Cursor, CursorContext, Node, State, Step, StepCursor


@final
class BatchNode(Step):
    """`size` consecutive elements stacked; the last batch may be smaller."""

    def __init__(self, input: Node, size: int, drop_remainder: bool) -> None:
        super().__init__(input)
        self.size = size
        self.drop_remainder = drop_remainder

    @override
    def open(self, frame: CursorContext) -> Cursor:
        fused = indexing.open_rows(self.input, frame.child()) if frame.run.fuse else None
        if fused is not None:
            return FusedBatchCursor(fused, self.size, self.drop_remainder)
        return BatchCursor(self.input.open(frame.child()), self.size, self.drop_remainder)

    @override
    def cardinality(self) -> int:
        rows = self.input.cardinality()
        if rows < 0:
            return rows
        return rows // self.size if self.drop_remainder else -(-rows // self.size)

    @override
    def spec(self) -> Any:
        spec = self.input.spec()
        if spec is None:
            return None
        return specs.with_rows(spec, self.size if self.drop_remainder else None)

    @property
    @override
    def rows_vary(self) -> bool:
        return not self.drop_remainder

    @property
    @override
    def keeps_rows(self) -> bool:
        # A remainder dropped by each worker would be more than the one the user agreed to.
        return not self.drop_remainder


@final
class BatchCursor(StepCursor):
    """Pulls elements one by one."""

    def __init__(self, child: Cursor, size: int, drop_remainder: bool) -> None:
        super().__init__(child)
        self._size = size
        self._drop = drop_remainder

    @override
    def next(self) -> Any:
        elements: list[Any] = []
        while len(elements) < self._size:
            element = self._child.next()
            if element is END:
                if self._drop or not elements:
                    return END
                break
            elements.append(element)
        return nests.stack(elements)


@final
class FusedBatchCursor(Cursor):
    """Whole batches by index arithmetic: row numbers first, then one gather per leaf."""

    def __init__(self, rows: indexing.Rows, size: int, drop_remainder: bool) -> None:
        self._rows = rows
        self._size = size
        self._drop = drop_remainder

    @override
    def next(self) -> Any:
        indices = self._rows.numbers.take(self._size)
        if len(indices) == 0 or (self._drop and len(indices) < self._size):
            return END
        return self._rows.gather(indices)

    @override
    def skip(self, count: int) -> int:
        for done in range(count):
            found = len(self._rows.numbers.take(self._size))
            if found == 0 or (self._drop and found < self._size):
                return done
        return count

    @override
    def state(self) -> State:
        return {"rows": self._rows.numbers.state()}

    @override
    def restore(self, state: State) -> None:
        self._rows.numbers.restore(state["rows"])


@final
class UnbatchNode(Step):
    """The rows of each element, one by one."""

    keeps_rows = True
    rows_vary = False

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return UnbatchCursor(self.input.open(frame.child()))

    @override
    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN

    @override
    def spec(self) -> Any:
        spec = self.input.spec()
        return None if spec is None else specs.of_rows(spec)


@final
class UnbatchCursor(StepCursor):
    """Holds the batch it is in; so does its state."""

    def __init__(self, child: Cursor) -> None:
        super().__init__(child)
        self._batch: Any = None
        self._rows = 0
        self._row = 0

    @override
    def next(self) -> Any:
        while self._row >= self._rows:
            self._batch = None
            element = self._child.next()
            if element is END:
                return END
            self._begin(element, 0)
        self._row += 1
        return nests.row(self._batch, self._row - 1)

    def _begin(self, batch: Any, row: int) -> None:
        self._rows = nests.count_rows(batch, what="the element given to unbatch()")
        self._batch, self._row = batch, row

    @override
    def state(self) -> State:
        return {**super().state(), "batch": self._batch, "row": self._row}

    @override
    def restore(self, state: State) -> None:
        if state["batch"] is not None:
            self._begin(state["batch"], state["row"])
        super().restore(state)
