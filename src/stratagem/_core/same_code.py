"""References of functions and classes to other objects, and a quick check that they are unchanged.

A fingerprint (`fingerprints.py`) walks through everything that a function leads to. `SameCode` only reads what functions
refer to and compares identities: a few microseconds, mostly in C. It is for functions whose parts are all
immutable, installed or sent by token; if one of them can change inside, there is no quick check.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Final, final

import torch

from stratagem._core.installed import is_installed

PLAIN: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
"""Types of immutable values that lead to no other object."""

WRAPPED: Final[dict[type, Callable[[Any], Iterable[Any]]]] = {
    weakref.ReferenceType: lambda reference: (reference(),),
    types.MethodType: lambda bound: (bound.__func__, bound.__self__),
    functools.partial: lambda bound: (bound.func, bound.args, bound.keywords),
    staticmethod: lambda member: (member.__func__,),
    classmethod: lambda member: (member.__func__,),
    property: lambda member: (member.fget, member.fset, member.fdel),
    functools.cached_property: lambda member: (member.func,),
    type(functools.cache(len)): lambda cached: (cached.__wrapped__,),
}
"""Types of objects around functions: what they lead to."""


class Missing:
    """Stands for a variable without a value."""


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code, and the functions defined in it, may look up in globals or modules."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_of(constant)))
    return tuple(names)


def _is_derived(name: str, kind: type[Any]) -> bool:
    """Return whether a class member is a slot, or derived from other members by Python or a decorator."""
    if kind is types.FunctionType or kind in WRAPPED:
        return False
    if "__get__" in vars(kind) and is_installed(kind.__module__):
        return True
    return (name[:1] == name[-1:] == "_") or name in ("_abc_impl", "_field_defaults")


def places_of(value: Any, names: Sequence[str]) -> list[tuple[Any, Sequence[str]]]:
    """Return the user's classes that a class is made of, each with the names of its members.

    Of a function or a module: itself, with the names that were asked for.
    """
    if not isinstance(value, type):
        return [(value, names)]
    bases = [base for base in value.__mro__ if not is_installed(base.__module__)]
    return [
        (base, [name for name, one in vars(base).items() if not _is_derived(name, type(one))])
        for base in bases
    ]


def parts_of(function: types.FunctionType) -> list[object]:
    """Return what a function refers to: code, default arguments, attributes, globals, closure variables."""
    code, held, cells = function.__code__, function.__globals__, function.__closure__
    parts: list[object]
    parts = [code, function.__defaults__, function.__kwdefaults__, function.__dict__ or None]
    parts += map(held.get, names_of(code), repeat(Missing))
    try:
        return [*parts, *[cell.cell_contents for cell in cells]] if cells else parts
    except ValueError:  # one of the variables has no value yet
        return [*parts, *map(_contents_of, cells or ())]


def _contents_of(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return Missing


@final
class SameCode:
    """Identities of all that some functions, classes and modules refer to. Keeps only immutable values alive.

    Args:
        root: a function, or a tuple of functions and classes.
        visited: the functions, classes and modules that `root` leads to; names in modules.

    Raises:
        TypeError: an object cannot be compared by identity without keeping it alive.
    """

    __slots__ = ("_gone", "_ids", "_kept", "_places")

    def __init__(self, root: Any, visited: Iterable[tuple[Any, Sequence[str]]]) -> None:
        # Weak references to objects that no longer exist: others may have their ids.
        self._gone: list[object] = []
        self._kept: dict[int, object] = {}
        self._ids = self._keep(root if type(root) is tuple else (root,))
        self._places: list[tuple[weakref.ref[Any], Sequence[str], tuple[int, ...]]] = []
        for value, names in visited:
            for place, own in places_of(value, names):
                reference = weakref.ref(place, self._gone.append)
                self._places.append((reference, own, self._keep(_parts(place, own))))

    def _keep(self, parts: Sequence[object]) -> tuple[int, ...]:
        for one in parts:
            if id(one) not in self._kept:
                is_fixed = _is_immutable(one)
                self._kept[id(one)] = one if is_fixed else weakref.ref(one, self._gone.append)
        return tuple(map(id, parts))

    def holds_for(self, root: Any) -> bool:
        """Return whether this root leads to the same objects as before. False may be wrong, True is not."""
        if tuple(map(id, root if type(root) is tuple else (root,))) != self._ids:
            return False
        for reference, names, ids in self._places:
            value = reference()
            if value is None or tuple(map(id, _parts(value, names))) != ids:
                return False
        return not self._gone


def _is_immutable(value: object) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_immutable, value)))


def _parts(value: Any, names: Sequence[str]) -> list[object]:
    """Return what a function refers to, or the members of these names of a class or module."""
    if type(value) is types.FunctionType:
        return parts_of(value)
    members = vars(value)
    parts = [*map(members.get, names, repeat(Missing))]
    return [*value.__mro__, *members, *parts] if isinstance(value, type) else parts
