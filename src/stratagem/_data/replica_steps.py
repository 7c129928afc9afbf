"""Steps: what all replicas together take from their pipelines, as nodes.

`distribute_dataset` takes one element a step and cuts it; `distribute_datasets_from_function` takes R
consecutive elements (`DealNode`), or one from each replica's own pipeline (`AbreastNode`).
"""

from __future__ import annotations

from typing import Any, final

from typing_extensions import override

from stratagem._data.node import (
    END,
    INFINITE,
    UNKNOWN,
    Cursor,
    CursorContext,
    Join,
    JoinCursor,
    Node,
    Step,
    StepCursor,
)


@final
class DealNode(Step):
    """Lists of `replicas` consecutive elements; the last one may be shorter."""

    def __init__(self, input: Node, replicas: int) -> None:
        super().__init__(input)
        self._replicas = replicas

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return DealCursor(self.input.open(frame.child()), self._replicas)

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size < 0 else -(-size // self._replicas)


@final
class DealCursor(StepCursor):
    """Deals elements like cards."""

    def __init__(self, child: Cursor, replicas: int) -> None:
        super().__init__(child)
        self._replicas = replicas

    @override
    def next(self) -> Any:
        dealt: list[Any] = []
        while len(dealt) < self._replicas and (element := self._child.next()) is not END:
            dealt.append(element)
        return dealt or END


@final
class AbreastNode(Join):
    """Lists with one element of each input; ``None`` for inputs that ended before the longest."""

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return AbreastCursor(self._open_inputs(frame))

    @override
    def cardinality(self) -> int:
        sizes = self._sizes()
        if INFINITE in sizes:
            return INFINITE
        return UNKNOWN if UNKNOWN in sizes else max(sizes)


@final
class AbreastCursor(JoinCursor):
    """Ends when all have ended."""

    @override
    def next(self) -> Any:
        row = [cursor.next() for cursor in self._cursors]
        if all(element is END for element in row):
            return END
        return [None if element is END else element for element in row]
