"""A module's attribute as it was seen: enough to tell later whether it is still that, and nothing kept alive.

Numbers and texts count by value; lists, dicts, sets and objects by what is in them, if that is not much;
tensors by identity and version; everything else by identity. Objects are remembered by their ids, which
stay theirs while a weak reference to each says that it lives: a model that looks at itself through one of
its attributes can still be freed.
"""

from __future__ import annotations

import enum
import functools
import math
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.torch_patches.private_api import version_of

MOST_VALUES: Final = 64
"""Values in one attribute that are compared at every `schedule` (10 µs); of a larger list, dict or object
a change inside is not noticed."""

MOST_BYTES: Final = 4096
"""The same for a NumPy array."""

PLAIN: Final = frozenset({type(None), bool, int, str, bytes})
_KEPT: Final = frozenset({torch.dtype, torch.device, torch.Size, types.ModuleType, range, slice})
_ROWS: Final = frozenset({list, tuple, deque})
_SETS: Final = frozenset({set, frozenset})
_DICTS: Final = frozenset({dict, OrderedDict, defaultdict})
_FIXED: Final = frozenset({tuple, frozenset})
_BY_IDENTITY: Final = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    enum.Enum,
    weakref.ref,
)
_OBJECT: Final = object()


class _TooMuchError(Exception):
    """There is more in a value than is looked at."""


@final
class AttributeSnapshot:
    """A value as it was when it was looked at.

    Args:
        value: what to look at.
        is_handle: whether an object is one that workers have their own view of.

    Attributes:
        is_plain: a number, a text, a truth value or None.
        may_change: it can change inside, without being assigned anew; a later look would show it.
        is_opaque: it can change inside, and no look would show it.

    Example:
        >>> settings = {"temperature": 1.0}
        >>> before = AttributeSnapshot(settings, lambda obj: False)
        >>> settings["temperature"] = 2.0
        >>> before.is_of(settings), before.may_change, before.is_plain
        (False, True, False)
    """

    __slots__ = (
        "_is_handle",
        "_left",
        "_references",
        "_seen",
        "is_opaque",
        "is_plain",
        "may_change",
    )

    def __init__(self, value: Any, is_handle: Callable[[object], bool]) -> None:
        self._is_handle = is_handle
        self._references: list[weakref.ref[Any]] = []
        self._left = MOST_VALUES
        self.is_plain = type(value) in PLAIN or type(value) is float
        self.may_change = self.is_opaque = False
        try:
            self._seen = self._look(value)
        except (_TooMuchError, RecursionError):
            self._references.clear()
            self.is_opaque, self.may_change = True, False
            self._seen = self._identity(value)

    def is_of(self, value: Any) -> bool:
        """Whether `value` is what was seen, unchanged as far as can be seen."""
        return self.is_same(AttributeSnapshot(value, self._is_handle))

    def is_same(self, other: AttributeSnapshot) -> bool:
        """Whether both saw the same; `other` is the later one."""
        if self._seen != other._seen:
            return False
        # An id means the same object only if that has lived all the time.
        return all(reference() is not None for reference in self._references)

    def _look(self, value: Any) -> Hashable:
        self._left -= 1
        if self._left < 0:
            raise _TooMuchError
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if kind is float:  # 0.0 == -0.0, and dividing by them tells them apart
            return kind, value, math.copysign(1.0, value)
        if kind in _KEPT:
            return kind, value if kind is not slice else repr(value)
        if kind in _ROWS:
            self.may_change = self.may_change or kind not in _FIXED
            return kind, tuple([self._look(one) for one in value])
        if kind in _SETS:
            self.may_change = self.may_change or kind not in _FIXED
            return kind, frozenset([self._look(one) for one in value])
        if kind in _DICTS:
            self.may_change = True
            return kind, tuple([(self._look_at_key(k), self._look(v)) for k, v in value.items()])
        return self._look_at_object(value)

    def _look_at_key(self, key: Any) -> Hashable:
        return key if type(key) is str else self._look(key)

    def _look_at_object(self, value: Any) -> Hashable:
        if isinstance(value, _BY_IDENTITY) or self._is_handle(value):
            return self._identity(value)
        if isinstance(value, Tensor):
            self.may_change = True
            return self._identity(value), version_of(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            if value.nbytes > MOST_BYTES:
                raise _TooMuchError
            self.may_change = True
            return value.dtype.str, value.shape, value.tobytes()
        inside = getattr(value, "__dict__", None)
        if type(inside) is dict:
            self.may_change = True
            return self._identity(value), self._look(inside)
        self.is_opaque = True
        return self._identity(value)

    def _identity(self, value: Any) -> Hashable:
        try:
            self._references.append(weakref.ref(value))
        except TypeError:
            self.is_opaque = True  # its id may be another's one day
        return _OBJECT, id(value)

    @override
    def __repr__(self) -> str:
        return f"<AttributeSnapshot {self._seen!r}>"
