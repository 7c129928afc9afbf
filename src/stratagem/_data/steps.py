"""Steps: what all replicas together take from their pipelines, as nodes.

`distribute_dataset` takes one element a step and cuts it; `distribute_datasets_from_function` takes R
consecutive elements (`DealNode`), or one from each replica's own pipeline (`AbreastNode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from typing_extensions import override

from stratagem._data.node import (
    END,
    INFINITE,
    UNKNOWN,
    Cursor,
    Frame,
    Node,
    State,
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
    def open(self, frame: Frame) -> Cursor:
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
class AbreastNode(Node):
    """Lists with one element of each input; ``None`` for inputs that ended before the longest."""

    def __init__(self, inputs: Sequence[Node]) -> None:
        self._inputs = tuple(inputs)

    @property
    @override
    def inputs(self) -> tuple[Node, ...]:
        return self._inputs

    @override
    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        return AbreastNode(inputs)

    @override
    def open(self, frame: Frame) -> Cursor:
        return AbreastCursor([node.open(frame.child(i)) for i, node in enumerate(self._inputs)])

    @override
    def cardinality(self) -> int:
        sizes = [node.cardinality() for node in self._inputs]
        if INFINITE in sizes:
            return INFINITE
        return UNKNOWN if UNKNOWN in sizes else max(sizes)


@final
class AbreastCursor(Cursor):
    """Ends when all have ended."""

    def __init__(self, cursors: list[Cursor]) -> None:
        self._cursors = cursors

    @override
    def next(self) -> Any:
        row = [cursor.next() for cursor in self._cursors]
        if all(element is END for element in row):
            return END
        return [None if element is END else element for element in row]

    @override
    def state(self) -> State:
        return {"children": [cursor.state() for cursor in self._cursors]}

    @override
    def restore(self, state: State) -> None:
        for cursor, own in zip(self._cursors, state["children"], strict=True):
            cursor.restore(own)

    @override
    def close(self) -> None:
        for cursor in self._cursors:
            cursor.close()
