"""Messages from the coordinator to workers about a strategy's objects: plain data.

A *definition* is what a worker needs to rebuild one object; other managed objects inside it travel as tokens. An
`EntryChange` sets one entry of an object that the worker has (`coordinator/change_tracking.py`).
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from stratagem._core.torch_patches import private_api
from stratagem._core.variables import VariableRequest
from stratagem._ps.placement import Description

Token = tuple[str, int]
"""Kind and number of an object: ("strategy", 0), ("parameter", 7), ("module", 3), …"""

Entry = str | tuple[int, str]
"""Name of one part of an object's state: of a module an attribute, of an optimizer (group, setting)."""

ATTRIBUTES: Final = "attributes"
"""Entry of an optimizer of the user's own class: its plain attributes, for servers. Of one around another one: all of its
own attributes, for workers."""

COUNTER: Final = "counter"
"""Kind of the token of a counter."""

MEMBERS: Final = ("_parameters", "_buffers", "_modules")
"""Dicts in which a module keeps its parameters, buffers and submodules."""

HOOK_MARKS: Final[dict[str, tuple[str, ...]]] = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    **dict.fromkeys(("_backward_pre_hooks", "_backward_hooks"), ()),
    **dict.fromkeys(("_state_dict_pre_hooks", "_state_dict_hooks"), ()),
    **dict.fromkeys(("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"), ()),
}
"""Dicts in which a module keeps hooks by number, each with the dicts in which torch marks some of them."""

STEP_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
GRADIENT_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
HOOKS: Final = frozenset({*HOOK_MARKS, *STEP_HOOKS, *GRADIENT_HOOKS})


@dataclass(frozen=True, slots=True)
class ParameterDefinition:
    """A module's parameter."""

    description: Description
    requires_grad: bool
    as_table: bool
    channels_last: bool


@dataclass(frozen=True, slots=True)
class BufferDefinition:
    """A module's buffer."""

    description: Description
    counts: bool


@dataclass(frozen=True, slots=True)
class VariableDefinition:
    """A `Variable`; a per-worker variable has one description per worker."""

    descriptions: tuple[Description, ...]
    request: VariableRequest
    per_worker: bool = False


@dataclass(frozen=True, slots=True)
class ModuleDefinition:
    """First half of a module's pickle: how to make the object, still without its state."""

    make: Callable[..., nn.Module]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ModuleState:
    """Second half of a module's pickle, sent after the definitions of everything that it names.

    It may name the module itself: a submodule may have an attribute that leads back to it.
    """

    state: Any


@dataclass(frozen=True, slots=True)
class OptimizerDefinition:
    """An optimizer: its class, its groups (their parameters are tokens), its settings on the servers."""

    number: int
    kind: type[Optimizer]
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]
    settings: dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class WrapperDefinition:
    """An optimizer around another one, with its parameter groups; its own code runs on the worker."""

    kind: type[Optimizer]
    inner: Optimizer
    defaults: dict[str, Any]
    attributes: dict[str, Any]


class EntryChange(NamedTuple):
    """New value of one entry of an object, or the end of the entry."""

    token: Token
    entry: Entry
    value: Any
    exists: bool


@dataclass(frozen=True, slots=True)
class ForgetObjects:
    """Objects that no longer exist on the coordinator; no later function names them."""

    tokens: tuple[Token, ...]


def make_module(kind: type[nn.Module]) -> nn.Module:
    """Return an empty module; its class may have a ``__new__`` that expects arguments."""
    try:
        made: nn.Module = vars(copyreg)["__newobj__"](kind)
    except TypeError:
        made = object.__new__(kind)
    return made


def make_parametrized(plain: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """Return an empty module of a class whose tensors of these names are computed."""
    module: nn.Module = vars(copyreg)["__newobj__"](plain)
    compute(module, names)
    return module


def compute(module: nn.Module, names: Sequence[str]) -> None:
    """Make a module compute its tensors of these names from its ``parametrizations``."""
    private_api.inject_class(module)
    for name in names:
        private_api.inject_property(module, name)


def define_module(module: nn.Module) -> Sequence[object]:
    """Return the two halves of a module's pickle: how it is made, then its state.

    Example:
        >>> made, state = define_module(nn.Linear(2, 1))
        >>> made.arguments[0].__name__, sorted(state.state["_parameters"])
        ('Linear', ['bias', 'weight'])
    """
    state: Any
    if parametrize.is_parametrized(module):  # torch does not pickle a class that is made on the fly
        made, state = ModuleDefinition(make_parametrized, class_of(module)), vars(module)
    else:
        reduced: Any = module.__reduce_ex__(4)
        make, arguments = reduced[:2]
        if make is vars(copyreg)["__newobj__"] and len(arguments) == 1:
            make = make_module
        made, state = ModuleDefinition(make, arguments), reduced[2] if len(reduced) > 2 else None
    if type(state) is dict:
        # Plain dicts of members: others would ask the servers for current values.
        plain = {kind: dict(dict.items(state[kind])) for kind in MEMBERS if kind in state}
        state = {**state, **plain}
    return (made,) if state is None else (made, ModuleState(state))


def class_of(module: Any) -> tuple[type[nn.Module], tuple[str, ...]]:
    """Return a module's class as its author wrote it, and the names of its computed tensors.

    Example:
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 1))
        >>> class_of(layer)[0].__name__, class_of(layer)[1]
        ('Linear', ('weight',))
    """
    plain, computed = type(module), ()
    if "parametrizations" in vars(module)["_modules"]:
        plain = parametrize.type_before_parametrizations(module)
        computed = tuple(module.parametrizations)
    return getattr(plain, "_plain_class", plain), computed  # one of `special_modules`
