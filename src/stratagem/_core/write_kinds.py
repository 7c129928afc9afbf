"""Find and classify code that writes to attributes, closure variables, globals, lists and dicts.

Replicas share what their function keeps between steps. `kept_values` gives each replica its own value of it, and asks
here what the program means by a write:

    moves   the new value depends on the old one: ``s.mul_(0.9)``, ``s -= …``, ``self.avg[k] = 0.9 * self.avg[k] + …``
    adds    something is added: ``s += n``, ``s.add_(n)``: a count of rows, a sum of losses
    grows   the same, and the function reads the value as well, perhaps to compute what is added
    sets    the old value is lost: ``s.copy_(x)``, ``s[i] = x``, ``out=s``
    binds   another object takes the place of the old one: ``self.avg = …``, ``self.avg[k] = …``

The bytecode is read, as in `counters`: no code of the user runs. An operation on a local variable may concern any
value that the function names.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

from stratagem._core.instructions import (
    GLOBALS,
    Instruction,
    attributes_of_globals,
    instructions_of,
)

Kind = Literal["moves", "adds", "grows", "sets", "binds"]
Kinds = frozenset[Kind]

LOCAL: Final = ""
"""Stands for local variables and for values without a name in `writes_of`."""

_SETTING: Final = frozenset(
    {
        "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "index_copy_", "index_fill_",
        "load_state_dict", "log_normal_", "masked_fill_", "masked_scatter_", "normal_", "random_", "resize_",
        "resize_as_", "scatter_", "set_", "uniform_", "zero_", "_foreach_copy_", "_foreach_zero_",
    }
)  # fmt: skip
_HARMLESS: Final = frozenset(
    {
        "detach_",
        "requires_grad_",
        "retain_grad_",
        "share_memory_",
        "clip_grad_norm_",
        "clip_grad_value_",
    }
)
_NAMED: Final = ("FAST", "ATTR", "METHOD", "GLOBAL", "NAME", "DEREF", "CLASSDEREF")


@functools.lru_cache(maxsize=4096)
def writes_of(code: types.CodeType) -> Mapping[str, Kinds]:
    """Return the kinds of writes in code, and in the functions defined in it, by the name of what is written.

    Example:
        >>> def update(self, values):
        ...     for average, value in zip(self.averages, values):
        ...         average.mul_(0.9).add_(value, alpha=0.1)
        ...     self.rows += len(values)
        >>> {name: sorted(kinds) for name, kinds in writes_of(update.__code__).items()}
        {'': ['adds', 'moves'], 'rows': ['adds']}
    """
    found: dict[str, set[Kind]] = {}
    instructions = instructions_of(code)
    loads = Counter(name for one in instructions for name in _loaded(one))
    for statement in _statements(instructions):
        for names, kind in _writes_in(statement, loads):
            for name in names or (LOCAL,):
                found.setdefault(LOCAL if name in code.co_varnames else name, set()).add(kind)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for name, kinds in writes_of(constant).items():
                found.setdefault(name, set()).update(kinds)
    return {name: frozenset(kinds) for name, kinds in found.items()}


def _statements(instructions: Iterable[Instruction]) -> Iterator[list[Instruction]]:
    """Yield the instructions of each source line; long statements are split, which finds fewer double loads."""
    part: list[Instruction] = []
    for one in instructions:
        if one.starts_line and part:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def _loaded(one: Instruction) -> tuple[str, ...]:
    """Return the names of the variables and attributes that an instruction loads."""
    kind, _, place = one.opname.partition("_")
    if kind != "LOAD" or not place.startswith(_NAMED):
        return ()
    return (str(one.argval),)


def _writes_in(
    statement: list[Instruction], loads: Mapping[str, int]
) -> Iterator[tuple[list[str], Kind]]:
    """Yield the names that a statement may write, and how."""
    here = Counter(name for one in statement for name in _loaded(one) if not _is_in_place(name))
    before: Instruction | None = None
    augmented = ""
    receiver: tuple[str, ...] = ()
    for one in statement:
        name = str(one.argval)
        if one.opname in ("LOAD_METHOD", "LOAD_ATTR") and _is_in_place(name):
            # ``s.mul_(0.9).add_(x)`` writes `s` twice.
            if before is None or not before.opname.startswith("CALL"):
                receiver = () if before is None else _loaded(before)
            names = [receiver[-1]] if receiver and not name.startswith("_foreach_") else [*here]
            if name in _SETTING:
                again = any(here[each] > 1 for each in names)
                yield names, "moves" if again and "copy" in name else "sets"
            elif name in ("add_", "_foreach_add_"):
                yield names, _adding(names, here, loads)
            else:
                yield names, "moves"
        elif one.opname == "BINARY_OP" and one.argrepr.endswith("="):
            augmented = one.argrepr
        elif one.opname in ("STORE_SUBSCR", "STORE_SLICE"):
            names = [*here]
            if augmented:
                yield names, _adding(names, here, loads) if augmented == "+=" else "moves"
            else:
                yield names, "moves" if any(here[each] > 1 for each in names) else "sets"
            yield names, "binds"
            augmented = ""
        elif one.opname.startswith("STORE_") and augmented:
            yield [name], _adding([name], here, loads) if augmented == "+=" else "moves"
            augmented = ""
        elif one.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"):
            read = one.opname.replace("STORE", "LOAD")  # a local variable may have the same name
            same = [each for each in statement if each.opname == read and each.argval == name]
            owner = before.argval if before is not None and before.opname in GLOBALS else ""
            others = attributes_of_globals(statement, (owner,))
            if any(each.offset not in others for each in same):
                yield [name], "moves"
            yield [name], "binds"
        elif one.opname in ("KW_NAMES", "CALL_KW", "LOAD_CONST") and _names_out(one.argval):
            yield [*here], "sets"
        before = one


def _adding(names: list[str], here: Mapping[str, int], loads: Mapping[str, int]) -> Kind:
    if any(here[name] > 1 for name in names):
        return "moves"
    return "grows" if any(loads[name] > 1 for name in names) else "adds"


def _is_in_place(name: str) -> bool:
    return name == "load_state_dict" or (
        name.endswith("_")
        and not name.endswith("__")
        and (not name.startswith("_") or name.startswith("_foreach_"))
        and name not in _HARMLESS
    )


def _names_out(constant: Any) -> bool:
    return isinstance(constant, tuple) and "out" in constant
