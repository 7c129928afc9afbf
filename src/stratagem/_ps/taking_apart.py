"""How modules and the hooks on parameters are taken apart on the coordinator, to be told to workers."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from stratagem._ps import definitions


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


def _define_parametrized(module: Any) -> Sequence[object]:
    """torch refuses to pickle these, since their class is made on the fly: it is made again there."""
    plain = parametrize.type_before_parametrizations(module)
    plain = getattr(plain, "_plain_class", plain)  # one of `special_modules`
    names = tuple(module.parametrizations)
    made = definitions.ModuleDefinition(make_parametrized, (plain, names))
    return made, definitions.ModuleState(dict(vars(module)))


def make_parametrized(plain: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """An empty module of a class whose tensors of these names are computed."""
    module: nn.Module = vars(copyreg)["__newobj__"](plain)
    torch_parametrize: Any = parametrize
    torch_parametrize._inject_new_class(module)
    for name in names:
        torch_parametrize._inject_property(module, name)
    return module


def hooks_of(parameter: Tensor) -> definitions.GradientHooks:
    """The hooks the user put on a parameter.

    Example:
        >>> import torch
        >>> weight = nn.Parameter(torch.ones(2))
        >>> bool(hooks_of(weight))
        False
        >>> _ = weight.register_hook(lambda gradient: gradient / 2)
        >>> len(hooks_of(weight).on_gradient)
        1
    """
    return definitions.GradientHooks(
        tuple((parameter._backward_hooks or {}).values()),
        tuple((parameter._post_accumulate_grad_hooks or {}).values()),
    )
