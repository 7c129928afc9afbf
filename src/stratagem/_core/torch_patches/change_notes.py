"""Who wants to hear of changes to modules, optimizers and hooks: every change is told to those who asked.

Parameter servers tell workers what moved on the coordinator; looking at a model of a thousand modules at
every `schedule` would cost more than scheduling does. So a `ChangeWatch` says which objects it is about, and
what changes of them is noted there: attributes set or deleted, parameters, buffers and parts registered,
replaced or removed, hooks that come or go. What each change is, the reader finds out by looking.

Three methods of torch are wrapped for this, by the first watch of a process
(docs/design/0004-torch-patches.md).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable
from typing import Any, final

from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from stratagem._core import torch_patches

_watches: tuple[weakref.ref[ChangeWatch], ...] = ()


def note(owner: object, name: str = "") -> None:
    """Something was set, registered, replaced or removed. From any thread.

    Args:
        owner: the module; or the dict in which it keeps parameters, buffers, parts or hooks.
        name: of the attribute, if it is one.
    """
    for reference in _watches:
        watch = reference()
        if watch is not None:
            key = watch.keys.get(id(owner))
            if key is not None:
                watch.touched.add((key, name))


@final
class ChangeWatch:
    """What one reader wants to hear of, and what it has heard since it last asked.

    Attributes:
        keys: by id: under which key changes of an object are noted. An id may come to mean another
            object when the first is gone; so a key that was touched is a reason to look, no more.
        touched: keys, with the name of the attribute.

    Example:
        >>> layer, watch = nn.Dropout(0.5), ChangeWatch()
        >>> watch.keys[id(layer)] = "layer"
        >>> layer.p = 0.25
        >>> watch.take()
        [('layer', 'p')]
        >>> watch.take()
        []
    """

    __slots__ = ("__weakref__", "keys", "touched")

    def __init__(self) -> None:
        global _watches
        self.keys: dict[int, Hashable] = {}
        self.touched: set[tuple[Hashable, str]] = set()
        torch_patches.install(torch_patches.CHANGES)
        _watches = (*_watches, weakref.ref(self, _drop))

    def take(self) -> list[tuple[Hashable, str]]:
        """What was touched since the last call."""
        taken = []
        while self.touched:  # others may be adding: each step is one operation of the set
            taken.append(self.touched.pop())
        return taken

    @override
    def __repr__(self) -> str:
        return f"<ChangeWatch of {len(self.keys)} objects, {len(self.touched)} touched>"


def _drop(reference: weakref.ref[ChangeWatch]) -> None:
    global _watches
    _watches = tuple(one for one in _watches if one is not reference)


class NotedParts(dict[str, Any]):
    """A module's ``_modules`` that notes every change, also past torch's registration hooks.

    ``Sequential.insert``, ``ModuleDict.pop`` and much code that replaces layers write into the dict.
    It pickles and copies as a plain dict.

    Example:
        >>> model, watch = nn.Sequential(nn.ReLU()), ChangeWatch()
        >>> model._modules = NotedParts(model._modules)
        >>> watch.keys[id(model._modules)] = "model"
        >>> _ = model.insert(0, nn.Tanh())
        >>> watch.take()
        [('model', '')]
    """

    @override
    def __setitem__(self, name: str, part: Any) -> None:
        super().__setitem__(name, part)
        note(self)

    @override
    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        note(self)

    @override
    def pop(self, *args: Any) -> Any:
        found = super().pop(*args)
        note(self)
        return found

    @override
    def popitem(self) -> tuple[str, Any]:
        found = super().popitem()
        note(self)
        return found

    @override
    def setdefault(self, *args: Any) -> Any:
        found = super().setdefault(*args)
        note(self)
        return found

    @override
    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        note(self)

    @override
    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    @override
    def clear(self) -> None:
        super().clear()
        note(self)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


def apply_patch() -> None:
    """Wrap the methods of torch through which modules and hooks change."""
    module: Any = nn.Module
    handle: Any = RemovableHandle
    module.__setattr__ = _telling_name(module.__setattr__)
    module.__delattr__ = _telling_name(module.__delattr__)
    handle.__init__ = _telling_hooks(handle.__init__)
    handle.remove = _telling_hooks(handle.remove)


def _telling_name(plain: Any) -> Any:
    """``__setattr__`` or ``__delattr__`` of modules; whatever came of it is looked at later."""

    @functools.wraps(plain)
    def changed(self: nn.Module, name: str, *value: Any) -> None:
        plain(self, name, *value)
        note(self, name)

    return changed


def _telling_hooks(plain: Any) -> Any:
    """Making a handle, or removing its hook: torch does one of them whenever a hook comes or goes."""

    @functools.wraps(plain)
    def changed(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        held = self.hooks_dict_ref()
        if held is not None:
            note(held)

    return changed
