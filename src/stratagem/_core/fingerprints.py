"""Fingerprints: hashable values that differ if an object, or anything that it refers to, has changed.

A function refers to its code, closure variables, default arguments, attributes and the globals that its code names; a
class to its members; an object to its attributes. Immutable values count by value, objects that the strategy manages by
token, tensors by identity, version and memory. Installed code counts by identity. Only objects of other types are
pickled, to be compared by a digest. A fingerprint keeps nothing alive but immutable values.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from stratagem._core import counters
from stratagem._core.installed import is_installed
from stratagem._core.same_code import (
    PLAIN,
    WRAPPED,
    Missing,
    SameCode,
    names_of,
    parts_of,
    places_of,
)
from stratagem._core.torch_patches.private_api import version_of

MOST_VALUES: Final = 256
"""Values in one variable or attribute that are compared one by one; larger ones are compared by a digest."""
MOST_BYTES: Final = 4096
"""Size of a tensor that is compared byte by byte."""
SUMMED_BYTES: Final = 4 << 20
"""Size of a tensor that is compared by sums of all its parts; of a larger tensor, 64 parts are compared."""
_WIDTH: Final = 256
"""Words in a part."""

_CONTAINERS: Final = frozenset({tuple, list, set, frozenset, dict, OrderedDict})

Digest = Callable[[Any], tuple[Hashable, Sequence[Any]]]
"""Returns a digest of what an object pickles to, and the managed objects that it leads to."""


@final
class Identity:
    """Stands for one object without keeping it alive; equal only to an `Identity` of the same object."""

    __slots__ = ("_of",)

    def __init__(self, obj: object) -> None:
        try:
            self._of: object = weakref.ref(obj)  # the same one for as long as the object exists
        except TypeError:
            self._of = obj

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._of is other._of

    @override
    def __hash__(self) -> int:
        return id(self._of)


def plain_fingerprint(value: Any) -> tuple[type, Hashable]:
    """Return a hashable value for an immutable value, which tells 1 from True and 0.0 from -0.0."""
    kind = type(value)
    return (kind, repr(value)) if kind is float or kind is complex else (kind, value)


def memory_of(tensor: Tensor) -> Hashable:
    """Return the bytes of a small tensor in the processor's memory; sums, or parts, of a large one."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    size = tensor.nbytes
    if not tensor.is_cpu or not size or not tensor.is_contiguous():
        return None
    start = tensor.data_ptr()
    if size <= MOST_BYTES:
        return ctypes.string_at(start, size)
    if size <= SUMMED_BYTES:
        return start, *_sums(start, size)
    places = [start + number * (size - 64) // 63 for number in range(64)]
    return start, *[ctypes.string_at(place, 64) for place in places]


def _sums(start: int, size: int) -> tuple[Hashable, ...]:
    """Return sums of the rows and of the columns of memory, as a matrix of words: 60 µs for 1 MB.

    A write changes them, unless it was made to keep them.
    """
    used = size // (8 * _WIDTH) * (8 * _WIDTH)
    memory: Any = (ctypes.c_char * used).from_address(start)
    words = torch.frombuffer(memory, dtype=torch.int64).view(-1, _WIDTH)
    sums = [hash(words.sum(axis).numpy().tobytes()) for axis in (0, 1)]
    return *sums, ctypes.string_at(start + used, size - used)


class _TooLarge(Exception):
    """A value has too many parts to be compared one by one."""


@final
class Fingerprint:
    """Fingerprint of a function, a class or any other value.

    Args:
        root: the value.
        token_of: returns the token of an object that the strategy manages, None for any other object.
        digest: returns the digest of an object that cannot be compared part by part.
        find_counters: leave counters (`counters.py`) out, and find them.

    Attributes:
        attributes: names of attributes with which code that was found counts.
        counters: owner and name of each counter.
        managed: the managed objects that `root` leads to; the caller clears the list before it keeps the fingerprint.
        can_change: whether a part of `root` can change while `root` remains the same object.
    """

    __slots__ = (
        "_digest",
        "_find_counters",
        "_found",
        "_is_fixed",
        "_left",
        "_numbers",
        "_same",
        "_todo",
        "_token_of",
        "_tokens",
        "attributes",
        "can_change",
        "counters",
        "managed",
    )

    def __init__(
        self,
        root: Any,
        token_of: Callable[[Any], Hashable | None],
        digest: Digest,
        *,
        find_counters: bool = False,
    ) -> None:
        self.managed: list[Any] = []
        self.counters: list[tuple[Any, str]] = []
        self._find_counters = find_counters
        self.attributes = counters.attributes_counted_by(root) if find_counters else frozenset()
        self.can_change = False
        self._token_of = token_of
        self._digest = digest
        self._numbers: dict[Hashable, int] = {}  # by id: functions, classes and objects found
        self._todo: list[tuple[Any, Sequence[str]]] = []  # functions and classes; names in modules
        self._left = 0  # values that may still be compared one by one
        self._is_fixed = True  # whether all parts are code, immutable values and managed objects
        if type(root) is types.FunctionType:  # visited, even if it is installed
            self._numbers[id(root)] = 0
            self._todo.append((root, ()))
        found = [self._part(root)]
        for code, names in self._todo:  # it grows
            found.append(self._visit(code, names))
        self._found = tuple(found)
        self._same: SameCode | None = None
        self._tokens: list[tuple[weakref.ref[Any], Hashable]] = []
        self._prepare_quick_check(root)
        self._numbers, self._todo = {}, []

    def _prepare_quick_check(self, root: Any) -> None:
        every = root if type(root) is tuple else (root,)
        is_code = all(isinstance(one, types.FunctionType | type) for one in every)
        if not self._is_fixed or not is_code or self.counters:
            return
        try:
            self._tokens = [(weakref.ref(one), self._token_of(one)) for one in self.managed]
            self._same = SameCode(root, self._todo)
        except TypeError:  # no weak reference is possible
            return

    def managed_if_same(self, root: Any) -> list[Any] | None:
        """Return the managed objects if a quick check shows that `root` has this fingerprint still; else None.

        None says nothing: compare a new fingerprint.
        """
        if self._same is None or not self._same.holds_for(root):
            return None
        held = [reference() for reference, _ in self._tokens]
        if [self._token_of(one) for one in held] != [token for _, token in self._tokens]:
            return None
        return held

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self._found == other._found

    @override
    def __hash__(self) -> int:
        return hash(self._found)

    def _part(self, value: Any, names: Sequence[str] = ()) -> Hashable:
        """Return the fingerprint of one variable or attribute: part by part, or by a digest if it is large."""
        if isinstance(value, types.ModuleType):
            return self._code(value, names)
        self._left = MOST_VALUES
        try:
            return self._walk(value)
        except _TooLarge:
            return self._packed(value)

    def _walk(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in PLAIN:
            return plain_fingerprint(value)
        if kind in _CONTAINERS:
            return self._container(kind, value)
        if kind is types.FunctionType or isinstance(value, (type, types.ModuleType)):
            return self._code(value)
        if kind is Identity or kind is types.CodeType:
            return kind, value
        token = self._token_of(value)
        if token is not None:
            self.managed.append(value)
            return "token", token
        if kind in WRAPPED:
            self._is_fixed = False
            return kind, *[self._walk(one) for one in WRAPPED[kind](value)]
        if kind is types.BuiltinFunctionType:
            owner = value.__self__
            is_method = owner is not None and not isinstance(owner, types.ModuleType)
            self._is_fixed &= not is_method
            return (value.__name__, self._walk(owner)) if is_method else Identity(value)
        if isinstance(value, (enum.Enum, torch.jit.ScriptFunction)):
            return Identity(value)
        self.can_change, self._is_fixed = True, False
        if isinstance(value, Tensor):
            state = version_of(value), value.requires_grad, value.shape, value.dtype
            return Identity(value), state, memory_of(value)
        if not _is_ordinary(kind):  # type: ignore[arg-type]
            return self._packed(value)
        if id(value) in self._numbers:
            return "again", self._numbers[id(value)]
        self._numbers[id(value)] = len(self._numbers)
        held = vars(value)
        if self._find_counters:
            names = self.attributes | counters.counted_attributes(kind)  # type: ignore[arg-type]
            counted = {name for name in names if counters.is_counter(held.get(name))}
            if counted:
                self.counters += [(value, name) for name in sorted(counted)]
                held = {name: one for name, one in held.items() if name not in counted}
        return self._code(kind), self._container(dict, held)

    def _container(self, kind: Any, value: Any) -> Hashable:
        if kind is not tuple and kind is not frozenset:
            self.can_change, self._is_fixed = True, False
        self._left -= 1 + len(value)
        if self._left < 0:
            raise _TooLarge
        if kind is dict or kind is OrderedDict:
            pairs = value.items()
            return kind, *[
                (name if type(name) is str else self._walk(name), self._walk(one))
                for name, one in pairs
            ]
        found = [self._walk(one) for one in value]
        return kind, frozenset(found) if kind is set or kind is frozenset else tuple(found)

    def _code(self, value: Any, names: Sequence[str] = ()) -> Hashable:
        """Return installed code itself; a number for a function with variables, or code of the user."""
        is_module = isinstance(value, types.ModuleType)
        key: Hashable = (id(value), names) if is_module else id(value)
        if key not in self._numbers:
            own = value.__name__ if is_module else value.__module__
            if is_installed(own) and not getattr(value, "__closure__", None):
                return Identity(value)
            self._numbers[key] = len(self._numbers)
            self._todo.append((value, names))
            self.can_change = True
        return "code", self._numbers[key]

    def _visit(self, value: Any, names: Sequence[str]) -> Hashable:
        """Return the fingerprint of a function, of a class, or of these names in a module."""
        if type(value) is types.FunctionType:
            return self._function(value)
        if self._find_counters and isinstance(value, type):
            self.attributes |= counters.counted_attributes(value)
        places = [(vars(place), own) for place, own in places_of(value, names)]
        found = [(one, self._part(held[one])) for held, own in places for one in own if one in held]
        return Identity(value), *found

    def _function(self, function: types.FunctionType) -> Hashable:
        parts, names = parts_of(function), names_of(function.__code__)
        found = list(counters.counted_in(function)) if self._find_counters else ()
        self.attributes |= counters.attributes_in(function.__code__)
        if found:
            self.counters += found
            counted = {name for _, name in found}
            cells = function.__code__.co_freevars
            before = len(parts) - len(names) - len(cells)
            labels = (*[""] * before, *names, *cells)
            parts = [one for name, one in zip(labels, parts, strict=True) if name not in counted]
            names = tuple(name for name in names if name not in counted)
        return tuple([None if one is Missing else self._part(one, names) for one in parts])

    def _packed(self, value: Any) -> Hashable:
        self.can_change, self._is_fixed = True, False
        found, managed = self._digest(value)
        self.managed += managed
        return "packed", found


class _Ordinary:
    """Has the memory layout of every class without slots whose base is `object`."""


@functools.lru_cache(maxsize=1024)
def _is_ordinary(kind: type[Any]) -> bool:
    """Return whether an object of this class pickles as its ``__dict__``, and nothing else."""
    plain: Any = object
    own: Any = kind.__getstate__
    return kind is types.SimpleNamespace or (
        kind.__basicsize__ == _Ordinary.__basicsize__
        and kind.__dictoffset__ == _Ordinary.__dictoffset__
        and kind.__reduce_ex__ is plain.__reduce_ex__
        and kind.__reduce__ is plain.__reduce__
        and own in (plain.__getstate__, vars(nn.Module).get("__getstate__"))
    )
