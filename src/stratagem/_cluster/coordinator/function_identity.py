"""When is a function that is scheduled again still the same one?

A function is known by its *mark*: its code, and what it captures (closure cells, defaults, the globals
its code names). Plain values count by value; the strategy's own objects and everything installed by identity;
functions, classes and modules of the user's by what is in them (of a module: what the function's code
names); tensors by identity and version, small ones by value. Anything else it captures (a list, a dictionary, an
object of yours) may have changed inside without a trace: such a function has no mark.

A worker has each class once, as it was told last (`FunctionIdentifier.epoch` counts the changes seen), and a function it
has keeps using it. So what was sent before such a change is not sent knowledge any more.

Marks hold ids. What they belong to is either kept (code, classes, modules) or, for the strategy's
objects and tensors, watched by whoever keeps the mark: those may be large, and must be free to go.
"""

from __future__ import annotations

import enum
import functools
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast, final

import torch

from stratagem._cluster.coordinator.capture_check import (
    MISSING,
    CaptureCheck,
    CaptureCountCheck,
    mark_tensor,
)
from stratagem._cluster.coordinator.remote_values import PerWorkerValues

DEPTH: Final = 24
"""Functions that name each other are looked into this deep; those that go deeper have no mark."""

BY_VALUE: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_BY_IDENTITY: Final = frozenset(
    {
        types.BuiltinFunctionType,
        types.MemberDescriptorType,
        types.GetSetDescriptorType,
        type(NamedTuple("Pair", [("first", int)]).first),  # type: ignore[attr-defined]
        torch.dtype,
        torch.device,
        torch.Size,
    }
)
_UNWRAP: Final[dict[type, Callable[[Any], tuple[Any, ...]]]] = {
    staticmethod: lambda member: (member.__func__,),
    classmethod: lambda member: (member.__func__,),
    property: lambda member: (member.fget, member.fset, member.fdel),
}


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
class CaptureScan:
    """What is noted while a function is looked at."""

    __slots__ = ("_noted", "checks", "entered", "handles", "is_quick", "kept", "seen")

    def __init__(self) -> None:
        self.checks: list[CaptureCheck | CaptureCountCheck] = []
        self._noted: set[tuple[int, str | None]] = set()
        self.is_quick = True  # whether the checks are all there is to it
        self.handles: list[
            Any
        ] = []  # tensors and objects of the strategy's whose ids are in the mark
        self.kept: list[object] = []  # the others whose ids are in the mark
        self.seen: list[types.FunctionType] = []
        self.entered: list[object] = []  # classes and modules looked into

    def note(self, check: CaptureCheck | CaptureCountCheck) -> None:
        """One more check, if none is like it: methods of a class name the same things again and again."""
        if check.key not in self._noted:
            self._noted.add(check.key)
            self.checks.append(check)


@final
class FunctionIdentifier:
    """Makes marks.

    Args:
        describe: a token for an object of the strategy's, None for any other.

    Example:
        >>> marker = FunctionIdentifier(lambda obj: None)
        >>> at_least = functools.partial(functools.partial, max)
        >>> marker.mark(at_least(1), CaptureScan()) == marker.mark(at_least(1), CaptureScan())
        True
        >>> marker.mark(at_least(1), CaptureScan()) == marker.mark(at_least(2), CaptureScan())
        False
    """

    def __init__(self, describe: Callable[[object], Hashable | None]) -> None:
        self._describe = describe
        self._classes: weakref.WeakKeyDictionary[type, Hashable] = weakref.WeakKeyDictionary()
        self.epoch = 0

    def mark(self, obj: Any, look: CaptureScan, depth: int = 0) -> Hashable:
        """The mark of a function, or of something it captures.

        Raises:
            ChangeableError: it has none.
        """
        kind = type(obj)
        if kind in BY_VALUE:
            return mark_value(obj)
        if kind is types.FunctionType:
            return self._mark_function(obj, look, depth)
        if kind in _BY_IDENTITY or isinstance(obj, enum.Enum):
            look.kept.append(obj)
            return id(obj)
        if isinstance(obj, type):
            return self._mark_class(obj, look, depth)
        if kind is types.ModuleType:
            return self._mark_module(obj, (), look, depth)
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
            return mark_tensor(obj)
        raise ChangeableError

    def _is_own(self, obj: object) -> bool:
        return type(obj) is PerWorkerValues or self._describe(obj) is not None

    def _mark_function(
        self, function: types.FunctionType, look: CaptureScan, depth: int
    ) -> Hashable:
        code = function.__code__
        if is_installed(function.__module__):
            look.kept.append(function)
            return id(function)
        look.kept.append(code)
        if depth > DEPTH:
            raise ChangeableError
        look.seen.append(function)
        parts: list[Hashable] = [id(code)]
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not yet filled
                look.is_quick = False
                parts.append(None)
            else:
                names = names_of(code)
                parts.append(self._mark_captured(cell, None, content, look, depth, names))
        if function.__defaults__ or function.__kwdefaults__:
            look.is_quick = False
            pairs = tuple(sorted((function.__kwdefaults__ or {}).items()))
            parts.append(self.mark((function.__defaults__ or (), pairs), look, depth + 1))
        space = function.__globals__
        for name in names_of(code):
            found = space.get(name, MISSING)
            if found is not MISSING:
                names = names_of(code)
                parts.append(self._mark_captured(space, name, found, look, depth, names))
            else:
                look.note(CaptureCheck(space, name, MISSING, is_handle=False))
        if function.__dict__:
            parts += self._mark_members(function.__dict__, look, depth)
        return tuple(parts)

    def _mark_class(self, kind: type, look: CaptureScan, depth: int) -> Hashable:
        """A class of the user's: with what it and its bases have."""
        look.kept.append(kind)
        if is_installed(kind.__module__) or any(kind is one for one in look.entered):
            return id(kind)
        look.entered.append(kind)
        parts: list[Hashable] = [id(kind)]
        for base in kind.__mro__:
            if is_installed(base.__module__):
                continue
            members = vars(base)
            self._note_class(base, members)
            parts += self._mark_members(members, look, depth)
        return tuple(parts)

    def _note_class(self, kind: type, members: Mapping[str, Any]) -> None:
        """Whether a class is what it was when it was last looked at, by any function."""
        now = tuple(
            (name, mark_value(value) if type(value) in BY_VALUE else id(value))
            for name, value in members.items()
        )
        if self._classes.setdefault(kind, now) != now:
            self._classes[kind] = now
            self.epoch += 1

    def _mark_module(
        self, module: types.ModuleType, names: Sequence[str], look: CaptureScan, depth: int
    ) -> Hashable:
        """A module of the user's: with those of its contents that a function's code names."""
        look.kept.append(module)
        if is_installed(module.__name__):
            return id(module)
        if not names:  # who names them is not known
            raise ChangeableError
        space = vars(module)
        parts: list[Hashable] = [id(module)]
        for name in names:
            found = space.get(name, MISSING)
            if found is MISSING:
                look.note(CaptureCheck(space, name, MISSING, is_handle=False))
            elif found is not module:
                parts.append(self._mark_captured(space, name, found, look, depth + 1, names))
        return tuple(parts)

    def _mark_members(
        self, members: Mapping[str, Any], look: CaptureScan, depth: int
    ) -> list[Hashable]:
        look.note(CaptureCountCheck(members))
        parts: list[Hashable] = []
        for name, value in members.items():
            parts.append(name)
            inner = _UNWRAP.get(type(value))
            if inner is not None:
                # The wrapper by identity, what it wraps by what that sees.
                look.kept.append(value)
                look.note(CaptureCheck(members, name, value, is_handle=False))
                parts += (id(value), *(self.mark(one, look, depth + 1) for one in inner(value)))
            elif type(value) not in BY_VALUE and not _may_change(name, value):
                look.kept.append(value)
                look.note(CaptureCheck(members, name, value, is_handle=False))
                parts.append(id(value))
            else:
                parts.append(self._mark_captured(members, name, value, look, depth))
        return parts

    def _mark_captured(
        self,
        holder: Any,
        name: str | None,
        obj: Any,
        look: CaptureScan,
        depth: int,
        names: Sequence[str] = (),
    ) -> Hashable:
        """Marks what a function captures; a function already being looked at counts by its code."""
        # A captured tensor inside a tuple can change without the tuple being another one.
        if type(obj) is tuple:
            look.is_quick = False
        is_seen = type(obj) is types.FunctionType and any(obj is one for one in look.seen)
        before = len(look.handles)
        if is_seen:
            mark: Hashable = id(obj.__code__)
        elif type(obj) is types.ModuleType:
            mark = self._mark_module(obj, names, look, depth)
        else:
            mark = self.mark(obj, look, depth + 1)
        is_handle = len(look.handles) > before and look.handles[-1] is obj
        plain_tensor = is_handle and isinstance(obj, torch.Tensor) and type(mark) is tuple
        own = cast("tuple[Hashable, ...]", mark) if plain_tensor else None
        look.note(CaptureCheck(holder, name, obj, mark=own, is_handle=is_handle))
        return mark


def _may_change(name: str, member: object) -> bool:
    """Whether a class's member is more than what Python or a decorator noted about the class."""
    if type(member) is types.FunctionType or isinstance(member, type):
        return True
    if name.startswith("_") and name.endswith("_"):
        return False
    return name not in ("_abc_impl", "_field_defaults")  # of abstract classes and named tuples


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
