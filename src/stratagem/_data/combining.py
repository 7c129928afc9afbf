"""Steps with several inputs: zip, concatenate, interleave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from stratagem._data import nests
from stratagem._data.calling import UserFunction
from stratagem._data.node import (
    END,
    INFINITE,
    UNKNOWN,
    ChainCursor,
    Cursor,
    CursorContext,
    Join,
    JoinCursor,
    Node,
    State,
    Step,
    StepCursor,
)
from stratagem._data.parallel import PrefetchNode
from stratagem._data.seeds import mix


@final
class ZipNode(Join):
    """Elements side by side, in the nest the datasets were given in; ends with the shortest."""

    def __init__(self, inputs: Sequence[Node], structure: Any) -> None:
        super().__init__(inputs)
        self._structure = structure  # the nest, with input numbers for leaves

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return ZipCursor(self._open_inputs(frame), self._structure)

    @override
    def cardinality(self) -> int:
        finite = [size for size in self._sizes() if size != INFINITE]
        if not finite:
            return INFINITE
        if 0 in finite:
            return 0
        return UNKNOWN if UNKNOWN in finite else min(finite)

    @override
    def spec(self) -> Any:
        found = [node.spec() for node in self._inputs]
        if any(spec is None for spec in found):
            return None
        return nests.map_leaves(lambda place: found[place], self._structure)


@final
class ZipCursor(JoinCursor):
    """One from each; the end of one is the end."""

    KEPT = ("ended",)

    def __init__(self, cursors: Sequence[Cursor], structure: Any) -> None:
        super().__init__(cursors)
        self._structure = structure
        self._ended = False

    @override
    def next(self) -> Any:
        if self._ended:
            return END
        elements = []
        for cursor in self._cursors:
            element = cursor.next()
            if element is END:
                self._ended = True
                self.close()
                return END
            elements.append(element)
        return nests.map_leaves(lambda place: elements[place], self._structure)

    @override
    def restore(self, state: State) -> None:
        if state["ended"]:  # nothing is read again for an end that is known
            self._ended = True
        else:
            super().restore(state)


@final
class ConcatenateNode(Join):
    """One after the other."""

    keeps_rows = True

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return ConcatenateCursor(self._inputs, frame)

    @override
    def cardinality(self) -> int:
        sizes = self._sizes()
        if INFINITE in sizes:
            return INFINITE
        return UNKNOWN if UNKNOWN in sizes else sum(sizes)

    @override
    def spec(self) -> Any:
        first = self._inputs[0].spec()
        same = all(node.spec() == first for node in self._inputs)
        return first if same else None


@final
class ConcatenateCursor(ChainCursor):
    """Opens each input when the one before has ended."""

    KEPT = ("place",)

    def __init__(self, inputs: tuple[Node, ...], frame: CursorContext) -> None:
        self._inputs = inputs
        self._frame = frame
        self._place = 0

    @override
    def _open(self) -> Cursor:
        return self._inputs[self._place].open(self._frame.child(self._place))

    @override
    def next(self) -> Any:
        while self._place < len(self._inputs):
            if self._child is None:
                self._child = self._open()
            element = self._child.next()
            if element is not END:
                return element
            self.close()
            self._place += 1
        return END


@dataclass(frozen=True, slots=True)
class InterleavePlan:
    """How `interleave` takes turns.

    Attributes:
        function: makes a dataset of an element.
        node_of: turns what the function returned into a node.
        cycle_length: how many of these datasets are open at a time.
        block_length: how many elements one gives before it is the next one's turn.
        ahead: how many elements of each are read ahead, in a thread each.
    """

    function: UserFunction
    node_of: Callable[[Any], Node]
    cycle_length: int
    block_length: int
    ahead: int


@final
class InterleaveNode(Step):
    """Elements of datasets made from its elements, taking turns."""

    keeps_rows = True
    wants_seed = True  # what its function makes is not known yet

    def __init__(self, input: Node, plan: InterleavePlan) -> None:
        super().__init__(input)
        self._plan = plan

    @override
    def open(self, frame: CursorContext) -> Cursor:
        return InterleaveCursor(self.input.open(frame.child()), self._plan, frame)

    @override
    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN


@dataclass(slots=True)
class _Slot:
    """One open dataset: the element it was made of, its number, and its cursor."""

    element: Any
    number: int
    cursor: Cursor


@final
class InterleaveCursor(StepCursor):
    """`cycle_length` slots; an ended one is refilled when its turn comes."""

    KEPT = ("turn", "given", "opened", "ended")

    def __init__(self, child: Cursor, plan: InterleavePlan, frame: CursorContext) -> None:
        super().__init__(child)
        self._plan = plan
        self._frame = frame
        self._slots: list[_Slot | None] = [None] * plan.cycle_length
        self._turn = 0
        self._given = 0  # elements given in this turn
        self._opened = 0
        self._ended = False

    def _open(self, element: Any, number: int) -> _Slot:
        plan = self._plan
        frame = self._frame.child(number + 1)
        seed = mix(frame.seed(None), number)
        node = plan.node_of(plan.function.call(element, number=number, seed=seed))
        if plan.ahead:
            node = PrefetchNode(node, plan.ahead)
        return _Slot(element, number, node.open(frame))

    def _next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self._slots)
        self._given = 0

    @override
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
            if self._given == self._plan.block_length:
                self._next_turn()
            return element
        return END

    def _refill(self) -> _Slot | None:
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
        slots = [
            None
            if slot is None
            else {"element": slot.element, "number": slot.number, "child": slot.cursor.state()}
            for slot in self._slots
        ]
        return {**super().state(), "slots": slots}

    @override
    def restore(self, state: State) -> None:
        for place, saved in enumerate(state["slots"]):
            if saved is not None:
                slot = self._open(saved["element"], saved["number"])
                slot.cursor.restore(saved["child"])
                self._slots[place] = slot
        super().restore(state)

    @override
    def close(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.cursor.close()
        super().close()
