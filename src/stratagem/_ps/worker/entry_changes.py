"""Apply the coordinator's changes to a worker's modules, parameters and optimizers, in place.

A function may give the same objects attributes, buffers and hooks of its own: those stay, behind the
coordinator's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stratagem._core.torch_patches import module_members, special_modules
from stratagem._ps.definitions import HOOK_MARKS, HOOKS, MEMBERS, EntryChange, compute
from stratagem._ps.training_state import set_setting


class EntryWriter:
    """Sets entries of a worker's objects; knows which of their members and hooks are the coordinator's.

    Args:
        put_buffer: puts a buffer into a module, under a name.
    """

    def __init__(self, put_buffer: Callable[[nn.Module, str, Tensor], None]) -> None:
        self._put_buffer = put_buffer
        self._members: dict[tuple[Hashable, str], Iterable[str]] = {}
        self._hooks: dict[tuple[Hashable, str], Iterable[int]] = {}  # numbers

    def define(self, token: Hashable, module: nn.Module) -> None:
        """Note that the members and hooks which a module has are the coordinator's."""
        held = vars(module)
        self._members.update({(token, kind): tuple(held[kind]) for kind in MEMBERS})
        self._hooks.update({(token, kind): tuple(held[kind]) for kind in HOOK_MARKS})
        # Hooks keep their numbers, since handles that came with them name them.
        highest = max((number for kind in HOOK_MARKS for number in held[kind]), default=-1)
        RemovableHandle.next_id = max(RemovableHandle.next_id, highest + 1)

    def forget(self, token: Hashable) -> None:
        """Discard the state of an object."""
        for known in (self._members, self._hooks):
            for key in [key for key in known if key[0] == token]:
                del known[key]

    def set(self, obj: Any, change: EntryChange) -> None:
        """Give one entry of an object its new value."""
        token, entry, value, exists = change
        key = token, str(entry)
        if entry in HOOKS:
            self._set_hooks(key, obj, value or {})
        elif isinstance(obj, Optimizer):
            if isinstance(entry, tuple):
                set_setting(obj, entry[0], entry[1], value)
        elif isinstance(obj, Tensor):
            obj.requires_grad_(value)
        elif entry == "__class__":
            _set_class(obj, *value)
        elif entry in MEMBERS:
            self._set_members(key, obj, value)
        elif exists:  # bypass the class's own __setattr__
            vars(obj)[key[1]] = value
        else:
            vars(obj).pop(key[1], None)

    def _set_hooks(self, key: tuple[Hashable, str], obj: Any, hooks: Any) -> None:
        kind = key[1]
        held = {name: getattr(obj, name) for name in (kind, *HOOK_MARKS.get(kind, ()))}
        if held[kind] is None:  # torch makes a tensor's dict with its first hook
            held[kind] = OrderedDict()
            setattr(obj, kind, held[kind])
        for number in self._hooks.get(key, ()):
            for one in held.values():
                one.pop(number, None)
        numbers = []
        for hook, marks in hooks.values():
            numbers.append(RemovableHandle(held[kind]).id)
            held[kind][numbers[-1]] = hook
            for mark in marks:
                held[mark][numbers[-1]] = True
        if isinstance(obj, nn.Module):  # a gradient is moved to its slot before hooks see it
            for number in reversed(numbers):
                held[kind].move_to_end(number, last=False)
        self._hooks[key] = numbers

    def _set_members(self, key: tuple[Hashable, str], module: nn.Module, members: Any) -> None:
        held = vars(module)[key[1]]
        for name in self._members.get(key, ()):
            if name not in members and name in held:
                del held[name]
        for name, one in members.items():
            if name in held and dict.__getitem__(held, name) is one:
                continue
            if isinstance(one, nn.Parameter):
                setattr(module, name, one)  # recurrent modules keep it elsewhere, too
            elif isinstance(one, Tensor):
                self._put_buffer(module, name, one)
            else:
                held[name] = one
        held = vars(module)[key[1]]
        for name in (*members, *[name for name in held if name not in members]):
            dict.__setitem__(held, name, dict.pop(held, name))
        self._members[key] = tuple(members)


def _set_class(module: nn.Module, plain: type[nn.Module], computed: tuple[str, ...]) -> None:
    """Give a module another class; its members follow."""
    module.__class__ = plain
    if computed:
        for held in (module._parameters, module._buffers):
            for name in computed:
                held.pop(name, None)  # torch wants their places free
        compute(module, computed)
    if isinstance(module._parameters, module_members.ParametersByReplica):
        for name, managed in module._parameters.managed.items():
            special_modules.prepare(module, managed, name)
