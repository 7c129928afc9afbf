"""Find what the code of a step does to the values that a program keeps between its steps.

Replicas share attributes, closure variables, globals, lists and dicts. `kept_values` gives each replica its own values
there, and asks here what the program means by a change:

    moves   the new value is computed from the old one: ``steps += 1``, ``tau *= 0.99``, ``s.mul_(0.9)``, ``pos += self.stride``
    varies  the same, for a number, and a local variable takes part, which may depend on a replica's rows: ``(pos + n) % 10``
    adds    a value is added that may depend on rows: ``rows += len(x)``, ``s.add_(n)``; or any value, in a loop: a sum
    grows   the same, for a tensor, and the function reads the tensor elsewhere, perhaps to compute what it adds
    sets    the old value is lost, of a tensor: ``s.copy_(x)``, ``s[i] = x``, ``out=s``
    binds   another tensor takes the place of the old one: ``self.avg = …``, ``self.avg[k] = …``

The bytecode is read: no code of the user runs. In the results, ``.rate`` is an attribute, ``rate`` a closure variable or
global, and `LOCAL` any local variable or value without a name.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from stratagem._core.instructions import (
    GLOBALS,
    Instruction,
    attributes_of_globals,
    instructions_of,
)

Kind = Literal["moves", "varies", "adds", "grows", "sets", "binds"]
Kinds = frozenset[Kind]

LOCAL: Final = ""
ANY: Final = ("any key",)
"""Stands for a key that is no constant."""

_ADDING: Final = ("+", "+=", "-", "-=")
_ITEMS: Final = ("STORE_SUBSCR", "STORE_SLICE")
_STORES: Final = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME")
_ENDS: Final = ("STORE_", "POP_TOP", "POP_JUMP", "RETURN", "YIELD", "DELETE", "JUMP", "RAISE")
_PURE: Final = (
    "LOAD_CONST", *GLOBALS, "LOAD_DEREF", "LOAD_ATTR", "BINARY_OP", "BINARY_SUBSCR", "UNARY_NEGATIVE", "PUSH_NULL",
)  # fmt: skip
_TEXT: Final = ("FORMAT_", "BUILD_STRING")
_LOGS: Final = frozenset(
    {
        "add_scalar", "add_scalars", "append", "critical", "debug", "error", "info", "log", "log_dict", "log_metric", "print",
        "set_description", "set_postfix", "warn", "warning", "write",
    }
)  # fmt: skip
_SETTING: Final = frozenset(
    {
        "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "index_copy_", "index_fill_",
        "load_state_dict", "log_normal_", "masked_fill_", "masked_scatter_", "normal_", "random_", "resize_",
        "resize_as_", "scatter_", "set_", "uniform_", "zero_", "_foreach_copy_", "_foreach_zero_",
    }
)  # fmt: skip
_HARMLESS: Final = frozenset(
    {
        "detach_", "requires_grad_", "retain_grad_", "share_memory_", "clip_grad_norm_", "clip_grad_value_",
    }
)  # fmt: skip


class Changes(NamedTuple):
    """Changes that code makes, by the name of what it changes.

    Attributes:
        numbers: kinds for numbers in attributes and variables.
        items: kinds for numbers in lists and dicts, by the name of the container and the key.
        tensors: kinds for tensors.
        carried: names that code reads first, and later replaces: ``n = self.n``, ``self.n = n + 1``; the state of a
            recurrent network.
        counted: names that code increases or decreases.
        used: names that code reads for something else than to change them or to write a log.
    """

    numbers: Mapping[str, Kinds]
    items: Mapping[tuple[str, Hashable], Kinds]
    tensors: Mapping[str, Kinds]
    carried: frozenset[str]
    counted: frozenset[str]
    used: frozenset[str]


@functools.lru_cache(maxsize=4096)
def changes_in(code: types.CodeType, *, is_inner: bool = False) -> Changes:
    """Return the changes that code makes, and the functions defined in it.

    Args:
        code: the code.
        is_inner: whether other code defines it: its closure variables may be local variables, which depend on rows.

    Example:
        >>> def step(self, loss):
        ...     self.mean = 0.9 * self.mean + 0.1 * loss
        ...     self.total += loss
        ...     self.steps += 1
        ...     self.counts["steps"] += 1
        >>> found = changes_in(step.__code__)
        >>> {name: sorted(kinds) for name, kinds in found.numbers.items()}
        {'.mean': ['varies'], '.total': ['adds'], '.steps': ['moves']}
        >>> found.items
        {('.counts', 'steps'): frozenset({'moves'})}
    """
    inner = [
        changes_in(one, is_inner=True) for one in code.co_consts if isinstance(one, types.CodeType)
    ]
    found = union([_Reader(code, is_inner=is_inner).changes(), *inner])
    # A variable of this code that a function in it counts with is seen by no other call.
    return found._replace(counted=found.counted - {*code.co_cellvars})


def union(changes: Iterable[Changes]) -> Changes:
    """Return the changes of several functions together."""
    changes = tuple(changes)

    def merged(tables: Iterable[Mapping[Any, Kinds]]) -> dict[Any, Kinds]:
        found: defaultdict[Any, Kinds] = defaultdict(frozenset)
        for table in tables:
            for name, kinds in table.items():
                found[name] |= kinds
        return dict(found)

    return Changes(
        merged(one.numbers for one in changes),
        merged(one.items for one in changes),
        merged(one.tensors for one in changes),
        frozenset().union(*(one.carried for one in changes)),
        frozenset().union(*(one.counted for one in changes)),
        frozenset().union(*(one.used for one in changes)),
    )


def name_of(one: Instruction) -> str | None:
    """Return the name that an instruction loads or stores; ``@x`` for a local variable."""
    place = one.opname.partition("_")[2]
    if place in ("ATTR", "METHOD"):
        return f".{one.argval}"
    if place.startswith("FAST"):
        return f"@{one.argval}"
    return str(one.argval) if place in ("GLOBAL", "NAME", "DEREF", "CLASSDEREF") else None


class _Reader:
    """The changes in one code object."""

    def __init__(self, code: types.CodeType, *, is_inner: bool) -> None:
        self.numbers: defaultdict[str, Kinds] = defaultdict(frozenset)
        self.items: defaultdict[tuple[str, Hashable], Kinds] = defaultdict(frozenset)
        self.tensors: defaultdict[str, Kinds] = defaultdict(frozenset)
        self.carried: set[str] = set()
        self.counted: set[str] = set()
        self.used: set[str] = set()
        self._is_inner = is_inner
        self._read: set[str] = set()
        self._replaced: set[str] = set()
        # What functions in this code refer to, too, is a local variable here.
        instructions = [
            one._replace(opname=one.opname.replace("DEREF", "FAST"))
            if one.opname.endswith("_DEREF") and one.argval in code.co_cellvars
            else one
            for one in instructions_of(code)
        ]
        self._loads = Counter(_loaded(instructions))
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

    def changes(self) -> Changes:
        """Return the changes."""
        names = [frozenset(each) for each in (self.carried, self.counted, self.used)]
        return Changes(self.numbers, self.items, self.tensors, *names)

    def _visit(self, statement: Sequence[Instruction]) -> None:
        end = statement[-1]
        others = attributes_of_globals(statement, self._changed)
        loads = [
            one for one in statement if one.opname.startswith("LOAD_") and one.offset not in others
        ]
        own = name_of(end) if end.opname in _STORES else None
        mine = [one for one in loads if name_of(one) == own and one.opname != "LOAD_METHOD"]
        changed, moves = own, False
        if own is not None and mine:
            moves = self._stored(own, statement, mine) == "moves"
        elif end.opname == "STORE_SUBSCR" and len(statement) > 2:
            changed, kind = self._item(statement)
            moves = kind == "moves"
        if not _is_log(statement):
            self.used.update(str(name) for one in loads if (name := name_of(one)) != changed)
            self._read.update(str(name_of(one)) for one in loads)
        for names, kind in self._writes(statement, own, mine, moves=moves):
            for name in names or [LOCAL]:
                self.tensors[LOCAL if name[:1] == "@" else name] |= {kind}
        if own is not None:
            if own in self._read and own not in self._replaced:
                self.carried.add(own)
            self._replaced.add(own)

    # -------------------------------------------------------------- numbers

    def _stored(
        self, own: str, statement: Sequence[Instruction], mine: Sequence[Instruction]
    ) -> Kind:
        """Note a number in an attribute or variable that is computed from its own value; return how."""
        owner = statement[-1]
        if own[0] == ".":
            # The object is loaded first in ``a.n += 1``, last in ``a.n = a.n + 1``.
            owner = statement[0] if _augmented(statement) else statement[-2]
        rest = statement[statement.index(mine[0]) + 1 :]
        kind = self._kind(owner, statement, None if len(mine) > 1 else _added(rest), set())
        self.numbers[own] |= {kind}
        if any(one.opname == "BINARY_OP" and one.argrepr in _ADDING for one in statement):
            self.counted.add(own)
        return kind

    def _item(self, statement: Sequence[Instruction]) -> tuple[str | None, Kind | None]:
        """Note a number in a list or dict that is computed from its own value; return the container's name, and how."""
        place, body = _item_and_value(statement)
        container = _container(place)
        if _augmented(statement):
            added = _added(body)
        elif (container.opname, container.argval) not in [(one.opname, one.argval) for one in body]:
            return None, None
        else:
            operations = [n for n, one in enumerate(body) if one.opname == "BINARY_OP"]
            single = len(operations) == 1 and body[operations[0]].argrepr in _ADDING
            added = [body[operations[0] - 1]] if single else None
        local = {str(one.argval) for one in place if one.opname.startswith("LOAD_FAST")}
        kind = self._kind(place[0], [*body, statement[-1]], added, local)
        key: Hashable = place[-1].argval if place[-1].opname == "LOAD_CONST" else ANY
        name = name_of(container) or LOCAL
        self.items[LOCAL if name[:1] == "@" else name, key] |= {kind}
        return name, kind

    def _kind(
        self,
        owner: Instruction,
        body: Sequence[Instruction],
        added: Sequence[Instruction] | None,
        ignored: set[str],
    ) -> Kind:
        """Return the kind of a change of a number; `added`: what is added, if it is only added to."""
        end = body[-1].offset
        in_loop = any(begin <= end <= stop for begin, stop in self._loops)
        if added is not None:
            return "moves" if self._is_fixed(added, owner) and not in_loop else "adds"
        ignored = {"self", str(owner.argval), str(body[-1].argval), *ignored}
        varies = any(self._is_local(one) and one.argval not in ignored for one in body)
        return "varies" if varies or in_loop else "moves"

    def _is_local(self, one: Instruction) -> bool:
        return one.opname.startswith("LOAD_FAST") or (one.opname == "LOAD_DEREF" and self._is_inner)

    def _is_fixed(self, operand: Sequence[Instruction], owner: Instruction) -> bool:
        """Return whether a value depends on no rows: made of constants, globals and attributes of objects from outside."""
        for number, one in enumerate(operand):
            if one.opname.startswith("LOAD_FAST"):
                after = operand[number + 1].opname if number + 1 < len(operand) else ""
                known = one.argval == "self" or (
                    owner.opname.startswith("LOAD_FAST") and one.argval == owner.argval
                )
                if not (known and after == "LOAD_ATTR"):
                    return False
            elif one.opname not in _PURE or self._is_local(one):
                return False
        return bool(operand)

    # -------------------------------------------------------------- tensors

    def _writes(
        self,
        statement: Sequence[Instruction],
        own: str | None,
        mine: Sequence[Instruction],
        *,
        moves: bool,
    ) -> Iterator[tuple[list[str], Kind]]:
        """Yield the names of tensors that a statement may write, and how; `moves`: it adds a constant."""
        here = Counter(_loaded(statement))
        before: Instruction | None = None
        receiver: str | None = None
        for place, one in enumerate(statement):
            name = str(one.argval)
            if one.opname in ("LOAD_METHOD", "LOAD_ATTR") and _is_in_place(name):
                # ``s.mul_(0.9).add_(x)`` writes `s` twice.
                if before is None or not before.opname.startswith("CALL"):
                    receiver = None if before is None else name_of(before)
                names = [receiver] if receiver and not name.startswith("_foreach_") else [*here]
                again = any(here[each] > 1 for each in names)
                if name in _SETTING:
                    yield names, "moves" if again and "copy" in name else "sets"
                else:
                    is_fixed = statement[place + 1 : place + 2][0].opname == "LOAD_CONST"
                    adds = name in ("add_", "_foreach_add_") and not (again or is_fixed)
                    yield names, self._adding(names) if adds else "moves"
            elif one.opname in ("KW_NAMES", "CALL_KW", "LOAD_CONST") and _names_out(one.argval):
                yield [*here], "sets"
            before = one
        operator = _augmented(statement)
        if own is None and statement[-1].opname in _ITEMS:
            container = name_of(_container(_item_and_value(statement)[0]))
            names = [container or LOCAL]
            again = here[names[0]] > 1
            yield names, "binds"
            if not operator:
                yield names, "moves" if again else "sets"
        elif own is None and not (operator and statement[-1].opname.startswith("STORE_")):
            return
        else:
            names = [own or name_of(statement[-1]) or LOCAL]
            again = here[names[0]] > 1
            if mine and not operator:
                yield names, "moves"
            if not operator:
                yield names, "binds"
        if operator:
            adds = operator == "+=" and not (again or moves)
            yield names, self._adding(names) if adds else "moves"

    def _adding(self, names: Sequence[str]) -> Kind:
        return "grows" if any(self._loads[name] > 1 for name in names) else "adds"


def _loaded(instructions: Iterable[Instruction]) -> Iterator[str]:
    """Yield the names of the variables and attributes that instructions load, other than methods that write."""
    for one in instructions:
        if one.opname.startswith("LOAD_") and not _is_in_place(str(one.argval)):
            name = name_of(one)
            if name is not None:
                yield name


def _statements(instructions: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Yield groups of instructions that end where a value is stored, dropped, tested or returned.

    A jump inside an expression (``x += 1 if a else 2``) ends no group: there are values on the stack.
    """
    part: list[Instruction] = []
    height, before = 0, [0]  # of the stack; when the alternatives of the expression begin
    for one in instructions:
        part.append(one)
        height += one.effect
        if height > 0 and one.opname.startswith(("POP_JUMP", "JUMP")):
            if one.opname.startswith("POP_JUMP"):
                before.append(height)
            elif one.opname == "JUMP_FORWARD":
                height = before.pop() if len(before) > 1 else 0
            else:  # ``a and b`` drops `a`
                height -= 1
        elif one.opname.startswith(_ENDS):
            yield part
            part, height, before = [], 0, [0]
    if part:
        yield part


def _augmented(statement: Sequence[Instruction]) -> str:
    """Return the operator of ``x += y``; empty if the statement is none."""
    found = [
        one.argrepr for one in statement if one.opname == "BINARY_OP" and one.argrepr[-1:] == "="
    ]
    return found[-1] if found else ""


def _item_and_value(
    statement: Sequence[Instruction],
) -> tuple[Sequence[Instruction], Sequence[Instruction]]:
    """Divide ``a[key] = value`` into the instructions for the item and those for the value."""
    names = [one.opname for one in statement]
    if _augmented(statement) and "COPY" in names:
        start = names.index("COPY")
        return statement[:start], statement[start + 3 : -1]  # after the load of the item
    height, wanted = 0, 3 if statement[-1].opname == "STORE_SLICE" else 2
    for start in range(len(statement) - 2, -1, -1):
        height += statement[start].effect
        if height == wanted:
            return statement[start:-1], statement[:start]
    return statement[:-1], ()


def _container(place: Sequence[Instruction]) -> Instruction:
    """Return the load of the container of an item: the last attribute at its beginning, or its variable."""
    attributes = itertools.takewhile(lambda one: one.opname == "LOAD_ATTR", place[1:])
    return [place[0], *attributes][-1]


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


def _asks_for_none(statement: Sequence[Instruction]) -> bool:
    """Return whether a statement only asks whether a value is there: ``if self.cache is None``."""
    end = statement[-1].opname
    return end.startswith("POP_JUMP") and (
        "NONE" in end or any(one.opname == "IS_OP" for one in statement)
    )


def _is_log(statement: Sequence[Instruction]) -> bool:
    """Return whether a statement makes text, calls something that writes a log, or compares with a first value."""
    end = statement[-1].opname
    if any(one.opname.startswith(_TEXT) for one in statement):
        return True
    if end.startswith("POP_JUMP"):
        return _asks_for_none(statement) or any(
            one.opname == "COMPARE_OP" and one.argval in ("==", "!=") for one in statement
        )
    names = {str(one.argval) for one in statement if one.opname.startswith("LOAD_")}
    return end == "POP_TOP" and "backward" not in names and not names.isdisjoint(_LOGS)


def _is_in_place(name: str) -> bool:
    return name == "load_state_dict" or (
        name.endswith("_")
        and not name.endswith("__")
        and (not name.startswith("_") or name.startswith("_foreach_"))
        and name not in _HARMLESS
    )


def _names_out(constant: Any) -> bool:
    return isinstance(constant, tuple) and "out" in constant


def may_be_called(code: types.CodeType) -> bool:
    """Return whether a step may call a function by name or by calling its object: not ``__eq__`` of a dataclass."""
    return not code.co_name.startswith("__") or code.co_name == "__call__"
