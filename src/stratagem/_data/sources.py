"""Sources in memory and from functions: ranges, tensors, iterables, generators.

Files are in `file_source.py`, loaders of other libraries in `adapters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, final, runtime_checkable

import torch
from typing_extensions import override

from stratagem._data import batch_rows, nests
from stratagem._data.cursor import END, Cursor, CursorContext, State
from stratagem._data.node import UNKNOWN, Node
from stratagem._data.row_numbers import IndexedSource
from stratagem.errors import DataError


@final
@dataclass(frozen=True, eq=False)
class RangeNode(IndexedSource):
    """Integers from start to stop."""

    values: range

    @property
    def size(self) -> int:
        return len(self.values)

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        return indices * self.values.step + self.values.start

    def at(self, index: int) -> torch.Tensor:
        return torch.tensor(self.values[index])


@final
@dataclass(frozen=True, eq=False)
class SlicesNode(IndexedSource):
    """Rows of a nest of arrays of one length."""

    columns: Any

    @staticmethod
    def of(columns: Any) -> SlicesNode:
        """Return the node of a user's nest of arrays."""
        return SlicesNode(nests.to_columns(columns))

    def __post_init__(self) -> None:
        _ = self.size  # refuse columns of different lengths now

    @cached_property
    def size(self) -> int:
        return batch_rows.count_rows(self.columns, what="the argument of from_tensor_slices")

    def gather(self, indices: torch.Tensor) -> Any:
        return batch_rows.take_rows(self.columns, indices)

    def at(self, index: int) -> Any:
        return batch_rows.row(self.columns, index)


@final
@dataclass(frozen=True, eq=False)
class SizedNode(IndexedSource):
    """Rows of an object with a length that are read by number.

    Attributes:
        source: the object.
        reads_many: whether ``source[[3, 1]]`` returns these rows as columns.
    """

    source: Any
    reads_many: bool = False

    @property
    def size(self) -> int:
        return len(self.source)

    def at(self, index: int) -> Any:
        return nests.to_element(self.source[index])

    def gather(self, indices: torch.Tensor) -> Any:
        if self.reads_many:
            return nests.to_columns(self.source[indices.tolist()])
        return batch_rows.stack([self.at(index) for index in indices.tolist()])


@final
@dataclass(frozen=True, eq=False)
class IterableNode(Node):
    """Elements of an object that can be iterated again and again."""

    source: Iterable[Any]

    def open(self, context: CursorContext) -> Cursor:
        return IterableCursor(lambda: iter(self.source), type(self.source).__name__)

    @override
    def cardinality(self) -> int:
        return len(self.source) if isinstance(self.source, list) else UNKNOWN


@final
@dataclass(frozen=True, eq=False)
class GeneratorNode(Node):
    """Elements of the iterable that a function returns; every epoch calls the function again."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"from_generator expects a function that returns an iterable, got {self.function!r}. "
                "Pass the generator function itself, not the generator it returns."
            )

    def open(self, context: CursorContext) -> Cursor:
        return IterableCursor(self._begin, f"from_generator({self.function!r})")

    def _begin(self) -> Iterator[Any]:
        made = self.function(*self.args)
        try:
            return iter(made)
        except TypeError:
            raise TypeError(
                f"the function given to from_generator returned {type(made).__name__} {made!r:.60}, "
                "which cannot be iterated. Use yield, or return an iterable of elements."
            ) from None


@runtime_checkable
class Stateful(Protocol):
    """Iterator or loader with a position of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go to a position."""


@runtime_checkable
class Seekable(Protocol):
    """Iterator with a position of its own, under the names that grain uses."""

    def get_state(self) -> Any:
        """Return the position."""

    def set_state(self, state: Any, /) -> None:
        """Go to a position."""


@runtime_checkable
class Closable(Protocol):
    """Object to close, such as a generator whose ``finally`` should run now."""

    def close(self) -> None:
        """Release resources."""


class IteratorCursor(Cursor):
    """Elements of a Python iterator.

    The position is the number of elements read, and the position of the iterator itself if it has one.

    Args:
        begin: returns a new iterator.
        what: name of the source in error messages.
    """

    KEPT = ("position", "ended")
    _position = 0
    _ended = False
    _iterator: Any = None

    def __init__(self, begin: Callable[[], Iterator[Any]], what: str) -> None:
        self._start = begin
        self._what = what

    def _begin(self) -> Iterator[Any]:
        return self._start()

    def _randomness(self) -> AbstractContextManager[object]:
        """Return a context that the next element is read in."""
        return nullcontext()

    def _own_position(self) -> Any:
        """Return the position of the iterator itself, or `None`."""
        if isinstance(self._iterator, Stateful):
            return self._iterator.state_dict()
        return self._iterator.get_state() if isinstance(self._iterator, Seekable) else None

    def _go_to(self, own: Any) -> bool:
        """Bring the iterator to a position of its own; return whether it has such positions."""
        if isinstance(self._iterator, Stateful):
            self._iterator.load_state_dict(own)
        elif isinstance(self._iterator, Seekable):
            self._iterator.set_state(own)
        else:
            return False
        return True

    def next(self) -> Any:
        if self._ended:
            return END
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            with self._randomness():
                value = next(self._iterator)
        except StopIteration:
            self._ended = True
            self.close()
            return END
        self._position += 1
        return nests.to_element(value)

    @override
    def state(self) -> State:
        return {**super().state(), "own": self._own_position()}

    @override
    def restore(self, state: State) -> None:
        self._ended = state["ended"]
        position, own = state["position"], state["own"]
        if self._ended or (position == 0 and own is None):
            return
        self._iterator = self._begin()
        if own is not None and self._go_to(own):
            self._position = position
        elif (found := self.skip(position)) < position:
            raise DataError(
                f"{self._what} yielded only {found} elements, but the saved position is after "
                f"{position}: this is not the source that the position was taken from."
            )

    @override
    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, Closable):
            iterator.close()


@final
class IterableCursor(IteratorCursor):
    """Elements of an iterable of the user."""

    @override
    def next(self) -> Any:
        # Copied: user code may yield the same array every time, and elements are read ahead.
        return nests.copied(super().next())
