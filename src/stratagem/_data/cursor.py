"""Cursors: running positions in an input pipeline.

A `Cursor` yields elements, returns its position, takes a position back, and closes what it opened. `Cursor`
holds everything that cursors have in common; a cursor of one transformation defines `next` (or `take`) and
names the attributes that make up its position. Cursors are opened by nodes, see `node.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar, final

import numpy as np
from typing_extensions import override

from stratagem._data.seeds import mix

if TYPE_CHECKING:
    from stratagem._data.node import Node

State = dict[str, Any]
"""Position of a cursor: dicts, lists, numbers, text and tensors only, so that torch.save accepts it."""


@final
class _EndOfInput:
    """Type of `END`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "END"


END: Final = _EndOfInput()
"""Value that a cursor returns after its last element. It is a value and not StopIteration, so that a
StopIteration raised by a user's function can never end a dataset silently."""


@dataclass(frozen=True)
class Skipped:
    """One record that ``on_error="skip"`` skipped.

    Attributes:
        path: file of the record.
        record: number of the record in the file, from 0; -1 if the file could not be opened.
        reason: why the record could not be read.

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
    """Data shared by all cursors of one iterator.

    Attributes:
        base_seed: seed of every random step that has no seed of its own.
        caches: elements kept by `cache()`, by the step's place in the pipeline. The dataset keeps this dict
            for its next epoch.
        skipped: records skipped so far.
    """

    base_seed: int
    caches: dict[int, list[Any]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CursorContext:
    """Run, place in the pipeline and epoch of a cursor.

    Attributes:
        run: data shared with the other cursors of the iterator.
        path: identifies the node's place in the pipeline.
        epoch: identifies the pass over the data.
        numbers: whether the cursor yields row numbers instead of rows, see `row_numbers.py`.
    """

    run: PipelineRun
    path: int = 0
    epoch: int = 0
    numbers: bool = False

    def child(self, place: int = 0) -> CursorContext:
        """Return the context of input number `place`."""
        return replace(self, path=mix(self.path, place + 1))

    def in_epoch(self, number: int) -> CursorContext:
        """Return the context of one pass; pass 0 has the context of the step itself."""
        return self if number == 0 else replace(self, epoch=mix(self.epoch, number))

    def with_numbers(self) -> CursorContext:
        """Return the same context for a cursor of row numbers."""
        return replace(self, numbers=True)

    def seed(self, explicit: int | None, *, per_epoch: bool = True) -> int:
        """Return the seed of a random step, from the user's seed or from the seed of the run."""
        own = mix(self.run.base_seed, self.path) if explicit is None else mix(explicit)
        return mix(own, self.epoch) if per_epoch else own


class Cursor(ABC):
    """Running position in a pipeline, used by one thread at a time.

    `state`, `restore` and `close` cover the attributes named in `KEPT` and the cursors in `_children`. A
    subclass extends them only if its position holds more than that.
    """

    KEPT: ClassVar[tuple[str, ...]] = ()
    """Names, without the underscore, of the attributes that belong to the position."""

    _children: Sequence[Cursor] = ()
    """Open cursors that this one reads from."""

    @abstractmethod
    def next(self) -> Any:
        """Return the next element, or `END`, then `END` at every further call."""

    def take(self, count: int) -> Any:
        """Return the next `count` elements as a list, fewer only at the end.

        A cursor of row numbers returns an int64 array.
        """
        found: list[Any] = []
        while len(found) < count and (element := self.next()) is not END:
            found.append(element)
        return found

    def skip(self, count: int) -> int:
        """Skip up to `count` elements and return how many there were."""
        for done in range(count):
            if self.next() is END:
                return done
        return count

    def state(self) -> State:
        """Return the position, for `restore` of a new cursor of the same node and context."""
        state = {name: getattr(self, f"_{name}") for name in self.KEPT}
        if self._children:
            state["children"] = [child.state() for child in self._children]
        return state

    def restore(self, state: State) -> None:
        """Go to a position. Allowed only before the first element was read."""
        for name in self.KEPT:
            setattr(self, f"_{name}", state[name])
        for child, own in zip(self._children, state.get("children", ()), strict=True):
            child.restore(own)

    def close(self) -> None:
        """Release threads, processes and files; idempotent."""
        for child in self._children:
            child.close()


NodeT = TypeVar("NodeT", bound="Node")


class StepCursor(Cursor, Generic[NodeT]):
    """Cursor of a node with inputs: opens a cursor on every input."""

    def __init__(self, node: NodeT, context: CursorContext) -> None:
        self._node = node
        self._context = context
        self._children = self._open_inputs()
        if self._children:
            self._child = self._children[0]

    def _open_inputs(self) -> Sequence[Cursor]:
        return [each.open(self._context.child(i)) for i, each in enumerate(self._node.inputs)]


class SelectionCursor(StepCursor[NodeT]):
    """Cursor that selects and orders elements without looking at them: elements, or row numbers."""

    @abstractmethod
    @override
    def take(self, count: int) -> Any: ...

    def _nothing(self) -> Any:
        """Return zero elements, or zero row numbers."""
        return np.empty(0, dtype=np.int64) if self._context.numbers else []

    @override
    def next(self) -> Any:
        found = self.take(1)
        return found[0] if len(found) else END

    @override
    def skip(self, count: int) -> int:
        # Numbers are cheap to make, elements may be large.
        chunk = 1 << 16 if self._context.numbers else 1
        done = 0
        while done < count and (found := len(self.take(min(count - done, chunk)))):
            done += found
        return done


class ChainCursor(SelectionCursor[NodeT]):
    """Cursor that reads several inputs, or passes over one input, one after the other."""

    KEPT = ("place", "empty", "ended")
    _place = 0  # number of the current input or pass
    _empty = True  # the current one has yielded nothing so far
    _ended = False

    @abstractmethod
    def _open_at(self, place: int) -> Cursor:
        """Open input or pass number `place`."""

    @abstractmethod
    def _ends_before(self, place: int) -> bool:
        """Return whether the data ends before input or pass number `place`."""

    @final
    @override
    def _open_inputs(self) -> Sequence[Cursor]:
        return ()

    def _open(self) -> None:
        self._child = self._open_at(self._place)
        self._children = (self._child,)

    def take(self, count: int) -> Any:
        blocks: list[Any] = []
        self._ended = self._ended or self._ends_before(self._place)
        while count and not self._ended:
            if not self._children:
                self._open()
            block = self._child.take(count)
            if len(block):
                self._empty = False
                count -= len(block)
                blocks.append(block)
            else:
                self._child.close()
                self._children = ()
                self._place += 1
                self._ended = self._ends_before(self._place)
                self._empty = True
        if len(blocks) == 1:
            return blocks[0]
        if self._context.numbers:
            return np.concatenate([self._nothing(), *blocks])
        return list(chain.from_iterable(blocks))

    @override
    def restore(self, state: State) -> None:
        self._place = state["place"]
        if "children" in state:
            self._open()
        super().restore(state)
