"""Python bytecode in one form for all versions: that of Python 3.11, without helper instructions.

`step_code` reads code. From version to version, CPython joins two instructions to one, splits
others, gives them other names, and (from 3.12) puts list, set and dict comprehensions into the function around them.
"""

from __future__ import annotations

import dis
import functools
import logging
import sys
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any, Final, NamedTuple

_log = logging.getLogger("stratagem.core")

GLOBALS: Final = ("LOAD_GLOBAL", "LOAD_NAME")

_NEWEST: Final = (3, 14)
"""The newest version of Python with which this was tried."""

_SKIPPED: Final = frozenset(
    {
        "CACHE", "COPY_FREE_VARS", "END_FOR", "EXTENDED_ARG", "MAKE_CELL", "NOP", "NOT_TAKEN", "POP_ITER", "RESUME",
        "TO_BOOL",
    }
)  # fmt: skip
_AFTER_FOR: Final = "POP_TOP" if sys.version_info[:2] == (3, 13) else "POP_ITER"
_LOOP: Final = (
    "COPY", "FOR_ITER", "JUMP", "LIST_APPEND", "MAP_ADD", "POP_JUMP", "POP_TOP", "SET_ADD", "STORE_FAST", "SWAP",
)  # fmt: skip
"""Instructions of a comprehension, apart from the values that it computes."""


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        opname: the name in Python 3.11.
        argval: the name of the variable or attribute, the constant, or the offset of a jump.
        argrepr: the operator of ``BINARY_OP``: "+", "+=".
        offset: its place in the code.
        effect: by how much the stack grows.
    """

    opname: str
    argval: Any
    argrepr: str
    offset: int
    effect: int


@functools.lru_cache(maxsize=4096)
def instructions_of(code: types.CodeType) -> tuple[Instruction, ...]:
    """Return the instructions of code, without those of functions defined in it.

    Example:
        >>> def step(self, x, y):
        ...     self.total = self.total + sum([x * each for each in y])
        >>> [one.argval for one in instructions_of(step.__code__) if one.opname == "STORE_ATTR"]
        ['total']
    """
    if sys.version_info[:2] > _NEWEST:
        _warn_of_version()
    return tuple(_without_comprehensions(_in_one_form(code)))


@functools.cache
def _warn_of_version() -> None:
    _log.warning(
        "Python %d.%d is newer than this version of Stratagem knows (%d.%d). Numbers and tensors that a step keeps between "
        "its calls may move once per replica instead of once per step, without an error: compare them with one device.",
        *sys.version_info[:2],
        *_NEWEST,
    )


def _in_one_form(code: types.CodeType) -> Iterator[Instruction]:
    last = ""
    cells = {*code.co_cellvars, *code.co_freevars}
    for one in dis.get_instructions(code):
        name, value, text = one.opname, one.argval, one.argrepr
        before, last = last, name
        if name in _SKIPPED or (before == "END_FOR" and name == _AFTER_FOR):
            continue
        effect = dis.stack_effect(one.opcode, one.arg)
        name = name.replace("LOAD_FAST_BORROW", "LOAD_FAST")
        if name == "RETURN_CONST":
            yield Instruction("LOAD_CONST", value, text, one.offset, 1)
            name, effect = "RETURN_VALUE", -1
        elif name in ("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"):
            first, name = name[: name.index("FAST") + 4], name[name.index("FAST") + 5 :]
            effect = 1 if name == "LOAD_FAST" else -1
            height = 1 if first == "LOAD_FAST" else -1
            yield Instruction(first, value[0], value[0], one.offset, height)
            value = value[1]
        elif name == "BINARY_OP" and text == "[]":
            name = "BINARY_SUBSCR"
        elif name == "KW_NAMES":  # whose names `dis` of 3.11 does not look up
            value = code.co_consts[one.arg or 0]
        elif name == "LOAD_SMALL_INT":
            name = "LOAD_CONST"
        elif name == "LOAD_SUPER_ATTR" or (name == "LOAD_ATTR" and "NULL" in text):
            name = "LOAD_METHOD" if "NULL" in text else "LOAD_ATTR"
        elif name == "LOAD_FAST" and value in cells:  # from 3.13, for functions defined in this one
            name = "LOAD_CLOSURE"
        yield Instruction(name, value, text, one.offset, effect)


def _without_comprehensions(instructions: Iterator[Instruction]) -> Iterator[Instruction]:
    """Leave only the values that a comprehension in the code computes with: it ends no statement, and stores nothing."""
    own: set[str] = set()  # variables of the comprehension
    hidden: list[
        str
    ] = []  # those of the function with the same names, which it brings back at its end
    end = -1
    for one in instructions:
        name = one.opname
        if name == "LOAD_FAST_AND_CLEAR":
            own.add(one.argval)
            if end < 0:
                hidden.append(one.argval)
        elif not hidden:
            yield one
        elif end < 0 or one.offset < end:
            if end < 0 and name == "FOR_ITER":
                end = one.argval
            is_own = name.endswith(("_FAST", "_DEREF")) and one.argval in own
            if not (is_own or name.startswith(_LOOP)):
                yield one._replace(effect=0)
        elif name == "STORE_FAST" and one.argval in hidden:
            hidden.remove(one.argval)
        elif name != "SWAP":
            hidden = []
            yield one
        if name == "END_ASYNC_FOR" or not hidden:
            own, hidden, end = set(), [], -1


def attributes_of_globals(statement: Iterable[Instruction], left_out: Container[str]) -> set[int]:
    """Return the offsets of loads of attributes of globals, such as modules (``torch.mean``), apart from these globals."""
    found: set[int] = set()
    is_global = False
    for one in statement:
        if one.opname in GLOBALS:
            is_global = one.argval not in left_out
        elif one.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            is_global = False
        elif is_global:
            found.add(one.offset)
    return found
