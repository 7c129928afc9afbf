"""Shuffle and cache: the two steps that hold many elements.

A full shuffle (no buffer size, or one at least as large as the input) is a permutation of the
element numbers, drawn from (seed, epoch); a buffered one draws the place each element leaves from.
Over in-memory sources both run on row numbers alone: see `indexing.py`.
"""

from __future__ import annotations

from typing import Any, final

from typing_extensions import override

from stratagem._data.node import END, INFINITE, Cursor, Frame, Node, State, Step, StepCursor
from stratagem._data.seeds import BufferDraws, permutation


@final
class ShuffleNode(Step):
    """Elements in random order."""

    def __init__(self, input: Node, buffer_size: int | None, seed: int | None, anew: bool) -> None:
        super().__init__(input)
        if buffer_size is None and input.cardinality() == INFINITE:
            raise ValueError(
                "shuffle() without a buffer_size shuffles everything, and this dataset has no end. "
                "Give a buffer_size, or call shuffle() before repeat()."
            )
        self.buffer_size = buffer_size
        self.seed = seed
        self.anew = anew

    @property
    def full(self) -> bool:
        """Whether it is a permutation of everything."""
        size = self.input.cardinality()
        return self.buffer_size is None or 0 <= size <= self.buffer_size

    def order_seed(self, frame: Frame) -> int:
        """The seed of this epoch's order."""
        return frame.seed(self.seed, per_epoch=self.anew)

    @override
    def open(self, frame: Frame) -> Cursor:
        child = self.input.open(frame.child())
        seed = self.order_seed(frame)
        if self.full:
            return FullShuffleCursor(child, seed, replayable=self.input.replayable)
        assert self.buffer_size is not None
        return BufferShuffleCursor(child, seed, self.buffer_size)

    @override
    def cardinality(self) -> int:
        return self.input.cardinality()

    @override
    def spec(self) -> Any:
        return self.input.spec()

    @property
    @override
    def wants_seed(self) -> bool:
        return self.seed is None or self.input.wants_seed

    @property
    @override
    def keeps_rows(self) -> bool:
        return True


@final
class FullShuffleCursor(StepCursor):
    """Reads everything, then yields it by a permutation.

    Its position is one number: the elements are read again on resuming. Only where reading again
    could give others (a loader with a random order of its own) are they kept in the state.
    """

    def __init__(self, child: Cursor, seed: int, *, replayable: bool) -> None:
        super().__init__(child)
        self._seed = seed
        self._replayable = replayable
        self._elements: list[Any] | None = None
        self._order: list[int] = []
        self._position = 0

    def _load(self, elements: list[Any] | None) -> list[Any]:
        if elements is None:
            elements = []
            while (element := self._child.next()) is not END:
                elements.append(element)
            self._child.close()
        self._elements = elements
        self._order = permutation(self._seed, len(elements)).tolist()
        return elements

    @override
    def next(self) -> Any:
        elements = self._load(None) if self._elements is None else self._elements
        if self._position >= len(elements):
            return END
        element = elements[self._order[self._position]]
        self._position += 1
        return element

    @override
    def state(self) -> State:
        keep = self._elements is not None and not self._replayable
        return {
            "position": self._position,
            "elements": list(self._elements or ()) if keep else None,
        }

    @override
    def restore(self, state: State) -> None:
        if state["elements"] is not None:
            self._load(list(state["elements"]))
        self._position = state["position"]


@final
class BufferShuffleCursor(StepCursor):
    """Keeps a buffer full, lets a random one of it go; its state holds the buffer."""

    def __init__(self, child: Cursor, seed: int, size: int) -> None:
        super().__init__(child)
        self._draws = BufferDraws(seed)
        self._size = size
        self._buffer: list[Any] = []
        self._drawn = 0
        self._ended = False

    @override
    def next(self) -> Any:
        buffer = self._buffer
        while not self._ended and len(buffer) < self._size:
            element = self._child.next()
            if element is END:
                self._ended = True
            else:
                buffer.append(element)
        if not buffer:
            return END
        place = self._draws.place(self._drawn, len(buffer))
        self._drawn += 1
        element, buffer[place] = buffer[place], buffer[-1]
        buffer.pop()
        return element

    @override
    def state(self) -> State:
        return {
            "buffer": list(self._buffer),
            "drawn": self._drawn,
            "ended": self._ended,
            "child": self._child.state(),
        }

    @override
    def restore(self, state: State) -> None:
        self._buffer = list(state["buffer"])
        self._drawn, self._ended = state["drawn"], state["ended"]
        self._child.restore(state["child"])


@final
class CacheNode(Step):
    """Elements kept in memory after the first pass; every pass yields what the first one saw."""

    @override
    def open(self, frame: Frame) -> Cursor:
        key = frame.path
        kept = frame.run.caches.get(key)
        if kept is not None:
            return CachedCursor(kept)
        # Opened without the epoch: what is cached must not depend on the epoch that filled it.
        child = self.input.open(frame.without_epoch().child())
        return CachingCursor(child, frame, replayable=self.input.replayable)

    @override
    def cardinality(self) -> int:
        return self.input.cardinality()

    @override
    def spec(self) -> Any:
        return self.input.spec()

    @property
    @override
    def keeps_rows(self) -> bool:
        return True


@final
class CachedCursor(Cursor):
    """Yields kept elements."""

    def __init__(self, elements: list[Any]) -> None:
        self._elements = elements
        self._position = 0

    @override
    def next(self) -> Any:
        if self._position >= len(self._elements):
            return END
        self._position += 1
        return self._elements[self._position - 1]

    @override
    def skip(self, count: int) -> int:
        count = min(count, len(self._elements) - self._position)
        self._position += count
        return count

    @override
    def state(self) -> State:
        return {"position": self._position, "elements": None}

    @override
    def restore(self, state: State) -> None:
        self._position = state["position"]


@final
class CachingCursor(StepCursor):
    """Yields its input and keeps it; hands over to the run's cache when it has seen the end."""

    def __init__(self, child: Cursor, frame: Frame, *, replayable: bool) -> None:
        super().__init__(child)
        self._frame = frame
        self._replayable = replayable
        self._elements: list[Any] = []
        self._position = 0

    @override
    def next(self) -> Any:
        while len(self._elements) <= self._position:
            element = self._child.next()
            if element is END:
                self._frame.run.caches.setdefault(self._frame.path, self._elements)
                self._child.close()
                return END
            self._elements.append(element)
        self._position += 1
        return self._elements[self._position - 1]

    @override
    def state(self) -> State:
        kept = None if self._replayable else list(self._elements)
        return {"position": self._position, "elements": kept, "child": self._child.state()}

    @override
    def restore(self, state: State) -> None:
        self._position = state["position"]
        if state["elements"] is not None:
            self._elements = list(state["elements"])
            self._child.restore(state["child"])
