"""Modules built under a scope: their parameters and buffers answer by context.

torch's own global registration hooks (`install`) see every parameter and buffer a module registers.
Under a strategy that gives it a home (`homes`), the module's ``_parameters`` / ``_buffers`` dict is
replaced by a dict subclass whose lookups ask the home. Modules and operators notice nothing: they find
plain ``nn.Parameter`` s and tensors where they always were. The dicts hold the central tensors, pickle and
copy as plain dicts, and when deep-copied keep belonging to the strategy.

Modules that keep tensors elsewhere as well (recurrent ones, lazy ones, …) are in `special_modules`.
Strategies fill the hooks ``_adopt_parameter`` and ``_adopt_buffer``; `adopt_parameter` and `adopt_buffer`
here are what central storage and mirrored strategies fill them with.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from typing_extensions import override

from stratagem._core import context
from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import ManagedParameter, find_managed
from stratagem._core.replicated_buffers import ReplicatedBuffer
from stratagem._core.replicated_parameters import ReplicatedParameter
from stratagem._core.torch_patches import change_notes, param_grad, special_modules

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values  # what `dict` itself says it returns


__all__ = [
    "BuffersByReplica",
    "ManagedParameter",
    "ParametersByReplica",
    "ReplicatedBuffer",
    "ReplicatedParameter",
    "adopt_buffer",
    "adopt_parameter",
    "find_managed",
    "install",
]


class _ByContext(dict[str, Any]):
    """A dict whose values depend on who asks; holds what code outside any replica gets."""

    __slots__ = ()

    @override
    def __getitem__(self, name: str) -> Any:
        raise NotImplementedError

    @override
    def get(self, name: str, default: Any = None, /) -> Any:
        return self[name] if name in self else default

    @override
    def items(self) -> dict_items[str, Any]:
        return {name: self[name] for name in self}.items()

    @override
    def values(self) -> dict_values[str, Any]:
        return {name: self[name] for name in self}.values()

    @override
    def pop(self, name: str, *default: Any) -> Any:
        if name not in self and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    @override
    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle must load in plain PyTorch, without us: an ordinary dict of central tensors. Looked
        # up, so that those whose true values are elsewhere are current.
        return dict, (dict(self._central_items()),)

    def _central_items(self) -> dict_items[str, Any]:
        return self.items() if current_replica() is None else dict.items(self)


class ParametersByReplica(_ByContext):
    """A module's ``_parameters`` under a strategy.

    Attributes:
        homes: home of each parameter that has one, by name.
    """

    __slots__ = ("_swapped", "managed")

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.managed: dict[str, ManagedParameter] = {}
        # What one replica put in a parameter's place for itself (torch.func.functional_call):
        # (replica number, name) -> tensor.
        self._swapped: dict[tuple[int, str], Any] = {}
        for name, value in plain.items():
            if value is not None and (managed := find_managed(value)) is not None:
                self.managed[name] = managed

    @override
    def __getitem__(self, name: str) -> Any:
        if self._swapped:
            replica = current_replica()
            if replica is not None and (replica.id, name) in self._swapped:
                return self._swapped[replica.id, name]
        managed = self.managed.get(name)
        return dict.__getitem__(self, name) if managed is None else managed.resolve()

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        managed = None if value is None else find_managed(value)
        replica = current_replica()
        if replica is not None and replica.group.size > 1 and name in self.managed:
            if managed is self.managed[name]:  # swapped back
                self._swapped.pop((replica.id, name), None)
                return
            if managed is None:
                self._swapped[replica.id, name] = value
                return
        if managed is None and name in self.managed and isinstance(value, nn.Parameter):
            # Another parameter in its place (module.to(), load_state_dict(assign=True), ...).
            managed = self.managed[name].adopt_copy(value)
        if managed is None:
            self.managed.pop(name, None)
            dict.__setitem__(self, name, value)
            change_notes.note(self)
        else:
            self.bind(name, managed)

    def bind(self, name: str, managed: ManagedParameter) -> None:
        """Let ``home`` answer for ``name``."""
        self.managed[name] = managed
        dict.__setitem__(self, name, managed.central)
        change_notes.note(self)

    @override
    def __delitem__(self, name: str) -> None:
        if current_replica() is not None and name not in self:
            return  # another replica, running the same code, was here first
        dict.__delitem__(self, name)
        change_notes.note(self)
        self.managed.pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        if current_replica() is not None:
            # Each replica copies for itself: an ordinary dict, which no strategy trains.
            plain: dict[str, Any] = {}
            memo[id(self)] = plain
            plain.update((name, copy.deepcopy(value, memo)) for name, value in self.items())
            return plain
        twin = ParametersByReplica({})
        memo[id(self)] = twin
        for name, value in self.items():
            own = copy.deepcopy(value, memo)
            dict.__setitem__(twin, name, own)
            if name in self.managed and own is not None:
                managed = find_managed(own) or self.managed[name].adopt_copy(
                    own
                )  # tied weights: made before
                if managed is not None:
                    twin.bind(name, managed)
        return twin


class BuffersByReplica(_ByContext):
    """A module's ``_buffers`` under a strategy.

    Attributes:
        homes: home of each buffer that has one, by name.
    """

    __slots__ = ("__weakref__", "managed")

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.managed: dict[str, ReplicatedBuffer] = {}

    @override
    def __getitem__(self, name: str) -> Any:
        managed = self.managed.get(name)
        return dict.__getitem__(self, name) if managed is None else managed.resolve()

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        managed = self.managed.get(name)
        if managed is not None:
            replica = current_replica()
            if replica is not None and replica.strategy is managed.strategy and not is_lazy(value):
                if (
                    value is not managed.central
                ):  # else: just registered in this run, for all replicas
                    managed.put(replica, value)
                return
            if value is None or managed.strategy is None:
                del self.managed[name]
            elif managed.central is not value:
                self.bind(name, managed.replaced_by(value))
                return
        dict.__setitem__(self, name, value)
        change_notes.note(self)

    @override
    def __delitem__(self, name: str) -> None:
        if current_replica() is not None and name not in self:
            return
        dict.__delitem__(self, name)
        self.managed.pop(name, None)
        change_notes.note(self)

    def bind(self, name: str, managed: ReplicatedBuffer) -> None:
        """Let ``home`` answer for ``name``."""
        self.managed[name] = managed
        dict.__setitem__(self, name, managed.central)
        change_notes.note(self)
        managed.on_replace(functools.partial(dict.__setitem__, self, name))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        twin = BuffersByReplica({})
        memo[id(self)] = twin
        for name, value in self._central_items():
            own = copy.deepcopy(value, memo)
            dict.__setitem__(twin, name, own)
            managed = self.managed.get(name)
            if managed is not None and own is not None and managed.strategy is not None:
                twin.bind(name, managed.adopt_copy(own))
        return twin


# ------------------------------------------------------------------ what strategies call


def adopt_parameter(
    strategy: Any, name: str, parameter: nn.Parameter, device: torch.device
) -> ManagedParameter | None:
    """Move a parameter to ``device`` and give every replica a leaf of it.

    With one replica computing on that device there is nothing more to do: None.
    """
    _move(parameter, device)
    if _is_alone(strategy, device):
        return None
    param_grad.install()
    return ReplicatedParameter(parameter, strategy, name)


def adopt_buffer(strategy: Any, buffer: Tensor, device: torch.device) -> ReplicatedBuffer | None:
    """The same for a buffer, of which every replica gets a copy."""
    _move(buffer, device)
    return None if _is_alone(strategy, device) else ReplicatedBuffer(buffer, strategy)


def _is_alone(strategy: Any, device: torch.device) -> bool:
    computing = strategy._compute_devices
    return not computing or (len(computing) == 1 and computing[0].torch_device == device)


def _move(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device and not is_lazy(tensor) and not tensor.is_meta:
        tensor.data = tensor.data.to(device)


# ------------------------------------------------------------------ what torch calls


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Torch is about to register a parameter: find or make its home. The parameter to register."""
    managed = find_managed(parameter)
    if managed is not None:
        _settle_parameter(module, name, managed)
        return managed.central
    if not context.has_strategy():
        change_notes.note(module)
        return None
    strategy, replica = context.get_strategy(), current_replica()

    def adopt(made: nn.Parameter) -> ManagedParameter | None:
        found: ManagedParameter | None = strategy._adopt_parameter(module, name, made)
        if found is not None:
            _settle_parameter(module, name, found)
        return found

    if replica is None or replica.group.size == 1:
        managed = adopt(parameter)
    else:
        label = f"creating parameter {name!r}"
        managed = _created_together(replica, label, module, parameter, adopt)
    return None if managed is None else managed.central


def _settle_parameter(module: nn.Module, name: str, managed: ManagedParameter) -> None:
    special_modules.prepare(module, managed, name)
    held = module._parameters
    if not isinstance(held, ParametersByReplica):
        module._parameters = held = ParametersByReplica(held)
    held.bind(name, managed)


def _on_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
    """The same for a buffer."""
    if buffer is None:
        return None
    strategy = context.get_strategy() if context.has_strategy() else _strategy_of(module)
    if strategy is None:
        change_notes.note(module)
        return None
    if isinstance(module._buffers, BuffersByReplica) and name in module._buffers.managed:
        return None  # another tensor for a name that has a home: __setitem__ knows what to do
    replica = current_replica()

    def adopt(made: Tensor) -> Any:
        found = strategy._adopt_buffer(module, name, made)
        if found is not None:
            held: Any = module._buffers
            if not isinstance(held, BuffersByReplica):
                module._buffers = held = BuffersByReplica(held)
            held.bind(name, found)
            special_modules.prepare_for_buffers(module)
        return found

    if replica is None or replica.group.size == 1:
        managed = adopt(buffer)
    else:
        managed = _created_together(replica, f"creating buffer {name!r}", module, buffer, adopt)
    return None if managed is None else managed.central


def _strategy_of(module: nn.Module) -> Any:
    """Whose parameters a module has: a buffer it gets outside any scope is that strategy's as well."""
    for held in (module._parameters, module._buffers):
        if isinstance(held, ParametersByReplica | BuffersByReplica):
            for managed in held.managed.values():
                if managed.strategy is not None:
                    return managed.strategy
    return None


def _on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """A module made elsewhere (loaded, copied) becomes part of one made here: so do its tensors."""
    change_notes.note(module)
    if child is None or not context.has_strategy() or current_replica() is not None:
        return
    for each in child.modules():
        if not isinstance(each._parameters, ParametersByReplica):
            for key, parameter in list(each._parameters.items()):
                if parameter is not None:
                    _on_parameter(each, key, parameter)
        if not isinstance(each._buffers, BuffersByReplica):
            for key, buffer in list(each._buffers.items()):
                _on_buffer(each, key, buffer)


def _created_together(
    replica: Replica, label: str, module: nn.Module, value: Any, adopt: Callable[[Any], Any]
) -> Any:
    """RUN-9: what replicas register on a module they share is created once; all get the first one's.

    A module that each replica builds for itself inside the run stays each replica's own, without a
    home: its parameters serve in forward, and training them is refused (`optimizers`).
    """

    def first(brought: list[Any]) -> list[Any]:
        present = [each for each in brought if each is not None]
        if any(each[0] is not present[0][0] for each in present):
            return [None] * len(brought)
        return [adopt(present[0][1])] * len(brought)

    return replica.group.meet(replica.id, label, (module, value), first)


_INSTALLED: list[Any] = []


def install() -> None:
    """Let the registration hooks work, once per process; the first strategy calls it.

    They cost a module built outside any scope one thread-local read per parameter.
    """
    if not _INSTALLED:
        # Declared as returning nothing; what a hook returns is registered instead, says torch.
        hooks: Any = torch_module
        _INSTALLED.append(hooks.register_module_parameter_registration_hook(_on_parameter))
        _INSTALLED.append(hooks.register_module_buffer_registration_hook(_on_buffer))
        _INSTALLED.append(hooks.register_module_module_registration_hook(_on_module))
