"""Statements of Python code: what each stores, drops, tests or returns, as a tree of the values that it was computed from.

The trees are read from bytecode: of many functions there is no source. An instruction takes values from the stack and puts
one value there. A conditional expression is no branch here: its conditions and alternatives belong to the statement.
From Python 3.12, list, set and dict comprehensions are part of the code around them; here each is one value.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, final

from stratagem._core.instructions import Instruction, instructions_of

_ENDS: Final = ("STORE_", "DELETE_", "POP_TOP", "POP_JUMP", "RETURN_VALUE", "RAISE", "RERAISE")
_LEAVES: Final = (
    "JUMP_BACKWARD", "POP_EXCEPT", "PUSH_EXC_INFO", "RAISE", "RERAISE", "RETURN_VALUE", "END_ASYNC_FOR",
)  # fmt: skip
"""Instructions after which no value is on the stack: of the code that comes next, another instruction leads there."""


@final
class CodeNode:
    """Value, or the end of a statement.

    Attributes:
        opname: the instruction that made it.
        argval: the name of the variable or attribute, the constant, or the operator.
        offset: the place of the instruction.
        parts: the values that the instruction took. A store: the new value, then the object or container, then the key.
    """

    __slots__ = ("argval", "offset", "opname", "parts")

    def __init__(self, one: Instruction, parts: Sequence[CodeNode] = ()) -> None:
        self.opname, self.offset = one.opname, one.offset
        self.argval: Any = one.argrepr if one.opname == "BINARY_OP" else one.argval
        self.parts = tuple(parts)


_NULL: Final = CodeNode(Instruction("PUSH_NULL", None, "", 0, 1))


class Statement(NamedTuple):
    """One end of a statement.

    Attributes:
        root: the instruction that stores, drops, tests or returns.
        others: conditions, and values of other branches, of conditional expressions in it.
        waiting: values for later stores of the same statement: ``a, b = b, a``.
    """

    root: CodeNode
    others: Sequence[CodeNode] = ()
    waiting: Sequence[CodeNode] = ()

    def nodes(self) -> Iterator[CodeNode]:
        """Yield the root and everything that it was computed from, once each."""
        return nodes_of(self.root, *self.others)


def nodes_of(*todo: CodeNode) -> Iterator[CodeNode]:
    """Yield these nodes and everything that they were computed from, once each."""
    seen = set()
    left = [*todo]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += one.parts
            yield one


def statements_of(code: types.CodeType) -> list[Statement]:
    """Return the statements of code, without those of functions defined in it.

    Example:
        >>> def step(self, x):
        ...     self.total += x
        >>> store = statements_of(step.__code__)[0].root
        >>> store.opname, store.argval, store.parts[0].argval
        ('STORE_ATTR', 'total', '+=')
    """
    return _StatementReader(deque(instructions_of(code))).read()


def loops_of(code: types.CodeType) -> list[tuple[int, int]]:
    """Return where loops begin and end. A handler of exceptions in a loop may lie at the end of the code."""
    loops, handlers = [], []
    handler, is_handled = 0, False
    for one in instructions_of(code):
        if one.opname == "PUSH_EXC_INFO":
            handler = one.offset
        elif one.opname == "POP_EXCEPT":
            is_handled = True
        elif "JUMP_BACKWARD" in one.opname and is_handled:
            handlers.append((handler, one.offset, one.argval))
        elif "JUMP_BACKWARD" in one.opname:
            loops.append((one.argval, one.offset))
        if one.opname.startswith(("JUMP", "RETURN", "RAISE", "RERAISE")):
            is_handled = False
    inside = [each for each in handlers if any(begin <= each[2] <= end for begin, end in loops)]
    return [*loops, *[(begin, end) for begin, end, _ in inside]]


class _StatementReader:
    """Stack of values, while instructions are read up to one place in the code."""

    def __init__(self, todo: deque[Instruction], own: frozenset[str] = frozenset()) -> None:
        self._todo = todo
        self._own = own  # variables of the comprehension
        self._found: list[Statement] = []
        self._stack: list[CodeNode] = []
        self._others: list[CodeNode] = []
        self._in_expression = False  # whether the last instruction was a jump there

    def read(self, end: float = float("inf")) -> list[Statement]:
        while self._todo and self._todo[0].offset < end:
            one = self._todo.popleft()
            was_in_expression, self._in_expression = self._in_expression, False
            if one.opname.startswith(_ENDS):
                self._end(one, was_in_expression=was_in_expression)
            elif one.opname == "LOAD_FAST_AND_CLEAR":
                self._stack.append(self._comprehension(one))
            elif one.opname == "JUMP_FORWARD" or one.opname.startswith("JUMP_IF"):
                self._others += self._take(1)
            elif not one.opname.startswith(_LEAVES):
                self._add(one)
            if one.opname.startswith(_LEAVES):
                self._leave()
        self._leave()
        return self._found

    def _take(self, number: int) -> list[CodeNode]:
        start = max(len(self._stack) - number, 0)
        taken, self._stack[start:] = self._stack[start:], []
        return taken

    def _add(self, one: Instruction) -> None:
        """Let an instruction take values and put one on the stack."""
        name, stack, number = one.opname, self._stack, one.argval
        if name == "COPY":
            stack += stack[-number:][:1]
        elif name == "SWAP":
            if number <= len(stack):
                stack[-1], stack[-number] = stack[-number], stack[-1]
        elif name in (
            "FOR_ITER",
            "BEFORE_WITH",
        ):  # the iterator and the manager remain on the stack
            stack.append(CodeNode(one, self._take(1)))
        elif name.startswith("UNPACK"):
            stack += [CodeNode(one, self._take(1))] * (one.effect + 1)
        elif name == "LOAD_METHOD":  # the object and the method
            stack += [CodeNode(one, self._take(2 - one.effect)), _NULL]
        elif name.startswith("LOAD_") and name.endswith(("FAST", "DEREF")) and number in self._own:
            stack.append(CodeNode(one._replace(opname="COMPREHENSION")))
        else:  # perhaps with a NULL for calls
            stack += [*[_NULL] * (one.effect - 1), CodeNode(one, self._take(1 - one.effect))]

    def _end(self, one: Instruction, *, was_in_expression: bool) -> None:
        root = CodeNode(one, self._take(-one.effect))
        if one.opname.startswith("POP_JUMP") and self._stack:
            self._others += root.parts
            self._in_expression = True
        elif one.opname == "POP_TOP" and was_in_expression:  # ``a and b`` drops `a`
            self._others += root.parts
        elif root.parts:
            self._found.append(Statement(root, tuple(self._others), tuple(self._stack)))
            if not self._stack:
                self._others = []

    def _leave(self) -> None:
        self._found += [Statement(one, tuple(self._others)) for one in self._stack]
        self._stack, self._others = [], []

    def _comprehension(self, first: Instruction) -> CodeNode:
        """Read a comprehension to its end, and the stores that bring back variables of the same names."""
        own = {first.argval}
        while (one := self._todo.popleft()).opname != "FOR_ITER":
            if one.opname == "LOAD_FAST_AND_CLEAR":
                own.add(one.argval)
        found = _StatementReader(self._todo, self._own | own).read(one.argval)
        while (after := self._todo[0]).opname == "SWAP" or (
            after.opname == "STORE_FAST" and after.argval in own
        ):
            own.discard(self._todo.popleft().argval)
        parts = [each for statement in found for each in (statement.root, *statement.others)]
        return CodeNode(first._replace(opname="COMPREHENSION"), [*self._take(1), *parts])
