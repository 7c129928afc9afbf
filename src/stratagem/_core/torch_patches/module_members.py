"""Parameters and buffers of modules built under a scope, which depend on the context.

torch's own global registration hooks report every parameter, buffer and submodule that a module registers. If the
current strategy takes over a parameter or buffer (`managed`), the module's ``_parameters`` or ``_buffers`` becomes a dict
subclass whose lookups return the tensor of the calling context. Modules and operators find plain ``nn.Parameter`` s
and tensors where they always were. The dicts hold the central tensors, and pickle and copy as plain dicts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from typing_extensions import override

from stratagem._core import context
from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import ManagedBuffer, ManagedParameter, find_managed
from stratagem._core.replicated_buffers import ReplicatedBuffer, replicated_buffer
from stratagem._core.replicated_parameters import WRITE_ONCE, ReplicatedParameter
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches import change_notes, special_modules
from stratagem._core.torch_patches.private_api import (
    buffers_of,
    parameters_of,
    set_buffers,
    set_parameters,
)
from stratagem.errors import ReplicaError

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values  # the return types of `dict` itself

_M = TypeVar("_M")


class ByContext(dict[str, Any]):
    """A dict whose values depend on the context; it holds the values for code outside replicas."""

    __slots__ = ()

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
        # A pickle must load in plain PyTorch: an ordinary dict of central tensors, looked up so that values kept
        # elsewhere are current.
        return dict, (dict(self._central_items()),)

    def _central_items(self) -> dict_items[str, Any]:
        return self.items() if current_replica() is None else dict.items(self)


class ParametersByReplica(ByContext):
    """A module's ``_parameters`` under a strategy.

    Attributes:
        managed: the managed parameters, by name.
    """

    __slots__ = ("_swapped", "managed")

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.managed: dict[str, ManagedParameter] = {}
        # Tensors that one replica put in a parameter's place for itself (torch.func.functional_call), by
        # (replica number, name).
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
        """Return the tensors of ``managed`` for ``name`` from now on."""
        self.managed[name] = managed
        dict.__setitem__(self, name, managed.central)
        change_notes.note(self)

    @override
    def __delitem__(self, name: str) -> None:
        if current_replica() is not None and name not in self:
            return  # another replica, running the same code, deleted it
        dict.__delitem__(self, name)
        change_notes.note(self)
        self.managed.pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        replica = current_replica()
        if replica is not None:
            # Each replica makes its own copy: an ordinary dict, which the replica may train in this run.
            plain: dict[str, Any] = {}
            memo[id(self)] = plain
            plain.update((name, copy.deepcopy(value, memo)) for name, value in self.items())
            copies = replica.group.shared.setdefault(("copies", replica.id), {})
            copies.update((id(value), value) for value in plain.values())
            return plain
        twin = ParametersByReplica({})
        memo[id(self)] = twin
        for name, value in self.items():
            own = copy.deepcopy(value, memo)
            dict.__setitem__(twin, name, own)
            if name in self.managed and own is not None:
                # Tied weights: the first name has adopted the copy already.
                managed = find_managed(own) or self.managed[name].adopt_copy(own)
                if managed is not None:
                    twin.bind(name, managed)
        return twin


class BuffersByReplica(ByContext):
    """A module's ``_buffers`` under a strategy.

    Attributes:
        managed: the managed buffers, by name.
    """

    __slots__ = ("__weakref__", "managed")

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.managed: dict[str, ManagedBuffer] = {}

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
                if value is not managed.central:  # else: registered in this run, for all replicas
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

    def bind(self, name: str, managed: ManagedBuffer) -> None:
        """Return the tensors of ``managed`` for ``name`` from now on."""
        self.managed[name] = managed
        dict.__setitem__(self, name, managed.central)
        change_notes.note(self)
        managed.bound_to(self, name)

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


# ------------------------------------------------------------------ called by strategies


def adopt_parameter(
    strategy: StrategyHooks, name: str, parameter: nn.Parameter, device: torch.device
) -> ReplicatedParameter | None:
    """Move a parameter to ``device`` and give every replica a leaf of it.

    A single replica on that device uses the parameter itself: None.
    """
    _move(parameter, device)
    return None if _is_alone(strategy, device) else ReplicatedParameter(parameter, strategy, name)


def adopt_buffer(
    strategy: StrategyHooks, buffer: Tensor, device: torch.device
) -> ReplicatedBuffer | None:
    """Move a buffer to ``device`` and give every replica a copy of it, as `adopt_parameter` does."""
    _move(buffer, device)
    return None if _is_alone(strategy, device) else replicated_buffer(buffer, strategy)


def _is_alone(strategy: StrategyHooks, device: torch.device) -> bool:
    computing = strategy._compute_devices
    return not computing or (len(computing) == 1 and computing[0].torch_device == device)


def _move(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device and not is_lazy(tensor) and not tensor.is_meta:
        tensor.data = tensor.data.to(device)


# ------------------------------------------------------------------ called by torch


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Handle the registration of a parameter; return the parameter to register."""
    managed = find_managed(parameter)
    if managed is not None:
        _bind_parameter(module, name, managed)
        return managed.central
    strategy = context.current_strategy()
    if strategy is None:
        change_notes.note(module)
        return None
    replica, held = current_replica(), parameters_of(module)
    if replica is not None and replica.group.size > 1 and isinstance(held, ParametersByReplica):
        replaced = held.managed.get(name)
        if isinstance(replaced, ReplicatedParameter):
            raise ReplicaError(
                f"{replaced.describe()} was replaced by another nn.Parameter inside {replica!r}. {WRITE_ONCE}"
            )

    def adopt(made: nn.Parameter) -> ManagedParameter | None:
        found = strategy._adopt_parameter(module, name, made)
        if found is not None:
            _bind_parameter(module, name, found)
        return found

    managed = _create_once(f"creating parameter {name!r}", module, parameter, adopt)
    return None if managed is None else managed.central


def _bind_parameter(module: nn.Module, name: str, managed: ManagedParameter) -> None:
    special_modules.prepare(module, managed, name)
    held = parameters_of(module)
    if not isinstance(held, ParametersByReplica):
        held = ParametersByReplica(held)
        set_parameters(module, held)
    held.bind(name, managed)


def _on_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
    """Handle the registration of a buffer; return the buffer to register."""
    if buffer is None:
        return None
    strategy = context.current_strategy() or _strategy_of(module)
    if strategy is None:
        change_notes.note(module)
        return None
    held = buffers_of(module)
    if isinstance(held, BuffersByReplica) and name in held.managed:
        return None  # another tensor for a managed name: __setitem__ handles it

    def adopt(made: Tensor) -> ManagedBuffer | None:
        found = strategy._adopt_buffer(module, name, made)
        if found is not None:
            held = buffers_of(module)
            if not isinstance(held, BuffersByReplica):
                held = BuffersByReplica(held)
                set_buffers(module, held)
            held.bind(name, found)
            special_modules.prepare_for_buffers(module)
        return found

    managed = _create_once(f"creating buffer {name!r}", module, buffer, adopt)
    return None if managed is None else managed.central


def _strategy_of(module: nn.Module) -> StrategyHooks | None:
    """Return the strategy of a module's parameters: it also gets buffers registered outside any scope."""
    for held in (parameters_of(module), buffers_of(module)):
        if isinstance(held, ParametersByReplica | BuffersByReplica):
            for managed in held.managed.values():
                if managed.strategy is not None:
                    return managed.strategy
    return None


def _on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Handle the registration of a submodule: take over the tensors of one made elsewhere."""
    change_notes.note(module)
    if child is None or context.current_strategy() is None or current_replica() is not None:
        return
    for each in child.modules():
        if not isinstance(parameters_of(each), ParametersByReplica):
            for key, parameter in list(parameters_of(each).items()):
                if parameter is not None:
                    _on_parameter(each, key, parameter)
        if not isinstance(buffers_of(each), BuffersByReplica):
            for key, buffer in list(buffers_of(each).items()):
                _on_buffer(each, key, buffer)


def _create_once(
    label: str, module: nn.Module, value: Any, adopt: Callable[[Any], _M | None]
) -> _M | None:
    """Adopt a tensor; in replicas of several, once for all of them (RUN-9).

    A module that each replica builds for itself in the run stays an ordinary one: its parameters serve in forward,
    and training them is refused (`optimizer_step`).
    """
    replica: Replica | None = current_replica()
    if replica is None or replica.group.size == 1:
        return adopt(value)

    def first(brought: list[Any]) -> list[Any]:
        present = [each for each in brought if each is not None]
        if any(each[0] is not present[0][0] for each in present):
            return [None] * len(brought)
        return [adopt(present[0][1])] * len(brought)

    found: _M | None = replica.group.rendezvous(replica.id, label, (module, value), first)
    return found


def apply_patch() -> None:
    """Register the hooks. A module built outside any scope pays one thread-local read per parameter."""
    hooks: Any = torch_module  # declared as returning None; torch registers the hooks' results
    hooks.register_module_parameter_registration_hook(_on_parameter)
    hooks.register_module_buffer_registration_hook(_on_buffer)
    hooks.register_module_module_registration_hook(_on_module)
