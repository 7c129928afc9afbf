"""Steps with several inputs, and steps that group elements for replicas.

zip, concatenate and interleave are verbs of `Dataset`. `ConsecutiveNode` and `SideBySideNode` make the steps of
`distribute_datasets_from_function`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from stratagem._data import nests
from stratagem._data.calling import UserFunction
from stratagem._data.cursor import END, ChainCursor, Cursor, CursorContext, State, StepCursor
from stratagem._data.node import INFINITE, UNKNOWN, Join, Node, Step
from stratagem._data.parallel import PrefetchNode
from stratagem._data.seeds import mix


@final
class ZipCursor(StepCursor["ZipNode"]):
    """Reads one element of each input; ends when one input ends."""

    KEPT = ("ended",)
    _ended = False

    def next(self) -> Any:
        elements: list[Any] = []
        for child in () if self._ended else self._children:
            element = child.next()
            if element is END:
                self._ended = True
                self.close()
                break
            elements.append(element)
        if self._ended:
            return END
        return nests.map_leaves(lambda place: elements[place], self._node.structure)

    @override
    def restore(self, state: State) -> None:
        self._ended = state["ended"]
        if not self._ended:  # a known end needs no reading
            super().restore(state)


@final
@dataclass(frozen=True, eq=False)
class ZipNode(Join):
    """Elements side by side, in the nest of the datasets; ends with the shortest.

    Attributes:
        structure: the nest, with input numbers as leaves.
    """

    CURSOR = ZipCursor
    structure: Any

    @property
    @override
    def endless(self) -> bool:
        return all(node.endless for node in self.members)

    @override
    def cardinality(self) -> int:
        finite = [size for size in self._sizes() if size != INFINITE]
        if not finite:
            return INFINITE
        if 0 in finite:
            return 0
        return UNKNOWN if UNKNOWN in finite else min(finite)


@final
class ConcatenateCursor(ChainCursor["ConcatenateNode"]):
    """Opens each input when the one before it has ended."""

    def _open_at(self, place: int) -> Cursor:
        return self._node.members[place].open(self._context.child(place))

    def _ends_before(self, place: int) -> bool:
        return place == len(self._node.members)


@final
@dataclass(frozen=True, eq=False)
class ConcatenateNode(Join):
    """Inputs one after the other."""

    CURSOR = ConcatenateCursor
    keeps_rows = True

    @property
    @override
    def rows_per_batch(self) -> int | None:
        sizes = {node.rows_per_batch for node in self.members}
        return None if None in sizes else self.members[0].rows_per_batch

    @override
    def cardinality(self) -> int:
        sizes = self._sizes()
        if INFINITE in sizes:
            return INFINITE
        return UNKNOWN if UNKNOWN in sizes else sum(sizes)


@dataclass(slots=True)
class _OpenDataset:
    """Dataset that `interleave` reads: the element it was made of, its number, its cursor."""

    element: Any
    number: int
    cursor: Cursor


@final
class InterleaveCursor(StepCursor["InterleaveNode"]):
    """Reads `cycle_length` datasets in turn; replaces an ended one when its turn comes."""

    KEPT = ("turn", "given", "opened", "ended")
    _turn = 0
    _given = 0  # elements yielded in this turn
    _opened = 0
    _ended = False

    def __init__(self, node: InterleaveNode, context: CursorContext) -> None:
        super().__init__(node, context)
        self._slots: list[_OpenDataset | None] = [None] * node.cycle_length

    def _open(self, element: Any, number: int) -> _OpenDataset:
        node, context = self._node, self._context.child(number + 1)
        seed = mix(context.seed(None), number)
        made = node.node_of(node.function.call(element, number=number, seed=seed))
        if node.ahead:
            made = PrefetchNode(made, node.ahead)
        return _OpenDataset(element, number, made.open(context))

    def _next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self._slots)
        self._given = 0

    def next(self) -> Any:
        empty_turns = 0
        while empty_turns < len(self._slots):
            slot = self._slots[self._turn] or self._refill()
            if slot is None:
                empty_turns += 1
                self._next_turn()
                continue
            element = slot.cursor.next()
            if element is END:
                slot.cursor.close()
                self._slots[self._turn] = None
                empty_turns = 0
                self._next_turn()
                continue
            self._given += 1
            if self._given == self._node.block_length:
                self._next_turn()
            return element
        return END

    def _refill(self) -> _OpenDataset | None:
        element = END if self._ended else self._child.next()
        if element is END:
            self._ended = True
            return None
        slot = self._open(element, self._opened)
        self._opened += 1
        self._slots[self._turn] = slot
        return slot

    @override
    def state(self) -> State:
        slots = [slot and (slot.element, slot.number, slot.cursor.state()) for slot in self._slots]
        return {**super().state(), "slots": slots}

    @override
    def restore(self, state: State) -> None:
        super().restore(state)
        for place, saved in enumerate(state["slots"]):
            if saved is not None:
                element, number, position = saved
                slot = self._slots[place] = self._open(element, number)
                slot.cursor.restore(position)

    @override
    def close(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.cursor.close()
        super().close()


@final
@dataclass(frozen=True, eq=False)
class InterleaveNode(Step):
    """Elements of datasets that a function makes of the input's elements, in turn.

    Attributes:
        function: makes a dataset of an element.
        node_of: returns the node of what the function returned.
        cycle_length: how many datasets are open at a time.
        block_length: how many elements a dataset yields per turn.
        ahead: how many elements of each open dataset a thread reads ahead; 0 for no thread.
    """

    CURSOR = InterleaveCursor
    rows_per_batch = None
    keeps_rows = True
    wants_seed = True  # the datasets are not known yet
    function: UserFunction
    node_of: Callable[[Any], Node]
    cycle_length: int
    block_length: int
    ahead: int

    @override
    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN


@final
class ConsecutiveCursor(StepCursor["ConsecutiveNode"]):
    """Groups elements."""

    def next(self) -> Any:
        return self._child.take(self._node.replicas) or END


@final
@dataclass(frozen=True, eq=False)
class ConsecutiveNode(Step):
    """Lists of `replicas` consecutive elements; the last list may be shorter."""

    CURSOR = ConsecutiveCursor
    rows_per_batch = None
    replicas: int

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size < 0 else -(-size // self.replicas)


@final
class SideBySideCursor(StepCursor["SideBySideNode"]):
    """Ends when all inputs have ended."""

    def next(self) -> Any:
        row = [child.next() for child in self._children]
        if all(element is END for element in row):
            return END
        return [None if element is END else element for element in row]


@final
@dataclass(frozen=True, eq=False)
class SideBySideNode(Join):
    """Lists with one element of each input; ``None`` for an input that has ended."""

    CURSOR = SideBySideCursor

    @override
    def cardinality(self) -> int:
        sizes = self._sizes()
        if INFINITE in sizes:
            return INFINITE
        return UNKNOWN if UNKNOWN in sizes else max(sizes)
