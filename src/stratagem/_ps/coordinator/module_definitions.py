"""How modules, optimizers and the hooks on them are taken apart on the coordinator, to be told to workers."""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from stratagem._core.torch_patches import private_api
from stratagem._ps import definitions
from stratagem._ps.coordinator.coordinator_variables import CoordinatorParameter


def define_module(module: nn.Module) -> Sequence[object]:
    """A module's definitions: how it is made, then what it has.

    Example:
        >>> made, state = define_module(nn.Linear(2, 1))
        >>> made.arguments[0].__name__, sorted(state.state["_parameters"])
        ('Linear', ['bias', 'weight'])
    """
    if parametrize.is_parametrized(module):
        return _define_parametrized(module)
    reduced = module.__reduce_ex__(4)
    assert isinstance(reduced, tuple)
    made = definitions.ModuleDefinition(reduced[0], reduced[1])
    if len(reduced) == 2 or reduced[2] is None:
        return (made,)
    return made, definitions.ModuleState(reduced[2])


def _define_parametrized(module: nn.Module) -> Sequence[object]:
    """torch refuses to pickle these, since their class is made on the fly: it is made again there."""
    made = definitions.ModuleDefinition(make_parametrized, class_of(module))
    return made, definitions.ModuleState(dict(vars(module)))


def class_of(module: Any) -> tuple[type[nn.Module], tuple[str, ...]]:
    """A module's class, as its author wrote it, and which of its tensors are computed.

    Example:
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 1))
        >>> class_of(layer)[0].__name__, class_of(layer)[1]
        ('Linear', ('weight',))
    """
    if parametrize.is_parametrized(module):
        plain = parametrize.type_before_parametrizations(module)
        computed = tuple(module.parametrizations)
    else:
        plain, computed = type(module), ()
    return getattr(plain, "_plain_class", plain), computed  # one of `special_modules`


def make_parametrized(plain: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """An empty module of a class whose tensors of these names are computed."""
    module: nn.Module = vars(copyreg)["__newobj__"](plain)
    compute(module, names)
    return module


def compute(module: nn.Module, names: Sequence[str]) -> None:
    """Let a module's tensors of these names be computed, by what its ``parametrizations`` say."""
    private_api.inject_class(module)
    for name in names:
        private_api.inject_property(module, name)


Hooked = CoordinatorParameter | Optimizer | nn.Module
"""What hooks can be put on: a home stands for its parameter."""

MODULE_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_pre_hooks": (),
    "_backward_hooks": (),
    "_state_dict_pre_hooks": (),
    "_state_dict_hooks": (),
    "_load_state_dict_pre_hooks": (),
    "_load_state_dict_post_hooks": (),
}
"""Dicts in which torch's modules keep hooks by number, each with those in which it marks some of them."""

_NOT_ATTRIBUTES = frozenset(
    {
        *("_parameters", "_buffers", "_modules", "_is_full_backward_hook"),
        *("_compiled_call_impl",),  # torch's own pickles leave it out
        *MODULE_HOOKS,
        *(name for marks in MODULE_HOOKS.values() for name in marks),
    }
)


def hook_dicts_of(obj: Hooked) -> Sequence[dict[int, Any]]:
    """The dicts torch keeps an object's hooks in."""
    # Of a tensor it makes them with the first hook; they are made here, so that they can be watched.
    held: Any  # torch's own annotations do not know all of these attributes
    if isinstance(obj, nn.Module):
        held = vars(obj)
        return [held[name] for name in MODULE_HOOKS]
    if isinstance(obj, Optimizer):
        held = obj
        return [held._optimizer_step_pre_hooks, held._optimizer_step_post_hooks]
    held = obj.central
    if obj.kept.plan is not None:
        return [{}, {}]  # a table that is nowhere in one piece takes none
    if held._backward_hooks is None:
        held._backward_hooks = OrderedDict()
    if held._post_accumulate_grad_hooks is None:
        held._post_accumulate_grad_hooks = OrderedDict()
    return [held._backward_hooks, held._post_accumulate_grad_hooks]


def hooks_of(
    obj: Hooked,
) -> definitions.GradientHooks | definitions.StepHooks | definitions.ModuleHooks:
    """The hooks the user put on a parameter, a module or an optimizer.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = layer.register_forward_hook(print)
        >>> [*hooks_of(layer).by_dict["_forward_hooks"].values()]
        [(<built-in function print>, ())]
    """
    if isinstance(obj, nn.Module):
        return _module_hooks_of(obj)
    first, second = (tuple(hooks.values()) for hooks in hook_dicts_of(obj))
    if isinstance(obj, Optimizer):
        return definitions.StepHooks(first, second)
    return definitions.GradientHooks(first, second)


def _module_hooks_of(module: nn.Module) -> definitions.ModuleHooks:
    held = vars(module)
    by_dict = {
        name: {
            number: (hook, tuple(mark for mark in marks if number in held[mark]))
            for number, hook in held[name].items()
        }
        for name, marks in MODULE_HOOKS.items()
    }
    return definitions.ModuleHooks(by_dict, held["_is_full_backward_hook"])


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's attributes that are no parameters, buffers, parts or hooks.

    Torch's own modules keep what they compute from others under private names; that is not the user's.

    Example:
        >>> dict(attributes_of(nn.Dropout(0.25)))["p"]
        0.25
    """
    is_torchs = type(module).__module__.startswith("torch.")
    is_recurrent = isinstance(module, nn.RNNBase)
    for name, value in vars(module).items():
        if name in _NOT_ATTRIBUTES:
            continue
        if is_torchs and name.startswith("_") and name != "_non_persistent_buffers_set":
            continue
        if is_recurrent and name.startswith("_flat_weight"):
            continue
        yield name, value


def part_now(
    module: nn.Module, moved: definitions.Moved
) -> definitions.SetAttribute | definitions.SetPart | None:
    """The attribute or member that moved, as it is now; None if its class keeps it out of pickles."""
    held: dict[str, Any] = vars(module)
    if moved.kind == definitions.CLASS:
        return definitions.SetClass(moved.token, *class_of(module))
    if moved.kind == definitions.ORDER:
        return definitions.SetOrder(moved.token, moved.name, tuple(held[moved.name]))
    if moved.kind != definitions.ATTRIBUTE:
        members: dict[str, Any] = held[moved.kind]
        is_there = moved.name in members
        value = dict.__getitem__(members, moved.name) if is_there else None
        return definitions.SetMember(moved.token, moved.kind, moved.name, value, is_there)
    if moved.name in held:
        state: Any = _own_state(module)
        if isinstance(state, dict):
            if moved.name not in state:
                return None
            held = state
    is_there = moved.name in held
    return definitions.SetAttribute(moved.token, moved.name, held.get(moved.name), is_there)


def _own_state(module: Any) -> Any:
    """What a class that has its own say in the matter puts into pickles; None for all others."""
    torchs: tuple[Any, ...] = nn.Module.__getstate__, nn.RNNBase.__getstate__
    return None if type(module).__getstate__ in torchs else module.__getstate__()
