"""Find code that changes Python numbers in attributes, closure variables, globals and items.

Replicas share the numbers that their step moves. `kept_numbers` gives each replica its own, and asks here which ones:

    moved   computed from its own value: ``self.tau *= 0.99``, ``self.steps += 1``, ``self.pos += self.stride``
    varying the change may depend on the rows of a replica: ``self.rows += len(x)``, ``ptr = (ptr + n) % 10``; also in a loop
            A number that code only adds such amounts to (a sum) is not moved.
    used    code computes something else with it, other than text for a log

The bytecode is read: no code of the user runs.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

from stratagem._core.instructions import (
    GLOBALS,
    Instruction,
    attributes_of_globals,
    instructions_of,
)

LOCAL: Final = ""
"""Stands for local variables and for values without a name."""
ANY: Final = ("any key",)
"""Stands for a key that is no constant."""

Kind = Literal["moved", "varying", "added"]
Items = frozenset[tuple[str, Hashable, Kind]]
"""Name of a container, key, and how code changes the number there: "varying" is moved as well, "added" is a sum."""

_STORES: Final = {
    "STORE_ATTR": ("LOAD_ATTR",),
    "STORE_GLOBAL": ("LOAD_GLOBAL", "LOAD_NAME"),
    "STORE_DEREF": ("LOAD_DEREF",),
}
_NAMED: Final = frozenset(name for names in _STORES.values() for name in names) | {"LOAD_METHOD"}
_OUTER: Final = (*GLOBALS, "LOAD_DEREF")
_PURE: Final = (
    "LOAD_CONST", *_OUTER, "LOAD_ATTR", "BINARY_OP", "BINARY_SUBSCR", "UNARY_NEGATIVE", "PUSH_NULL",
)  # fmt: skip
_ADDING: Final = ("+", "+=", "-", "-=")
_ENDS: Final = ("STORE_", "POP_TOP", "POP_JUMP", "RETURN", "YIELD", "DELETE", "JUMP", "RAISE")
_TEXT: Final = ("FORMAT_", "BUILD_STRING")
_LOGS: Final = frozenset(
    {
        "add_scalar", "add_scalars", "critical", "debug", "error", "format", "info", "log", "log_dict", "log_metric",
        "print", "set_description", "set_postfix", "str", "tqdm", "warn", "warning", "write",
    }
)  # fmt: skip
_MAKES_TEXT: Final = frozenset({"format", "str"})


class Numbers(NamedTuple):
    """Names in code, by what the code does with numbers there; see the module.

    Attributes:
        attributes: those that it stores as attributes.
        variables: those that it stores as global or closure variables.
        returned: those that it returns.
        carried: those that it reads first, and later replaces: the state of a recurrent network.
        fixed: attributes that it sets to values that depend on no rows: ``module.momentum = 0``.
        used: also `key_name` of items.
        items: numbers in dicts and lists.
    """

    attributes: frozenset[str]
    variables: frozenset[str]
    moved: frozenset[str]
    varying: frozenset[str]
    used: frozenset[str]
    returned: frozenset[str]
    carried: frozenset[str]
    fixed: frozenset[str]
    items: Items


@functools.lru_cache(maxsize=4096)
def numbers_in(code: types.CodeType, *, is_inner: bool = False) -> Numbers:
    """Return the attributes, globals, closure variables and items that code moves and uses, also in functions defined in it.

    Args:
        code: the code.
        is_inner: whether other code defines it: its closure variables may be local variables, which depend on rows.

    Example:
        >>> def step(self, loss):
        ...     self.mean = 0.9 * self.mean + 0.1 * loss
        ...     self.total += loss
        ...     self.steps += 1
        ...     self.counts["steps"] += 1
        ...     print(self.mean)
        ...     return (loss * self.scale).mean()
        >>> found = numbers_in(step.__code__)
        >>> sorted(found.moved), sorted(found.varying), sorted(found.items)
        (['mean', 'steps'], ['mean', 'total'], [('counts', 'steps', 'moved')])
    """
    found = _Found(code, is_inner=is_inner)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = numbers_in(constant, is_inner=True)
            found.attributes |= inner.attributes
            found.variables |= inner.variables
            found.moved |= inner.moved
            found.varying |= inner.varying
            found.used |= inner.used | inner.returned
            found.carried |= inner.carried
            found.fixed |= inner.fixed
            found.items |= inner.items
    return Numbers(*(frozenset(getattr(found, field)) for field in Numbers._fields))


class _Found:
    """The names in one code object."""

    def __init__(self, code: types.CodeType, *, is_inner: bool) -> None:
        self.attributes: set[str] = set()
        self.variables: set[str] = set()
        self.moved: set[str] = set()
        self.varying: set[str] = set()
        self.used: set[str] = set()
        self.returned: set[str] = set()
        self.carried: set[str] = set()
        self.fixed: set[str] = set()
        self.items: set[tuple[str, Hashable, Kind]] = set()
        self._is_inner = is_inner
        self._read: set[tuple[str, str]] = set()
        self._replaced: set[tuple[str, str]] = set()
        instructions = instructions_of(code)
        self._loops = [
            (one.argval, one.offset) for one in instructions if "JUMP_BACKWARD" in one.opname
        ]
        # Globals whose attributes the code sets. Attributes of others (`torch.mean`) are none that it replaces.
        self._changed = {
            before.argval
            for before, one in itertools.pairwise(instructions)
            if one.opname == "STORE_ATTR" and before.opname in GLOBALS
        }
        for statement in _statements(instructions):
            self._visit(statement)

    def _visit(self, statement: Sequence[Instruction]) -> None:
        end = statement[-1]
        loads = [one for one in statement if one.opname in _NAMED]
        others = attributes_of_globals(statement, self._changed)
        replaceable = [one for one in loads if one.offset not in others]
        own: Hashable = ""
        own_key: Hashable = None
        if end.opname in _STORES:
            names = _STORES[end.opname]
            mine = [one for one in replaceable if one.opname in names and one.argval == end.argval]
            if mine:
                own = str(end.argval)
                (self.attributes if end.opname == "STORE_ATTR" else self.variables).add(own)
                self._note(own, statement, mine)
            elif end.opname == "STORE_ATTR" and self._is_fixed(statement[:-2], statement[-2:][0]):
                self.fixed.add(str(end.argval))
        elif end.opname == "STORE_SUBSCR":
            own, own_key = self._item(statement) or ("", None)
        if not _is_log(statement):
            kept = self.returned if end.opname.startswith("RETURN") else self.used
            kept.update(str(one.argval) for one in loads if one.argval != own)
            kept.update(key_name(key) for key in _keys(statement) if key != own_key)
            self._read.update((one.opname, str(one.argval)) for one in replaceable)
        if end.opname in _STORES:
            place = (end.opname, str(end.argval))
            if place not in self._replaced and any(
                (load, place[1]) in self._read for load in _STORES[end.opname]
            ):
                self.carried.add(place[1])
            self._replaced.add(place)

    def _note(
        self, own: str, statement: Sequence[Instruction], mine: Sequence[Instruction]
    ) -> None:
        end = owner = statement[-1]
        if (
            end.opname == "STORE_ATTR"
        ):  # the object is loaded first in ``a.n += 1``, last in ``a.n = a.n + 1``
            owner = statement[0] if any(map(_is_augmented, statement)) else statement[-2]
        rest = statement[statement.index(mine[0]) + 1 :]
        added = None if len(mine) > 1 else _added(rest)
        varies = self._varies(owner, statement, added, {own})
        if added is None or not varies:
            self.moved.add(own)
        if varies or self._in_loop(end):
            self.varying.add(own)

    def _item(self, statement: Sequence[Instruction]) -> tuple[str, Hashable] | None:
        """Note a number in a dict or list that is computed from its own value; return its container and key."""
        names = [each.opname for each in statement]
        added: Sequence[Instruction] | None = None
        if names.count("COPY") >= 2 and any(map(_is_augmented, statement)):
            start = names.index("COPY")
            place, body = statement[:start], statement[start + 3 :]  # after the load of the item
            container = place[0]
            for one in place[1:]:
                if one.opname != "LOAD_ATTR":
                    break
                container = one
            added = _added(body)
        elif len(statement) < 4 or not names[-3].startswith("LOAD_"):
            return None
        else:  # the container and the key are loaded after the value
            place, body, container = statement[-3:-1], statement[:-3], statement[-3]
            same = (container.opname, container.argval)
            operations = [one for one in body if one.opname == "BINARY_OP"]
            if not operations or same not in [(one.opname, one.argval) for one in body]:
                return None
            last = operations[-1]
            if len(operations) == 1 and last.argrepr in _ADDING:
                added = [body[body.index(last) - 1]]
        local = {str(one.argval) for one in place if one.opname.startswith("LOAD_FAST")}
        varies = self._varies(place[0], body, added, local)
        kind: Kind = "varying" if varies or self._in_loop(statement[-1]) else "moved"
        if added is not None and varies:
            kind = "added"
        key: Hashable = place[-1].argval if place[-1].opname == "LOAD_CONST" else ANY
        name = str(container.argval) if container.opname in _NAMED else LOCAL
        self.items.add((name, key, kind))
        return name, key

    def _varies(
        self,
        owner: Instruction,
        body: Sequence[Instruction],
        added: Sequence[Instruction] | None,
        ignored: set[str],
    ) -> bool:
        """Return whether a new value may depend on rows: what is added, or any local variable in the statement."""
        if added is not None:
            return not self._is_fixed(added, owner)
        if owner.opname.startswith("LOAD_FAST"):
            ignored = {str(owner.argval), *ignored}
        for one in body:
            is_local = one.opname.startswith("LOAD_FAST") or (
                one.opname == "LOAD_DEREF" and self._is_inner
            )
            if is_local and one.argval not in {"self", *ignored}:
                return True
        return False

    def _in_loop(self, one: Instruction) -> bool:
        return any(begin <= one.offset <= end for begin, end in self._loops)

    def _is_fixed(self, operand: Sequence[Instruction], owner: Instruction) -> bool:
        """Return whether a value depends on no rows: made of constants, globals and attributes of objects from outside."""
        for number, one in enumerate(operand):
            name = one.opname
            if name.startswith("LOAD_FAST"):
                after = operand[number + 1].opname if number + 1 < len(operand) else ""
                known = one.argval == "self" or (
                    owner.opname.startswith("LOAD_FAST") and one.argval == owner.argval
                )
                if not (known and after == "LOAD_ATTR"):
                    return False
            elif name not in _PURE or (name == "LOAD_DEREF" and self._is_inner):
                return False
        return bool(operand)


def _is_augmented(one: Instruction) -> bool:
    return one.opname == "BINARY_OP" and one.argrepr.endswith("=")


def key_name(key: Hashable) -> str:
    """Return the name in `Numbers.used` of items that code reads by a constant key."""
    return f"[{key!r}]"


def _keys(statement: Sequence[Instruction]) -> Iterator[Any]:
    """Yield the constant keys of items that a statement reads."""
    for one, after in itertools.pairwise(statement):
        if one.opname == "LOAD_CONST" and after.opname == "BINARY_SUBSCR":
            yield one.argval


def _added(rest: Sequence[Instruction]) -> list[Instruction] | None:
    """Return what is added to a value, by the instructions after its load; None if it is not only added to."""
    height = 1  # of the stack, from the value upwards
    for number, one in enumerate(rest):
        if one.opname == "BINARY_OP" and height <= 2:
            after = [each.opname for each in rest[number + 1 : -1]]
            direct = all(
                name in ("SWAP", "LOAD_DEREF", "LOAD_GLOBAL") or name.startswith("LOAD_FAST")
                for name in after
            )
            adds = one.argrepr in _ADDING and direct and height == 2
            return list(rest[:number]) if adds else None
        height += one.effect
        if height < 1:
            return None
    return None


def numbers_of(codes: Iterable[types.CodeType]) -> Numbers:
    """Return what functions do with numbers; `used` has also what they use as results of each other."""
    found = [(code.co_name, numbers_in(code)) for code in codes if _may_be_called(code.co_name)]
    used = {name for _, one in found for name in one.used}
    for _ in range(2):  # a result that goes through two functions
        used.update(name for called, one in found if called in used for name in one.returned)

    def union(field: str) -> frozenset[Any]:
        return frozenset(name for _, one in found for name in getattr(one, field))

    all_of = Numbers(*map(union, Numbers._fields))
    return all_of._replace(used=frozenset(used), returned=frozenset())


def _may_be_called(name: str) -> bool:
    """Return whether a step may call a function by name or by calling its object: not ``__eq__`` of a dataclass."""
    return not name.startswith("__") or name == "__call__"


def _statements(instructions: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Yield groups of instructions that end where a value is stored, dropped, tested or returned."""
    part: list[Instruction] = []
    for one in instructions:
        part.append(one)
        if one.opname.startswith(_ENDS):
            yield part
            part = []
    if part:
        yield part


def _is_log(statement: Sequence[Instruction]) -> bool:
    """Return whether a statement makes text, calls something that writes a log, or compares with a first value."""
    end = statement[-1].opname
    names = {str(one.argval) for one in statement if one.opname.startswith("LOAD_")}
    if any(one.opname.startswith(_TEXT) for one in statement):
        return True
    if end.startswith("POP_JUMP") and statement[-2:][0].opname != "COPY":  # not ``a == b and c``
        return "NONE" in end or any(
            one.opname == "IS_OP" or (one.opname == "COMPARE_OP" and one.argval in ("==", "!="))
            for one in statement
        )
    if end == "POP_TOP":
        computes = any(one.opname == "BINARY_OP" for one in statement)
        listed = "append" in names and not computes
        return "backward" not in names and (listed or not names.isdisjoint(_LOGS))
    return not names.isdisjoint(_MAKES_TEXT)
