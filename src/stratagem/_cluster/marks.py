"""When is a function that is scheduled again still the same one?

A function is known by its *mark*: its code, and what it captures (closure cells, defaults, the globals
its code names). Plain values count by value; the strategy's own objects, modules, classes and functions
by identity; tensors by identity and version. Anything else it captures (a list, a dictionary, an object
of yours) may have changed inside without a trace: such a function has no mark.

Marks hold ids. What they belong to is either kept (code, classes, modules) or, for the strategy's
objects and tensors, watched by whoever keeps the mark: those may be large, and must be free to go.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Final, final

import torch

from stratagem._cluster.remote import PerWorkerValues

DEPTH: Final = 8
"""Functions that name each other are looked into this deep; beyond it they count by their code."""

_MISSING: Final = object()

BY_VALUE: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_BY_IDENTITY: Final = frozenset(
    {types.ModuleType, types.BuiltinFunctionType, type, torch.dtype, torch.device, torch.Size}
)


def mark_value(obj: Any) -> Hashable:
    """A mark of a number or text; 0.0 and -0.0, True and 1 have different ones.

    Example:
        >>> mark_value(0.0) == mark_value(-0.0), mark_value(2) == mark_value(2)
        (False, True)
    """
    kind = type(obj)
    return (kind, repr(obj)) if kind is float or kind is complex else (kind, obj)


class ChangeableError(Exception):
    """The function captures something whose changes cannot be seen."""


@final
class Check:
    """One thing a function captures, as it was when the function was looked at.

    Args:
        holder: a cell, or the globals.
        name: of a global.
        found: what was there.
        version: of a tensor; -1 for everything else.
        is_handle: a tensor or an object of the strategy's, which is not kept alive by this.
    """

    __slots__ = ("_found", "_holder", "_name", "_version", "is_handle")

    def __init__(
        self, holder: Any, name: str | None, found: Any, *, version: int, is_handle: bool
    ) -> None:
        self._holder = holder
        self._name = name
        self._found: Any = weakref.ref(found) if is_handle else found
        self._version = version
        self.is_handle = is_handle

    def now(self) -> Any:
        """What is there now."""
        if self._name is not None:
            return self._holder.get(self._name, _MISSING)
        return self._holder.cell_contents

    def is_same(self, now: Any) -> bool:
        """Whether this is what was found, unchanged."""
        found = self._found() if self.is_handle else self._found
        if found is None and self.is_handle:
            return False  # it is gone; None now is another thing
        return now is found and (self._version < 0 or now._version == self._version)


@final
class Look:
    """What is noted while a function is looked at."""

    __slots__ = ("checks", "handles", "is_quick", "kept", "seen")

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.is_quick = True  # whether the checks are all there is to it
        self.handles: list[
            Any
        ] = []  # tensors and objects of the strategy's whose ids are in the mark
        self.kept: list[object] = []  # the others whose ids are in the mark
        self.seen: list[types.FunctionType] = []


@final
class Marker:
    """Makes marks.

    Args:
        describe: a token for an object of the strategy's, None for any other.

    Example:
        >>> marker = Marker(lambda obj: None)
        >>> at_least = functools.partial(functools.partial, max)
        >>> marker.mark(at_least(1), Look()) == marker.mark(at_least(1), Look())
        True
        >>> marker.mark(at_least(1), Look()) == marker.mark(at_least(2), Look())
        False
    """

    def __init__(self, describe: Callable[[object], Hashable | None]) -> None:
        self._describe = describe

    def mark(self, obj: Any, look: Look, depth: int = 0) -> Hashable:
        """The mark of a function, or of something it captures.

        Raises:
            ChangeableError: it has none.
        """
        kind = type(obj)
        if kind in BY_VALUE:
            return mark_value(obj)
        if kind is types.FunctionType:
            return self._mark_function(obj, look, depth)
        if kind in _BY_IDENTITY or isinstance(obj, type):
            look.kept.append(obj)
            return id(obj)
        if kind is tuple:
            return tuple(self.mark(item, look, depth) for item in obj)
        if kind is functools.partial:
            look.is_quick = False
            return (
                "partial",
                self.mark(obj.func, look, depth),
                self.mark(obj.args, look, depth),
                self.mark(tuple(sorted(obj.keywords.items())), look, depth),
            )
        if kind is types.MethodType:
            look.is_quick = False
            return (
                "method",
                self.mark(obj.__func__, look, depth),
                self.mark(obj.__self__, look, depth),
            )
        if self._is_own(obj):
            look.handles.append(obj)
            return id(obj)
        if isinstance(obj, torch.Tensor):
            look.handles.append(obj)
            return id(obj), obj._version
        raise ChangeableError

    def _is_own(self, obj: object) -> bool:
        return type(obj) is PerWorkerValues or self._describe(obj) is not None

    def _mark_function(self, function: types.FunctionType, look: Look, depth: int) -> Hashable:
        code = function.__code__
        if is_installed(function.__module__):
            look.kept.append(function)
            return id(function)
        look.kept.append(code)
        if depth > DEPTH:
            return id(code)
        look.seen.append(function)
        parts: list[Hashable] = [id(code)]
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not yet filled
                look.is_quick = False
                parts.append(None)
            else:
                parts.append(self._mark_captured(cell, None, content, look, depth))
        if function.__defaults__ or function.__kwdefaults__:
            look.is_quick = False
            pairs = tuple(sorted((function.__kwdefaults__ or {}).items()))
            parts.append(self.mark((function.__defaults__ or (), pairs), look, depth + 1))
        space = function.__globals__
        for name in names_of(code):
            found = space.get(name, _MISSING)
            if found is not _MISSING:
                parts.append(self._mark_captured(space, name, found, look, depth))
            else:
                look.checks.append(Check(space, name, _MISSING, version=-1, is_handle=False))
        return tuple(parts)

    def _mark_captured(
        self, holder: Any, name: str | None, obj: Any, look: Look, depth: int
    ) -> Hashable:
        """Marks what a function captures; a function already being looked at counts by its code."""
        # A captured tensor inside a tuple can change without the tuple being another one.
        if type(obj) is tuple:
            look.is_quick = False
        is_seen = type(obj) is types.FunctionType and any(obj is one for one in look.seen)
        before = len(look.handles)
        mark = id(obj.__code__) if is_seen else self.mark(obj, look, depth + 1)
        is_handle = len(look.handles) > before and look.handles[-1] is obj
        plain_tensor = is_handle and isinstance(obj, torch.Tensor) and type(mark) is tuple
        version = obj._version if plain_tensor else -1
        look.checks.append(Check(holder, name, obj, version=version, is_handle=is_handle))
        return mark


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Global names a function's code, and the functions defined in it, may look up."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_of(constant)))
    return tuple(names)


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(sorted(path + "/" for path in found))


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module is part of the installation, so that every task has it.

    Example:
        >>> is_installed("torch.nn"), is_installed("__main__")
        (True, False)
    """
    if module is None or module == "__main__":
        return False
    if module == "stratagem" or module.startswith("stratagem."):
        return True
    found = sys.modules.get(module)
    if found is None:
        return False
    file = getattr(found, "__file__", None)
    return file is None or str(file).startswith(_installed_roots())
