"""Nodes: immutable, picklable descriptions of the steps of an input pipeline.

A node owns no thread, file or counter. `Node.open` returns a `Cursor`, which runs the step.

    Dataset.map(f).batch(2)            (description)        iter()      (running)
    BatchNode ─▶ MapNode ─▶ RangeNode  ─────────────▶  BatchCursor ─▶ MapCursor ─▶ RowsCursor

A transformation is a `Step` (one input) or a `Join` (several inputs) and its cursor class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, final

from typing_extensions import override

from stratagem._data.cursor import Cursor, CursorContext, StepCursor

INFINITE: Final = -1
"""Cardinality of a dataset without end."""

UNKNOWN: Final = -2
"""Cardinality of a dataset whose length is known only after reading it."""


@dataclass(frozen=True, eq=False)
class Node(ABC):
    """Description of one step of a pipeline."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Nodes that this one reads from."""
        return ()

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same step over other inputs."""
        if inputs:
            raise TypeError(f"{type(self).__name__} is a source and takes no inputs")
        return self

    @abstractmethod
    def open(self, context: CursorContext) -> Cursor:
        """Return a new cursor at the beginning."""

    def cardinality(self) -> int:
        """Return the number of elements, `INFINITE` or `UNKNOWN`."""
        return UNKNOWN

    @property
    def rows_per_batch(self) -> int | None:
        """Rows of each batch of columns; `None` if elements are not batches of columns."""
        return None

    @property
    def endless(self) -> bool:
        """True if the elements never end. Reads nothing, unlike `cardinality`."""
        return any(node.endless for node in self.inputs)

    @property
    def rows_vary(self) -> bool:
        """True if the first dimension may differ from element to element."""
        return any(node.rows_vary for node in self.inputs)

    @property
    def replayable(self) -> bool:
        """True if a second cursor of the same context yields the same elements."""
        return all(node.replayable for node in self.inputs)

    @property
    def wants_seed(self) -> bool:
        """True if this step or one before it uses the base seed of the run."""
        return any(node.wants_seed for node in self.inputs)

    @property
    def keeps_rows(self) -> bool:
        """True if a share of the input's rows gives the same share of the output (see autoshard)."""
        return False


def walk(node: Node) -> Iterator[Node]:
    """Yield all nodes of a pipeline, the last step first."""
    yield node
    for each in node.inputs:
        yield from walk(each)


def replaced(node: Node, old: Node, new: Node) -> Node:
    """Return a pipeline with one of its nodes replaced."""
    if node is old:
        return new
    if not node.inputs:
        return node
    return node.with_inputs([replaced(each, old, new) for each in node.inputs])


@dataclass(frozen=True, eq=False)
class Step(Node):
    """Node with one input. By default it has as many elements as its input."""

    CURSOR: ClassVar[type[StepCursor[Any]]]
    """Class of its cursors."""

    input: Node

    def open(self, context: CursorContext) -> Cursor:
        return self.CURSOR(self, context)

    @property
    @final
    @override
    def inputs(self) -> tuple[Node, ...]:
        """The one input."""
        return (self.input,)

    @final
    @override
    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return a copy of this step over another input."""
        (only,) = inputs
        return replace(self, input=only)

    @override
    def cardinality(self) -> int:
        return self.input.cardinality()

    @property
    @override
    def rows_per_batch(self) -> int | None:
        return self.input.rows_per_batch


@dataclass(frozen=True, eq=False)
class SeededStep(Step):
    """Step that draws random numbers, from the user's seed or from the seed of the run."""

    seed: int | None

    @property
    @override
    def wants_seed(self) -> bool:
        return self.seed is None or self.input.wants_seed


@dataclass(frozen=True, eq=False)
class Join(Node):
    """Node with several inputs."""

    CURSOR: ClassVar[type[StepCursor[Any]]]
    """Class of its cursors."""

    members: tuple[Node, ...]

    @final
    def open(self, context: CursorContext) -> Cursor:
        return self.CURSOR(self, context)

    @property
    @final
    @override
    def inputs(self) -> tuple[Node, ...]:
        """All inputs, in order."""
        return self.members

    @final
    @override
    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return a copy of this step over other inputs."""
        return replace(self, members=tuple(inputs))

    def _sizes(self) -> list[int]:
        return [node.cardinality() for node in self.members]
