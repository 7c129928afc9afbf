"""Fingerprints: hashable values that differ if an object, or anything that it refers to, has changed.

A function refers to its code, closure variables, default arguments, attributes and the globals that its code names; a
class to its members; an object to its attributes. Immutable values count by value, objects that the strategy manages by
token, tensors by identity, version and memory. Installed code counts by identity. Only objects of other types are
pickled, to be compared by a digest. A fingerprint keeps nothing alive but immutable values.

Where all parts of a function are immutable, installed or sent by token, `Fingerprint.managed_if_same` only compares
identities: a few microseconds, mostly in C.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from stratagem._core import counters
from stratagem._core.installed import is_installed
from stratagem._core.torch_patches.private_api import version_of

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

MOST_VALUES: Final = 256
"""Values in one variable or attribute that are compared one by one; larger ones are compared by a digest."""
MOST_BYTES: Final = 4096
"""Size of a tensor that is compared byte by byte."""
SUMMED_BYTES: Final = 4 << 20
"""Size of a tensor of which all rows of words are summed; of a larger tensor, 64 rows are."""
_WIDTH: Final = 256
"""Words in a row."""

_CONTAINERS: Final = frozenset({tuple, list, set, frozenset, dict, OrderedDict})


@final
class Identity:
    """Stands for one object without keeping it alive; equal only to an `Identity` of the same object."""

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
    """Return the bytes of a small tensor in the processor's memory; sums of a large one, as a matrix of words."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    size = tensor.nbytes
    if not tensor.is_cpu or not size or not tensor.is_contiguous():
        return None
    start = tensor.data_ptr()
    if size <= MOST_BYTES:
        return ctypes.string_at(start, size)
    used = size // (8 * _WIDTH) * (8 * _WIDTH)
    memory: Any = (ctypes.c_char * used).from_address(start)
    words = torch.frombuffer(memory, dtype=torch.int64).view(-1, _WIDTH)
    if size > SUMMED_BYTES:
        words = words[:: len(words) // 64]
    # A write changes the sums of the rows and columns, unless it was made to keep them: 60 µs for 1 MB.
    sums = [hash(words.sum(axis).numpy().tobytes()) for axis in (0, 1)]
    return start, *sums, ctypes.string_at(start + used, size - used)


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


def _places_of(value: Any, names: Sequence[str]) -> list[tuple[Any, Sequence[str]]]:
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


def _parts_of(function: types.FunctionType) -> list[object]:
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


def _is_immutable(value: object) -> bool:
    """Return whether a value, with all that it contains, can never change."""
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_immutable, value)))


def _identities_of(value: Any, names: Sequence[str]) -> list[object]:
    """Return what a function refers to, or the members of these names of a class or module."""
    if type(value) is types.FunctionType:
        return _parts_of(value)
    members = vars(value)
    parts = [*map(members.get, names, repeat(Missing))]
    return [*value.__mro__, *members, *parts] if isinstance(value, type) else parts


class _TooLarge(Exception):
    """A value has too many parts to be compared one by one."""


@final
class Fingerprint:
    """Fingerprint of a function, a class or any other value.

    Args:
        root: the value.
        token_of: returns the token of an object that the strategy manages, None for any other object.
        digest: returns a digest of an object that cannot be compared part by part, and the managed objects in it.
        find_counters: leave counters (`counters.py`) out, and find them.

    Attributes:
        attributes: names of attributes with which code that was found counts.
        counters: owner and name of each counter.
        managed: the managed objects that `root` leads to; the caller clears the list before it keeps the fingerprint.
        can_change: whether a part of `root` can change while `root` remains the same object.
    """

    def __init__(
        self,
        root: Any,
        token_of: Callable[[Any], Hashable | None],
        digest: Callable[[Any], tuple[Hashable, Sequence[Any]]],
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
        self._note_identities(root if type(root) is tuple else (root,))
        self._numbers, self._todo = {}, []

    def _note_identities(self, roots: Sequence[Any]) -> None:
        """Remember the identities of all parts, unless one of them can change inside."""
        self._ids: tuple[int, ...] | None = None
        # Weak references to objects that no longer exist: others may have their ids.
        self._gone: list[object] = []
        self._held: dict[int, object] = {}  # immutable parts; references to others
        is_code = all(isinstance(one, types.FunctionType | type) for one in roots)
        if not self._is_fixed or not is_code or self.counters:
            return
        try:
            self._tokens = [(weakref.ref(one), self._token_of(one)) for one in self.managed]
            self._places = [
                (weakref.ref(place, self._gone.append), own, self._hold(_identities_of(place, own)))
                for value, names in self._todo
                for place, own in _places_of(value, names)
            ]
            self._ids = self._hold(roots)
        except TypeError:  # no weak reference is possible
            return

    def _hold(self, parts: Sequence[object]) -> tuple[int, ...]:
        for one in parts:
            if id(one) not in self._held:
                fixed = _is_immutable(one)
                self._held[id(one)] = one if fixed else weakref.ref(one, self._gone.append)
        return tuple(map(id, parts))

    def managed_if_same(self, root: Any) -> list[Any] | None:
        """Return the managed objects if a quick check shows that `root` has this fingerprint still; else None.

        None says nothing: compare a new fingerprint.
        """
        if self._ids != tuple(map(id, root if type(root) is tuple else (root,))):
            return None
        for reference, names, ids in self._places:
            place = reference()
            if place is None or tuple(map(id, _identities_of(place, names))) != ids:
                return None
        held = [reference() for reference, _ in self._tokens]
        same = [self._token_of(one) for one in held] == [token for _, token in self._tokens]
        return held if same and not self._gone else None

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
        places = [(vars(place), own) for place, own in _places_of(value, names)]
        found = [(one, self._part(held[one])) for held, own in places for one in own if one in held]
        return Identity(value), *found

    def _function(self, function: types.FunctionType) -> Hashable:
        parts, names = _parts_of(function), names_of(function.__code__)
        found = list(counters.counted_in(function)) if self._find_counters else ()
        self.attributes |= counters.attributes_in(function.__code__)
        if found:
            self.counters += found
            counted = {name for _, name in found}
            labels = ("", "", "", "", *names, *function.__code__.co_freevars)
            parts = [one for name, one in zip(labels, parts, strict=True) if name not in counted]
            names = tuple(name for name in names if name not in counted)
        return tuple([None if one is Missing else self._part(one, names) for one in parts])

    def _packed(self, value: Any) -> Hashable:
        self.can_change, self._is_fixed = True, False
        found, managed = self._digest(value)
        self.managed += managed
        return "packed", found


@functools.lru_cache(maxsize=1024)
def _is_ordinary(kind: type[Any]) -> bool:
    """Return whether an object of this class pickles as its ``__dict__``, and nothing else."""
    plain: Any = object
    like: Any = Fingerprint  # memory layout of every class without slots whose base is `object`
    return kind is types.SimpleNamespace or (
        (kind.__basicsize__, kind.__dictoffset__) == (like.__basicsize__, like.__dictoffset__)
        and kind.__reduce_ex__ is plain.__reduce_ex__
        and kind.__reduce__ is plain.__reduce__
        and kind.__getstate__ in (plain.__getstate__, vars(nn.Module).get("__getstate__"))
    )
