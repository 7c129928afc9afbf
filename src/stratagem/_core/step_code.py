"""Find what the code of a step does to the values that a program keeps between its steps.

Replicas share attributes, closure variables, globals, lists and dicts. `kept_values` gives each replica its own values
there, and asks here what the program means by a change. Every store and every call of a method that writes has a kind:

    kind    the code                                                     the replicas' values, if equal      if different
    ------  -----------------------------------------------------------  ----------------------------------  ---------------
    moves   the new value is computed from the old one and constants:    written once                        an error (1)
            ``steps += 1``, ``tau *= 0.99``, ``s.mul_(0.9)``
    varies  the same, for a number, and a local variable takes part,     written once, and named in the log  an error (1)
            which may depend on rows: ``(pos + n) % 10``
    adds    a value is added that may depend on rows, or any value in    not looked at: all replicas change the same value,
            a loop, a sum: ``rows += len(x)``, ``s.add_(n)``             so that their changes add up
    grows   the same, for a tensor, and the function reads the tensor    written once                        added up
            elsewhere, perhaps to compute what it adds
    sets    the old value of a tensor is lost: ``s.copy_(x)``,           written once                        the last
            ``s[i] = x``, ``out=s``                                                                          replica's
    binds   another tensor takes the place of the old one:               written once                        the last
            ``self.avg = …``, ``self.avg[k] = …``                                                            replica's

    (1) of a number that code only writes to a log, the last replica's value remains, and integers add up.

Other stores (``self.loss = …``) are shared, unless code reads the old value first (`Changes.carried`). If a place has several
kinds, "moves" decides, then "adds" and "grows". If code has no name for a place, every change by a local variable may be one of it.

The bytecode is read: no code of the user runs. In the results, ``.rate`` is an attribute, ``rate`` a closure variable or
global, and `LOCAL` any local variable or value without a name.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal

from stratagem._core.statements import CodeNode, Statement, loops_of, nodes_of, statements_of

Kind = Literal["moves", "varies", "adds", "grows", "sets", "binds"]
Kinds = frozenset[Kind]

LOCAL: Final = ""
ANY: Final = ("any key",)
"""Stands for a key that is no constant."""

_ASYNC: Final = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code that is not read: no step awaits it (`async_functions.py`)."""

_INDEXED: Final = "[]"
"""Marks a name of which only an item is read."""

_ADDING: Final = ("+", "+=", "-", "-=")
_GLOBALS: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_STORES: Final = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME")
_PURE: Final = ("BINARY_OP", "BINARY_SUBSCR", "UNARY_NEGATIVE", "LOAD_ATTR")
_LOGS: Final = frozenset(
    {
        "add_scalar", "add_scalars", "append", "critical", "debug", "error", "info", "log", "log_dict", "log_metric", "print",
        "set_description", "set_postfix", "warn", "warning", "write",
    }
)  # fmt: skip
"""Names of functions that write a log. A number that goes to any other function is used: the names decide only whether
different values of it are an error."""
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


class Changes:
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

    def __init__(self, parts: Iterable[Changes] = ()) -> None:
        self.numbers: defaultdict[str, Kinds] = defaultdict(frozenset)
        self.items: defaultdict[tuple[str, Hashable], Kinds] = defaultdict(frozenset)
        self.tensors: defaultdict[str, Kinds] = defaultdict(frozenset)
        self.carried: set[str] = set()
        self.counted: set[str] = set()
        self.used: set[str] = set()
        for one in parts:
            for name, found in vars(one).items():
                mine = getattr(self, name)
                for key in found:
                    if isinstance(found, dict):
                        mine[key] |= found[key]
                    else:
                        mine.add(key)


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
        >>> [*found.items]
        [('.counts', 'steps')]
    """
    if code.co_flags & _ASYNC:
        return Changes()
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    found = Changes(changes_in(one, is_inner=True) for one in inner)
    _Reader(code, found, is_inner=is_inner)
    # A variable of this code that a function in it counts with is seen by no other call.
    found.counted -= {*code.co_cellvars}
    return found


class _Reader:
    """The changes in one code object."""

    def __init__(self, code: types.CodeType, found: Changes, *, is_inner: bool) -> None:
        self._found = found
        self._is_inner = is_inner
        self._read: set[str] = set()
        self._replaced: set[str] = set()
        # What the value of a local variable was computed from; the variables whose values depend on no other ones.
        self._origins: dict[str, frozenset[str]] = {}
        self._plain: set[str] = set()
        self._cells = frozenset(code.co_cellvars)
        self._loops = loops_of(code)
        statements = statements_of(code)
        # Globals whose attributes the code sets. Attributes of others (`torch.mean`) are none that it replaces.
        stores = [one.root.parts[-1] for one in statements if one.root.opname == "STORE_ATTR"]
        self._changed = {one.argval for one in stores if one.opname in _GLOBALS}
        every = {one for statement in statements for one in statement.nodes()}
        self._loads = Counter(self._names(every))
        for statement in statements:
            self._visit(statement)

    # -------------------------------------------------------------- values

    def _is_local(self, one: CodeNode) -> bool:
        is_cell = one.opname.endswith("_DEREF")
        return one.opname.startswith(("LOAD_FAST", "STORE_FAST")) or (
            is_cell and (self._is_inner or one.argval in self._cells)
        )

    def _name(self, one: CodeNode) -> str | None:
        """Return the name that a node loads or stores; ``@x`` for a local variable, None for any other node."""
        place = one.opname.partition("_")[2]
        if place in ("ATTR", "METHOD"):
            return f".{one.argval}"
        if place.startswith("FAST") or (place == "DEREF" and one.argval in self._cells):
            return f"@{one.argval}"
        return str(one.argval) if place in ("GLOBAL", "NAME", "DEREF", "CLASSDEREF") else None

    def _names(self, nodes: Iterable[CodeNode]) -> Iterator[str]:
        """Yield the names of the variables and attributes that are loaded, other than methods that write."""
        for one in nodes:
            name = self._name(one) if one.opname.startswith("LOAD_") else None
            if name is not None and not _is_in_place(one):
                yield name

    def _is_of_global(self, one: CodeNode) -> bool:
        """Return whether a node loads an attribute of a global, such as a module, whose attributes the code does not set."""
        while one.opname in ("LOAD_ATTR", "LOAD_METHOD") and one.parts:
            one = one.parts[0]
            if one.opname in _GLOBALS:
                return bool(one.argval not in self._changed)
        return False

    # -------------------------------------------------------------- statements

    def _visit(self, statement: Statement) -> None:
        root, nodes = statement.root, list(statement.nodes())
        loads = {
            one: name
            for one in nodes
            if one.opname.startswith("LOAD_")
            and (name := self._name(one))
            and not self._is_of_global(one)
        }
        stored = self._name(root) if root.opname in _STORES else None
        own = None if stored is None or stored[0] == "@" else stored
        mine = [one for one, name in loads.items() if name == own and one.opname != "LOAD_METHOD"]
        # What has items is no number.
        indexed = {one.parts[0] for one in nodes if one.opname.startswith("BINARY_S")}
        names = [name + _INDEXED * (one in indexed) for one, name in loads.items()]
        origins = frozenset(names).union(*map(self._origins_of, names))
        if root.opname.startswith("STORE_") and self._is_local(root):
            self._assign(root, nodes, origins)
        changed, kind = own, None
        is_carried = not mine and own in origins
        if own is not None and (is_carried or not indexed.issuperset(mine)):
            added = self._added(statement, mine)
            kind = self._kind(statement, added, root.parts[-1], self._carriers_of(own))
            self._found.numbers[own] |= {kind}
            if any(one.opname == "BINARY_OP" and one.argval in _ADDING for one in nodes):
                self._found.counted.add(own)
        elif root.opname == "STORE_SUBSCR":
            changed, kind = self._item(statement)
        if not _is_log(root, nodes):
            self._found.used.update(name for name in loads.values() if name != changed)
            self._read.update(loads.values(), self._names(nodes_of(*statement.waiting)))
        self._tensors(statement, own, moves=kind == "moves", computed=bool(mine))
        if own is not None:
            if own in self._read and own not in self._replaced and kind != "adds":
                self._found.carried.add(own)
            self._replaced.add(own)

    def _origins_of(self, name: str) -> frozenset[str]:
        return self._origins.get(name, frozenset())

    def _carriers_of(self, name: str) -> set[str]:
        """Return the local variables that are computed from this name, or its items, alone."""
        wanted = {name, name + _INDEXED}
        return {one for one in self._plain if not wanted.isdisjoint(self._origins_of(f"@{one}"))}

    def _assign(self, root: CodeNode, nodes: Sequence[CodeNode], origins: frozenset[str]) -> None:
        """Note what the value of a local variable is computed from: ``n = self.n`` before ``self.n = n + 1``."""
        value, name = root.parts[0], str(root.argval)
        in_loop = any(one.opname == "FOR_ITER" for one in nodes)
        self._origins[f"@{name}"] = frozenset() if in_loop else origins
        known = {"self", *self._plain}
        locals_ = [one for one in nodes if self._is_local(one) and one is not root]
        if value.opname in ("LOAD_ATTR", "BINARY_SUBSCR") or all(
            one.argval in known for one in locals_
        ):
            self._plain.add(name)
        else:
            self._plain.discard(name)

    # -------------------------------------------------------------- numbers

    def _added(self, statement: Statement, mine: Sequence[CodeNode]) -> CodeNode | None:
        """Return what a statement adds to a value; None if it does anything else."""
        value = statement.root.parts[0]
        if value.opname != "BINARY_OP" or value.argval not in _ADDING or statement.others:
            return None
        return value.parts[1] if len(mine) == 1 and mine[0] is value.parts[0] else None

    def _item(self, statement: Statement) -> tuple[str | None, Kind | None]:
        """Note a number in a list or dict that is computed from its own value; return the container's name, and how."""
        value, container, key = statement.root.parts
        container = _first(container)
        nodes = list(nodes_of(value))
        whole, is_direct = self._name(container) or LOCAL, True
        if _augmented(value):
            added = self._added(statement, [value.parts[0]])
        elif all((one.opname, one.argval) != (container.opname, container.argval) for one in nodes):
            origins = frozenset[str]().union(*map(self._origins_of, self._names(nodes)))
            if origins.isdisjoint({whole, whole + _INDEXED}):
                return None, None
            added, is_direct = None, False
        else:
            operations = [one for one in nodes if one.opname == "BINARY_OP"]
            single = len(operations) == 1 and operations[0].argval in _ADDING
            added = operations[0].parts[1] if single else None
        place = nodes_of(container, key)
        ignored = {str(one.argval) for one in place if self._is_local(one)}
        if not is_direct:
            ignored |= self._carriers_of(whole)
        kind = self._kind(statement, added, container, ignored)
        if not is_direct and kind != "moves":
            return None, None  # perhaps a sum: the next replica reads what this one has written
        constant: Hashable = key.argval if key.opname == "LOAD_CONST" else ANY
        self._found.items[LOCAL if whole[:1] == "@" else whole, constant] |= {kind}
        return whole, kind

    def _kind(
        self,
        statement: Statement,
        added: CodeNode | None,
        owner: CodeNode,
        ignored: Iterable[str] = (),
    ) -> Kind:
        """Return the kind of a change of a number; `added`: what is added, if it is only added to."""
        root = statement.root
        while owner.opname == "LOAD_ATTR":
            owner = owner.parts[0]
        in_loop = any(begin <= root.offset <= end for begin, end in self._loops)
        if added is not None:
            return "moves" if self._is_fixed(added, owner) and not in_loop else "adds"
        known = {"self", owner.argval, root.argval, *ignored}
        body = nodes_of(root.parts[0], *statement.others)
        varies = any(self._is_local(one) and one.argval not in known for one in body)
        return "varies" if varies or in_loop else "moves"

    def _is_fixed(self, value: CodeNode, owner: CodeNode) -> bool:
        """Return whether a value depends on no rows: made of constants, globals and attributes of objects from outside."""
        if value.opname in ("LOAD_CONST", *_GLOBALS, "LOAD_DEREF"):
            return not self._is_local(value)
        if value.opname == "LOAD_ATTR" and self._is_local(value.parts[0]):
            owners = {"self", owner.argval} if self._is_local(owner) else {"self"}
            return value.parts[0].argval in owners
        return value.opname in _PURE and all(self._is_fixed(one, owner) for one in value.parts)

    # -------------------------------------------------------------- tensors

    def _tensors(
        self, statement: Statement, own: str | None, *, moves: bool, computed: bool
    ) -> None:
        """Note the tensors that a statement may write; `moves`: it adds a constant; `computed`: from the old value."""
        root, nodes = statement.root, list(statement.nodes())
        here = Counter(self._names(nodes))

        def note(names: Iterable[str], kind: Kind) -> None:
            for name in [*names] or [LOCAL]:
                self._found.tensors[LOCAL if name[:1] == "@" else name] |= {kind}

        def add(names: Sequence[str], *, only: bool) -> None:
            grows = any(self._loads[name] > 1 for name in names)
            note(names, ("grows" if grows else "adds") if only else "moves")

        arguments = {
            one.parts[0]: one.parts[2:]
            for one in nodes
            if one.opname.startswith("CALL") and one.parts
        }
        for one in nodes:
            if one.opname in ("LOAD_METHOD", "LOAD_ATTR") and _is_in_place(one):
                name, target = str(one.argval), one.parts[0]
                while target.opname.startswith("CALL") and _is_in_place(target.parts[0]):
                    target = target.parts[0].parts[0]  # ``s.mul_(0.9).add_(x)`` writes `s` twice
                receiver = self._name(target)
                names = [receiver] if receiver and not name.startswith("_foreach_") else [*here]
                again = any(here[each] > 1 for each in names)
                if name in _SETTING:
                    note(names, "moves" if again and "copy" in name else "sets")
                else:
                    given = arguments.get(one, ())[:1]
                    is_fixed = bool(given) and given[0].opname == "LOAD_CONST"
                    add(names, only=name in ("add_", "_foreach_add_") and not (again or is_fixed))
            elif one.opname in ("KW_NAMES", "LOAD_CONST") and _names_out(one.argval):
                note(here, "sets")
        operator = _augmented(root.parts[0]) if root.opname.startswith("STORE_") else ""
        is_item = root.opname in ("STORE_SUBSCR", "STORE_SLICE")
        name = (self._name(_first(root.parts[1])) if is_item else own or self._name(root)) or LOCAL
        if is_item or own is not None:
            again = here[name] > 1
            if is_item or not operator:
                note([name], "binds")
            if not operator and (computed or is_item):
                note([name], "moves" if computed or again else "sets")
        if operator:
            add([name], only=operator == "+=" and not (here[name] > 1 or moves))


def _first(container: CodeNode) -> CodeNode:
    """Return the load of a variable or attribute with a container: of `a` for ``a[0]["k"]``."""
    while container.opname == "BINARY_SUBSCR":
        container = container.parts[0]
    return container


def _augmented(value: CodeNode) -> str:
    """Return the operator of ``x += y``, by its new value; empty if the statement is none."""
    return value.argval if value.opname == "BINARY_OP" and value.argval[-1:] == "=" else ""


def _is_log(root: CodeNode, nodes: Sequence[CodeNode]) -> bool:
    """Return whether a statement makes text, calls something that writes a log, or compares with a first value."""
    if any(one.opname.startswith(("FORMAT_", "BUILD_STRING")) for one in nodes):
        return True
    if root.opname.startswith("POP_JUMP"):  # also ``if self.cache is None``
        return "NONE" in root.opname or any(
            one.opname == "IS_OP" or (one.opname == "COMPARE_OP" and one.argval in ("==", "!="))
            for one in nodes
        )
    names = {str(one.argval) for one in nodes if one.opname.startswith("LOAD_")}
    is_call = root.opname == "POP_TOP" and root.parts[0].opname.startswith("CALL")
    return is_call and "backward" not in names and not names.isdisjoint(_LOGS)


def _is_in_place(one: CodeNode) -> bool:
    name = str(one.argval)
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
    name = code.co_name  # of a private method as written: ``__update``
    return not (name.startswith("__") and name.endswith("__")) or name == "__call__"
