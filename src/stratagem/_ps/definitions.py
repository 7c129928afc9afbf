"""What crosses from the coordinator to workers about a strategy's objects: plain data, no behaviour.

A *definition* is what a worker needs to rebuild one object; it may contain other objects of the
strategy, which travel as their own tokens. An *update* is something that moved on the coordinator after
the definition was made. Made by `coordinator_views.py`, used by the strategy's worker view.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stratagem._core.variables import VariableRequest
from stratagem._ps.placement import Description

Token = tuple[str, int]
"""Kind and number of an object: ("strategy", 0), ("parameter", 7), ("module", 3), …"""


@dataclass(frozen=True, slots=True)
class StrategyDefinition:
    """The strategy itself; the rest came with the worker's setup."""


@dataclass(frozen=True, slots=True)
class ParameterDefinition:
    """A module's parameter."""

    description: Description
    requires_grad: bool
    as_table: bool


@dataclass(frozen=True, slots=True)
class BufferDefinition:
    """A module's buffer."""

    description: Description
    counts: bool


@dataclass(frozen=True, slots=True)
class VariableDefinition:
    """A `Variable`; a per-worker one has as many descriptions as there are workers."""

    descriptions: tuple[Description, ...]
    request: VariableRequest
    per_worker: bool = False


@dataclass(frozen=True, slots=True)
class ModuleDefinition:
    """A module, as its ``__reduce_ex__`` describes it: how to make it, still without what it has."""

    make: Callable[..., nn.Module]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ModuleState:
    """What the module has; parameters and submodules inside are tokens.

    Told after all of them, the module itself among them: a submodule may have a hook, or an attribute,
    that leads back to the module.
    """

    state: Any


@dataclass(frozen=True, slots=True)
class GradientHooks:
    """What ``register_hook`` and ``register_post_accumulate_grad_hook`` put on a parameter."""

    on_gradient: tuple[Callable[..., Any], ...]
    accumulated: tuple[Callable[..., Any], ...]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.on_gradient or self.accumulated)


@dataclass(frozen=True, slots=True)
class StepHooks:
    """What ``register_step_pre_hook`` and ``register_step_post_hook`` put on an optimizer."""

    before: tuple[Callable[..., Any], ...]
    after: tuple[Callable[..., Any], ...]


@dataclass(frozen=True, slots=True)
class OptimizerDefinition:
    """An optimizer: its class, its groups (their parameters are tokens), its settings there."""

    number: int
    kind: type[Optimizer]
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]
    settings: dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ModuleHooks:
    """The hooks on a module: by the dict it keeps them in, each by torch's number, in order.

    Beside each hook, the dicts in which its number is marked (``with_kwargs``, ``always_call``).
    """

    by_dict: dict[str, dict[int, tuple[Callable[..., Any], tuple[str, ...]]]]
    is_full_backward: bool | None


@dataclass(frozen=True, slots=True)
class SetAttribute:
    """A module has another attribute of this name (``p``, ``training`` …), or none any more."""

    token: Hashable
    name: str
    value: Any
    is_there: bool


@dataclass(frozen=True, slots=True)
class SetRequiresGrad:
    """A parameter was frozen, or thawed."""

    token: Hashable
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class SetHyperparameters:
    """Settings of one parameter group changed (a learning rate, mostly)."""

    token: Hashable
    group: int
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AddGroup:
    """``optimizer.add_param_group`` was called on the coordinator."""

    token: Hashable
    group: dict[str, Any]
    settings: dict[str, Any]


ATTRIBUTE = "attribute"
CLASS = "class"
HOOKS = "hooks"
ORDER = "order"
"""Kinds of what moved, beside the dicts modules keep their members in."""


@dataclass(frozen=True, slots=True)
class Moved:
    """An attribute or member of a module, or the hooks on an object, are others now.

    Which, is asked when it is told, as `SetAttribute`, `SetMember` and so on; this stays on the coordinator. So the log of updates keeps no model alive.
    """

    token: Token
    kind: str
    name: str
    is_plain: bool = False
    """A number or text, as before: no definition has to be made again for lives that come later."""


@dataclass(frozen=True, slots=True)
class SetMember:
    """A module has another parameter, buffer or part of this name, None there, or none any more."""

    token: Hashable
    kind: str
    name: str
    value: Any
    is_there: bool


@dataclass(frozen=True, slots=True)
class SetClass:
    """A module is of another class now, or others of its tensors are computed (parametrized)."""

    token: Hashable
    plain: type[nn.Module]
    computed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetOrder:
    """A module has its members in this order now."""

    token: Hashable
    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetHooks:
    """A parameter, module or optimizer has these hooks now, and no others."""

    token: Hashable
    hooks: GradientHooks | ModuleHooks | StepHooks


@dataclass(frozen=True, slots=True)
class ForgetObjects:
    """Objects that are gone on the coordinator; nothing scheduled from now on names them."""

    tokens: tuple[Hashable, ...]


TokenUpdate = SetAttribute | SetRequiresGrad | SetHyperparameters | AddGroup
"""About one object."""

SetPart = SetClass | SetMember | SetOrder | SetHooks
"""About what an object is made of: definitions made afterwards have it already."""

Update = TokenUpdate | Moved | SetPart | ForgetObjects


def subject_of(update: Update) -> Hashable:
    """What an update is about: a later one about the same thing makes it void.

    Example:
        >>> from stratagem._ps.definitions import SetRequiresGrad, subject_of
        >>> subject_of(SetRequiresGrad(("parameter", 3), True)) == subject_of(
        ...     SetRequiresGrad(("parameter", 3), False)
        ... )
        True
    """
    if isinstance(update, SetHyperparameters):
        return ("settings", update.token, update.group, tuple(sorted(update.settings)))
    if isinstance(update, AddGroup):
        return ("group", update.token, id(update))
    if isinstance(update, ForgetObjects):
        return ("forget", update.tokens)
    if isinstance(update, Moved | SetMember):
        return ("member", update.token, update.kind, update.name)
    if isinstance(update, SetAttribute):
        return ("member", update.token, ATTRIBUTE, update.name)
    return (type(update).__name__, update.token)
