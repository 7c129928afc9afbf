"""Shuffle and cache: the two steps that hold many elements.

A full shuffle (no buffer size, or one at least as large as the input) is a permutation of the
element numbers, drawn from (seed, epoch); a buffered one draws the place each element leaves from.
Over in-memory sources both run on row numbers alone: see `indexing.py`.
"""

from __future__ import annotations

from typing import Any, final

from typing_extensions import override

from stratagem._data.node import (
    END,
    INFINITE,
    ChoosingStep,
    Cursor,
    CursorContext,
    Node,
    State,
    StepCursor,
)
from stratagem._data.seeds import BufferDraws, permutation


@final
class ShuffleNode(ChoosingStep):
    """Elements in random order."""

    keeps_rows = True

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

    def order_seed(self, frame: CursorContext) -> int:
        """The seed of this epoch's order."""
        return frame.seed(self.seed, per_epoch=self.anew)

    @override
    def open(self, frame: CursorContext) -> Cursor:
        child = self.input.open(frame.child())
        seed = self.order_seed(frame)
        if self.full:
            return FullShuffleCursor(child, seed, replayable=self.input.replayable)
        assert self.buffer_size is not None
        return BufferShuffleCursor(child, seed, self.buffer_size)

    @property
    @override
    def wants_seed(self) -> bool:
        return self.seed is None or self.input.wants_seed


@final
class FullShuffleCursor(StepCursor):
    """Reads everything, then yields it by a permutation.

    Its position is one number: the elements are read again on resuming. Only where reading again
    could give others (a loader with a random order of its own) are they kept in the state.
    """

    KEPT = ("position",)
    PARTS = ()  # its input is read again, from the beginning

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
        return {**super().state(), "elements": list(self._elements or ()) if keep else None}

    @override
    def restore(self, state: State) -> None:
        if state["elements"] is not None:
            self._load(list(state["elements"]))
        super().restore(state)


@final
class BufferShuffleCursor(StepCursor):
    """Keeps a buffer full, lets a random one of it go; its state holds the buffer."""

    KEPT = ("drawn", "ended")

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
        return {**super().state(), "buffer": list(self._buffer)}

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        self._buffer = list(state["buffer"])


@final
class CacheNode(ChoosingStep):
    """Elements kept in memory after the first pass; every pass yields what the first one saw."""

    keeps_rows = True

    @override
    def open(self, frame: CursorContext) -> Cursor:
        key = frame.path
        kept = frame.run.caches.get(key)
        if kept is not None:
            return CachedCursor(kept)
        # Opened without the epoch: what is cached must not depend on the epoch that filled it.
        child = self.input.open(frame.without_epoch().child())
        return CachingCursor(child, frame, replayable=self.input.replayable)


@final
class CachedCursor(Cursor):
    """Yields kept elements."""

    KEPT = ("position",)

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
        return {**super().state(), "elements": None}  # may be restored by a `CachingCursor`


@final
class CachingCursor(StepCursor):
    """Yields its input and keeps it; hands over to the run's cache when it has seen the end."""

    def __init__(self, child: Cursor, frame: CursorContext, *, replayable: bool) -> None:
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
