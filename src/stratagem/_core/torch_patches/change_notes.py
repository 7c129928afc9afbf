"""Record which modules and optimizers were changed, by patching torch's methods.

Comparing a model of a thousand modules at every `schedule` would cost more than scheduling does. So a
`ChangeWatch` names the objects it is about, and changes of them are noted there: an attribute set or deleted; a
parameter, buffer or submodule registered, replaced or removed; a hook registered or removed. The first watch of a
process wraps four methods of torch for this (docs/design/0004-torch-patches.md).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable
from typing import Any, Final, final

from torch import nn
from torch.utils.hooks import RemovableHandle

from stratagem._core import torch_patches

_watches: tuple[weakref.ref[ChangeWatch], ...] = ()


def note(owner: object) -> None:
    """Note a change of a module, or of a dict in which it keeps members or hooks; from any thread."""
    for reference in _watches:
        watch = reference()
        if watch is not None:
            key = watch.keys.get(id(owner))
            if key is not None:
                watch.touched.add(key)


@final
class ChangeWatch:
    """Set of objects, and which of them changed since the last look.

    Attributes:
        keys: by id, the key under which changes of an object are noted. Once the object is gone, its id
            may belong to another: so a noted key is a reason to compare, no more.
        touched: keys of objects that changed.
    """

    def __init__(self) -> None:
        global _watches
        self.keys: dict[int, Hashable] = {}
        self.touched: set[Hashable] = set()
        torch_patches.install(torch_patches.CHANGES)
        living = [one for one in _watches if one() is not None]
        _watches = (*living, weakref.ref(self))

    def take(self) -> set[Any]:
        """Return the keys that were noted since the last call."""
        taken = self.touched.copy()  # other threads may add
        self.touched -= taken
        return taken


_ABSENT: Final = object()
_FIXED: Final = frozenset({type(None), bool, int, float, str})


def apply_patch() -> None:
    """Wrap the methods of torch through which modules and hooks change."""
    module: Any = nn.Module
    handle: Any = RemovableHandle
    module.__setattr__ = _noting_value(module.__setattr__)
    module.__delattr__ = _noting_value(module.__delattr__)
    handle.__init__ = _noting_hooks(handle.__init__)
    handle.remove = _noting_hooks(handle.remove)


def _noting_value(plain: Any) -> Any:
    """Wrap ``__setattr__`` or ``__delattr__`` of modules."""

    @functools.wraps(plain)
    def changed(self: nn.Module, name: str, *value: Any) -> None:
        before = self.__dict__.get(name, _ABSENT)
        plain(self, name, *value)
        # train() of a module that is in training mode already changes nothing.
        if not value or before is not value[0] or type(before) not in _FIXED:
            note(self)

    return changed


def _noting_hooks(plain: Any) -> Any:
    """Wrap a method of `RemovableHandle`; torch calls one whenever a hook is registered or removed."""

    @functools.wraps(plain)
    def changed(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        held = self.hooks_dict_ref()
        if held is not None:
            note(held)

    return changed
