"""Sources held in memory or made by a function: ranges, tensors, generators.

Files are in `file_source.py`, other people's loaders in `adapters.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol, final, runtime_checkable

import torch
from typing_extensions import override

from stratagem._data import nests, specs
from stratagem._data.node import END, Cursor, CursorContext, Node, NumberedCursor, State
from stratagem.errors import DataError


class IndexedSource(Node):
    """A source whose rows can be had by number, many at once: what index arithmetic runs over."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of rows."""

    @abstractmethod
    def gather(self, indices: torch.Tensor) -> Any:
        """A batch of the rows at `indices` (int64)."""

    @abstractmethod
    def at(self, index: int) -> Any:
        """One row."""

    @override
    @final
    def cardinality(self) -> int:
        return self.size

    @override
    @final
    def open(self, frame: CursorContext) -> Cursor:
        return NumberedCursor(self.size, self.at)


@final
class RangeNode(IndexedSource):
    """Integers from start to stop."""

    def __init__(self, values: range) -> None:
        self._values = values

    @property
    @override
    def size(self) -> int:
        return len(self._values)

    @override
    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        return indices * self._values.step + self._values.start

    @override
    def at(self, index: int) -> torch.Tensor:
        return torch.tensor(self._values[index])

    @override
    def spec(self) -> specs.TensorSpec:
        return specs.TensorSpec((), torch.int64)


@final
class SlicesNode(IndexedSource):
    """The rows of a nest of arrays of one length."""

    def __init__(self, columns: Any) -> None:
        self._columns = nests.to_columns(columns)
        self._size = nests.count_rows(self._columns, what="what from_tensor_slices was given")

    @property
    @override
    def size(self) -> int:
        return self._size

    @override
    def gather(self, indices: torch.Tensor) -> Any:
        return nests.take_rows(self._columns, indices)

    @override
    def at(self, index: int) -> Any:
        return nests.row(self._columns, index)

    @override
    def spec(self) -> Any:
        if self._size == 0:
            return specs.of_rows(specs.spec_of(self._columns))
        return specs.spec_of(self.at(0))


@final
class TensorsNode(Node):
    """One element."""

    def __init__(self, element: Any) -> None:
        self._element = nests.to_columns(element)

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return IteratorCursor(lambda: iter([self._element]), "from_tensors")

    @override
    def cardinality(self) -> int:
        return 1

    @override
    def spec(self) -> Any:
        return specs.spec_of(self._element)


@runtime_checkable
class Stateful(Protocol):
    """An iterator or loader that tells and takes its own position."""

    def state_dict(self) -> dict[str, Any]:
        """Its position."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go to a position."""


@final
class GeneratorNode(Node):
    """Elements of the iterable a function returns; the function is called anew each epoch."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not callable(fn):
            raise TypeError(
                f"from_generator expects a function that returns an iterable, got {fn!r}. "
                "Pass the generator function itself, not the generator it returns."
            )
        self._fn = fn
        self._args = args

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return IteratorCursor(self._begin, f"from_generator({self._fn!r})")

    def _begin(self) -> Iterator[Any]:
        made = self._fn(*self._args)
        try:
            return iter(made)
        except TypeError:
            raise TypeError(
                f"the function given to from_generator returned {type(made).__name__} {made!r:.60}, "
                "which cannot be iterated. Use yield, or return an iterable of elements."
            ) from None


@final
class IteratorCursor(Cursor):
    """Elements of a Python iterator; a position is their count, or the iterator's own state."""

    def __init__(self, begin: Callable[[], Iterator[Any]], what: str) -> None:
        self._begin = begin
        self._what = what
        self._iterator: Any = None
        self._position = 0
        self._ended = False

    @override
    def next(self) -> Any:
        if self._ended:
            return END
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            value = next(self._iterator)
        except StopIteration:
            self._ended = True
            self.close()
            return END
        self._position += 1
        # Copied: user code may hand out one array again and again, and elements are read ahead.
        return nests.copied(nests.to_element(value))

    @override
    def state(self) -> State:
        state: State = {"position": self._position, "ended": self._ended}
        if isinstance(self._iterator, Stateful):
            state["own"] = self._iterator.state_dict()
        return state

    @override
    def restore(self, state: State) -> None:
        self._ended = state["ended"]
        if self._ended or state["position"] == 0:
            return
        self._iterator = self._begin()
        if "own" in state and isinstance(self._iterator, Stateful):
            self._iterator.load_state_dict(state["own"])
            self._position = state["position"]
            return
        found = self.skip(state["position"])
        if found < state["position"]:
            raise DataError(
                f"{self._what} yielded only {found} elements, but the saved position is after "
                f"{state['position']}: it is not the source the position was taken from."
            )

    def resume(self, iterator: Iterator[Any], position: int) -> None:
        """Go on with an iterator that was brought to its position by other means."""
        self._iterator, self._position = iterator, position

    @override
    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, Closable):
            iterator.close()


@runtime_checkable
class Closable(Protocol):
    """Something to close, such as a generator whose ``finally`` should run now."""

    def close(self) -> None:
        """Release what it holds."""
