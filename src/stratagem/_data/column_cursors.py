"""Steps on batches of columns: form new batches, shuffle rows and filter rows.

A node with `rows_per_batch` yields batches of columns. Most steps treat such a batch as one element. The cursors here
are for the steps that work on its rows: batch, shuffle and filter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar, final

import torch
from typing_extensions import override

from stratagem._data import batch_rows, nests
from stratagem._data.calling import UserFunction
from stratagem._data.cursor import END, CursorContext, State, StepCursor
from stratagem._data.node import Node
from stratagem._data.seeds import mix, permutation

ChunkNodeT = TypeVar("ChunkNodeT", bound=Node)


class ChunkCursor(StepCursor[ChunkNodeT]):
    """Cursor that cuts a stream of chunks of rows into batches.

    The position is the position of the current chunk, and the number of its rows that were yielded.
    """

    _offset = 0  # rows of the current chunk that were yielded
    _place: Any = None  # position of the current chunk; `None` before the first chunk

    def __init__(self, node: ChunkNodeT, context: CursorContext) -> None:
        super().__init__(node, context)
        self._pieces: deque[tuple[Any, int]] = deque()  # of the current chunk, with their rows

    @property
    @abstractmethod
    def _size(self) -> int:
        """Rows of a batch."""

    @property
    def _drops_remainder(self) -> bool:
        """True if a last batch with fewer rows is dropped."""
        return False

    @abstractmethod
    def _next_chunk(self) -> tuple[Any, Any, int] | None:
        """Return the position of the next chunk, the chunk and its number of rows; `None` at the end."""

    def _go_to(self, place: Any) -> int:
        """Let `_next_chunk` continue at a position; return how many rows to drop there."""
        raise NotImplementedError

    def _cut(self, chunk: Any, sizes: Sequence[int]) -> list[Any]:
        """Cut a chunk into pieces."""
        return batch_rows.cut(chunk, sizes)

    def _rows_of(self, piece: Any) -> Any:
        """Return a piece as a batch."""
        return piece

    def next(self) -> Any:
        parts: list[Any] = []
        missing = self._size
        while missing and (self._pieces or self._load(missing, 0)):
            piece, rows = self._pieces.popleft()
            parts.append(self._rows_of(piece))
            self._offset += rows
            missing -= rows
        if not parts or (missing and self._drops_remainder):
            return END
        return batch_rows.concatenate(parts, what="batch()")

    def _load(self, first: int, drop: int) -> bool:
        """Read the next chunk, drop rows of it, and cut it into `first` rows and whole batches."""
        while (found := self._next_chunk()) is not None:
            self._place, chunk, rows = found
            self._offset = min(drop, rows)
            drop -= self._offset
            if self._offset:
                chunk = self._cut(chunk, [self._offset, rows - self._offset])[1]
            if self._offset < rows:
                self._keep(chunk, rows - self._offset, first)
                return True
        return False

    def _keep(self, chunk: Any, rows: int, first: int) -> None:
        """Cut a chunk into `first` rows and whole batches."""
        first = min(first, rows)
        whole, rest = divmod(rows - first, self._size)
        sizes = [first, *[self._size] * whole, *[rest] * (rest > 0)]
        pieces = [chunk] if len(sizes) == 1 else self._cut(chunk, sizes)
        self._pieces.extend(zip(pieces, sizes, strict=True))

    @override
    def state(self) -> State:
        return {"place": self._place, "offset": self._offset}

    @override
    def restore(self, state: State) -> None:
        if state["place"] is not None:
            self._load(self._size, self._go_to(state["place"]) + state["offset"])


@final
class RebatchCursor(ChunkCursor[Any]):
    """Cuts batches of columns into batches of another size, for a `BatchNode`.

    The state holds the rows that were read but not yielded.
    """

    @property
    def _size(self) -> int:
        return int(self._node.size)

    @property
    @override
    def _drops_remainder(self) -> bool:
        return bool(self._node.drop_remainder)

    def _next_chunk(self) -> tuple[Any, Any, int] | None:
        while (chunk := self._child.next()) is not END:
            rows = batch_rows.count_rows(chunk, what="a batch to be cut by batch()")
            if rows:
                return None, chunk, rows
        return None

    @override
    def state(self) -> State:
        pieces = [piece for piece, _ in self._pieces]
        rest = batch_rows.concatenate(pieces, what="batch()") if pieces else None
        return {"rest": rest, "children": [self._child.state()]}

    @override
    def restore(self, state: State) -> None:
        self._child.restore(state["children"][0])
        if state["rest"] is not None:
            rows = batch_rows.count_rows(state["rest"], what="a saved batch")
            self._keep(state["rest"], rows, self._size)


@final
class ColumnShuffleCursor(ChunkCursor[Any]):
    """Shuffles rows within windows of `buffer_size` rows, for a `ShuffleNode`.

    The position is the input's position at the beginning of the window, and a count: after resuming, the window is
    read again. So a position is small for any buffer size.
    """

    _windows = 0
    _window: Any = None

    @property
    def _size(self) -> int:
        return int(self._node.rows_per_batch)

    def _next_chunk(self) -> tuple[Any, Any, int] | None:
        place = {"window": self._windows, "child": self._child.state()}
        batches: list[Any] = []
        rows = 0
        wanted = self._node.buffer_size
        while (wanted is None or rows < wanted) and (batch := self._child.next()) is not END:
            batches.append(batch)
            rows += batch_rows.count_rows(batch, what="a batch to be shuffled")
        if rows == 0:
            return None
        self._window = batch_rows.concatenate(batches, what="shuffle()")
        order = permutation(mix(self._node.order_seed(self._context), self._windows), rows)
        self._windows += 1
        return place, torch.from_numpy(order), rows

    @override
    def _go_to(self, place: Any) -> int:
        self._windows = place["window"]
        self._child.restore(place["child"])
        return 0

    @override
    def _cut(self, chunk: Any, sizes: Sequence[int]) -> list[Any]:
        return batch_rows.cut_leaf(chunk, sizes)

    @override
    def _rows_of(self, piece: Any) -> Any:
        return batch_rows.take_rows(self._window, piece)


def keep_rows(batch: Any, mask: Any, function: UserFunction) -> Any:
    """Return the rows of a batch for which a filter function returned true; `END` if there are none."""
    rows = batch_rows.count_rows(batch, what="a batch to be filtered")
    found = torch.as_tensor(mask)
    if found.dtype is not torch.bool or found.shape != (rows,):
        raise ValueError(
            f"the function given to filter(), {function}, returned {nests.describe(found)} for a batch "
            f"of {rows} rows; expected one True or False per row: tensor[{rows}] bool. To keep or drop "
            "single rows by a scalar, call unbatch() first."
        )
    chosen = found.nonzero().flatten()
    if len(chosen) == rows:
        return batch
    return batch_rows.take_rows(batch, chosen) if len(chosen) else END
