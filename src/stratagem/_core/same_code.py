"""A quick check that functions and classes are the same as at an earlier time, and refer to the same objects.

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


class _Missing:
    """Stands for a global variable that does not exist."""


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code, and the functions defined in it, may look up in globals or modules."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_of(constant)))
    return tuple(names)


def is_derived(name: str, kind: type[Any]) -> bool:
    """Return whether a class member is a slot, or derived from other members by Python or a decorator."""
    if kind is types.FunctionType or kind in WRAPPED:
        return False
    if "__get__" in vars(kind) and is_installed(kind.__module__):
        return True
    return (name[:1] == name[-1:] == "_") or name in ("_abc_impl", "_field_defaults")


@final
class SameCode:
    """Identities of all that some functions, classes and modules refer to. Keeps only immutable values alive.

    Args:
        root: a function, or a tuple of functions and classes.
        visited: the functions, classes and modules that `root` leads to; names in modules.

    Raises:
        TypeError: an object cannot be compared by identity without keeping it alive.

    Example:
        >>> def scaled(x):
        ...     return x * scaled.rate
        >>> same = SameCode(scaled, [(scaled, ())])
        >>> same.holds_for(scaled)
        True
        >>> scaled.rate = 2
        >>> same.holds_for(scaled)
        False
    """

    __slots__ = ("_gone", "_ids", "_kept", "_places")

    def __init__(self, root: Any, visited: Iterable[tuple[Any, Sequence[str]]]) -> None:
        # Weak references to objects that no longer exist: others may have their ids.
        self._gone: list[object] = []
        self._kept: dict[int, object] = {}
        self._ids = self._keep(root if type(root) is tuple else (root,))
        self._places: list[tuple[weakref.ref[Any], Sequence[str], tuple[int, ...]]] = []
        for value, names in visited:
            if isinstance(value, type):
                for base in [one for one in value.__mro__ if not is_installed(one.__module__)]:
                    held = vars(base).items()
                    self._add(base, tuple(k for k, one in held if not is_derived(k, type(one))))
            else:
                self._add(value, names)

    def _add(self, value: Any, names: Sequence[str]) -> None:
        reference = weakref.ref(value, self._gone.append)
        self._places.append((reference, names, self._keep(_parts(value, names))))

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
            if value is None:
                return False
            try:
                if tuple(map(id, _parts(value, names))) != ids:
                    return False
            except ValueError:  # a closure variable has no value any more
                return False
        return not self._gone


def _is_immutable(value: object) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_immutable, value)))


def _parts(value: Any, names: Sequence[str]) -> list[object]:
    """Return what a function refers to, or the members of these names of a class or module."""
    parts: list[object]
    if type(value) is types.FunctionType:
        code, held, cells = value.__code__, value.__globals__, value.__closure__
        parts = [code, value.__defaults__, value.__kwdefaults__, value.__dict__ or None]
        parts += map(held.get, names_of(code), repeat(_Missing))
        return [*parts, *[cell.cell_contents for cell in cells]] if cells else parts
    members = vars(value)
    parts = [*map(members.get, names, repeat(_Missing))]
    return [*value.__mro__, *members, *parts] if isinstance(value, type) else parts
