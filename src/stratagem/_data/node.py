"""The two contracts of the pipeline: `Node` describes a step, `Cursor` runs it.

A `Node` is an immutable, picklable description; it owns no thread, file or counter. Opening it with
a `Frame` gives a `Cursor`, which is one running position: it yields elements, tells its state, takes
a state back, and closes what it opened. Sources, transformations and adapters implement both.

    Dataset.map(f).batch(2)            (description)        iter()      (running)
    BatchNode ─▶ MapNode ─▶ RangeNode  ─────────────▶  BatchCursor ─▶ MapCursor ─▶ NumberedCursor

What many share is here too: a new step is a `Step` (or `ChoosingStep`) with a `StepCursor`, or a
`Join` with a `JoinCursor` or `ChainCursor`, and holds only what is its own.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, final

from typing_extensions import override

from stratagem._data.seeds import mix

INFINITE: Final = -1
"""Cardinality of a dataset without end."""

UNKNOWN: Final = -2
"""Cardinality of a dataset whose length only reading it tells."""

State = dict[str, Any]
"""A cursor's position: plain dicts, lists, numbers, text and tensors, so that torch.save takes it."""


@final
class _End:
    """The type of `END`."""

    __slots__ = ()

    @override
    def __repr__(self) -> str:
        return "END"


END: Final = _End()
"""What a cursor returns after its last element. A value, not StopIteration, so that a StopIteration
escaping from a user's function can never end a dataset silently."""


@dataclass(frozen=True)
class Skipped:
    """One record that ``on_error="skip"`` passed over.

    Attributes:
        path: the file.
        record: number of the record in it, from 0; -1 when the file could not be opened.
        reason: why it could not be read.

    Example:
        >>> from stratagem.data import Skipped
        >>> Skipped(path="a.csv", record=3, reason="2 fields instead of 3").record
        3
    """

    path: str
    record: int
    reason: str


@dataclass(slots=True)
class PipelineRun:
    """What all cursors of one iterator share.

    Attributes:
        base_seed: seed of everything that was given no seed of its own.
        caches: elements kept by `cache()`, by place in the pipeline; outlives the iterator so that
            the next epoch finds them.
        skipped: records passed over.
        fuse: whether in-memory chains run by index arithmetic; tests turn it off to compare.
    """

    base_seed: int
    caches: dict[int, list[Any]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    fuse: bool = True


@dataclass(frozen=True, slots=True)
class CursorContext:
    """Where a cursor stands: in which run, place of the pipeline, and epoch."""

    run: PipelineRun
    path: int = 0
    epoch: int = 0

    def child(self, place: int = 0) -> CursorContext:
        """The frame of the `place`-th input."""
        return CursorContext(self.run, mix(self.path, place + 1), self.epoch)

    def in_epoch(self, number: int) -> CursorContext:
        """The frame of one pass; pass 0 is the frame itself, so the first epochs agree everywhere."""
        return self if number == 0 else CursorContext(self.run, self.path, mix(self.epoch, number))

    def without_epoch(self) -> CursorContext:
        """The frame of something done once for all epochs."""
        return CursorContext(self.run, self.path, 0)

    def seed(self, explicit: int | None, *, per_epoch: bool = True) -> int:
        """The seed for a random step here: from the user's seed, or from the run's."""
        own = mix(self.run.base_seed, self.path) if explicit is None else mix(explicit)
        return mix(own, self.epoch) if per_epoch else own


class Positioned:
    """What tells a position and takes one back, by the names of its attributes.

    A subclass whose position is more than that adds to `state` and `restore`. The keys end up in
    users' checkpoints: a name that changes here makes old ones unreadable.
    """

    KEPT: ClassVar[tuple[str, ...]] = ()
    """Attributes that are saved as they are; named without the underscore."""

    PARTS: ClassVar[tuple[str, ...]] = ()
    """Attributes that have positions of their own; named without the underscore."""

    def state(self) -> State:
        """The position: what `restore` on a fresh one of the same node and frame needs."""
        state = {name: getattr(self, f"_{name}") for name in self.KEPT}
        for name in self.PARTS:
            state[name] = getattr(self, f"_{name}").state()
        return state

    def restore(self, state: State) -> None:
        """Take over a position. Only ever called on one that has yielded nothing yet."""
        for name in self.KEPT:
            setattr(self, f"_{name}", state[name])
        for name in self.PARTS:
            getattr(self, f"_{name}").restore(state[name])


class Cursor(Positioned, ABC):
    """One running position in a pipeline. Used by one thread at a time."""

    @abstractmethod
    def next(self) -> Any:
        """The next element, or `END` (then again `END`)."""

    def skip(self, count: int) -> int:
        """Pass over up to `count` elements; returns how many there were."""
        for done in range(count):
            if self.next() is END:
                return done
        return count

    def close(self) -> None:  # most cursors own nothing
        """Release threads, processes and files; idempotent."""


@final
class NumberedCursor(Cursor):
    """Elements that can be had by number, one after the other."""

    KEPT = ("position",)

    def __init__(self, size: int, at: Callable[[int], Any]) -> None:
        self._size = size
        self._at = at
        self._position = 0

    @override
    def next(self) -> Any:
        position = self._position
        if position >= self._size:
            return END
        element = self._at(position)
        self._position = position + 1
        return element

    @override
    def skip(self, count: int) -> int:
        count = min(count, self._size - self._position)
        self._position += count
        return count


class StepCursor(Cursor):
    """A cursor over one other."""

    PARTS: ClassVar[tuple[str, ...]] = ("child",)

    def __init__(self, child: Cursor) -> None:
        self._child = child

    @override
    def close(self) -> None:
        self._child.close()


class ChainCursor(Cursor):
    """A cursor over others that are opened one after the other, each when it is needed."""

    _child: Cursor | None = None

    @abstractmethod
    def _open(self) -> Cursor:
        """A fresh cursor of the input whose turn it is."""

    @override
    def state(self) -> State:
        state = super().state()
        state["child"] = None if self._child is None else self._child.state()
        return state

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        if state["child"] is not None:
            self._child = self._open()
            self._child.restore(state["child"])

    @override
    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


class JoinCursor(Cursor):
    """A cursor over several others at once."""

    def __init__(self, cursors: Sequence[Cursor]) -> None:
        self._cursors = cursors

    @override
    def state(self) -> State:
        return {**super().state(), "children": [cursor.state() for cursor in self._cursors]}

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        for cursor, own in zip(self._cursors, state["children"], strict=True):
            cursor.restore(own)

    @override
    def close(self) -> None:
        for cursor in self._cursors:
            cursor.close()


class Node(ABC):
    """An immutable description of one step of a pipeline."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes this one reads from."""
        return ()

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """The same step over other inputs (how sharding rewrites a pipeline)."""
        if inputs:
            raise TypeError(f"{type(self).__name__} is a source and takes no inputs")
        return self

    @abstractmethod
    def open(self, frame: CursorContext) -> Cursor:
        """A fresh cursor at the beginning."""

    def cardinality(self) -> int:
        """Number of elements, `INFINITE`, or `UNKNOWN` when only reading them tells."""
        return UNKNOWN

    def spec(self) -> Any:
        """The spec of its elements, or `None` when only reading one tells."""
        return None

    @property
    def rows_vary(self) -> bool:
        """Whether the first dimension of its elements may differ from element to element."""
        return any(node.rows_vary for node in self.inputs)

    @property
    def replayable(self) -> bool:
        """Whether opening it again, same frame, yields the same elements again."""
        return all(node.replayable for node in self.inputs)

    @property
    def wants_seed(self) -> bool:
        """Whether some step may use the run's base seed, being given none of its own."""
        return any(node.wants_seed for node in self.inputs)

    @property
    def keeps_rows(self) -> bool:
        """Whether a share of its input's rows gives that share of its output (see autoshard)."""
        return False


class Step(Node):
    """A node with one input, and as many elements unless it says otherwise."""

    def __init__(self, input: Node) -> None:
        self.input = input

    @property
    @final
    @override
    def inputs(self) -> tuple[Node, ...]:
        """The one input."""
        return (self.input,)

    @final
    @override
    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """A copy of this step over another input."""
        (only,) = inputs
        twin = copy.copy(self)
        twin.input = only
        return twin

    @override
    def cardinality(self) -> int:
        return self.input.cardinality()


class ChoosingStep(Step):
    """A step that leaves elements as they are: it chooses, orders or keeps them."""

    @final
    @override
    def spec(self) -> Any:
        """That of its input."""
        return self.input.spec()


class Join(Node):
    """A node with several inputs."""

    def __init__(self, inputs: Sequence[Node]) -> None:
        self._inputs = tuple(inputs)

    @property
    @final
    @override
    def inputs(self) -> tuple[Node, ...]:
        """All of them, in order."""
        return self._inputs

    @final
    @override
    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """A copy of this step over other inputs."""
        twin = copy.copy(self)
        twin._inputs = tuple(inputs)
        return twin

    def _open_inputs(self, frame: CursorContext) -> list[Cursor]:
        return [node.open(frame.child(place)) for place, node in enumerate(self._inputs)]

    def _sizes(self) -> list[int]:
        return [node.cardinality() for node in self._inputs]
