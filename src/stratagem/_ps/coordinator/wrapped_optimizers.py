"""Optimizers and schedulers that wrap others.

A user's optimizer around another one (SAM) runs its own code on workers, and the optimizer inside steps on the servers.

Of optimizers and schedulers that Lightning Fabric or accelerate have wrapped, workers get the ones inside. The wrappers prepare a step for the library's own distribution, mixed precision and gradient accumulation. Under parameter servers the
strategy distributes the step, so that the wrapped object alone is sent. Settings that would be lost are refused.
"""

from __future__ import annotations

import types
from typing import Any

from torch.optim import Optimizer

from stratagem._ps.definitions import WrapperDefinition
from stratagem._ps.optimizer_settings import own_attributes
from stratagem.errors import UnsupportedOptimizer

_ATTRIBUTES = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}
_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")


def inner_of(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that a user's optimizer steps: the one in its attributes that has its parameter groups.

    Example:
        >>> import torch
        >>> inner_of(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    """
    for one in own_attributes(optimizer).values():
        if isinstance(one, Optimizer) and one is not optimizer:
            groups = zip(optimizer.param_groups, one.param_groups, strict=False)
            if len(optimizer.param_groups) == len(one.param_groups) and all(
                mine is theirs for mine, theirs in groups
            ):
                return one
    return None


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps on servers."""
    inner = inner_of(optimizer)
    return optimizer if inner is None else innermost(inner)


def wrapper_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer around another one, which are all that workers get of it."""
    return {
        name: value
        for name, value in own_attributes(optimizer).items()
        if not isinstance(value, types.MethodType)  # put there when the strategy adopted it
    }


def define_wrapper(optimizer: Optimizer, inner: Optimizer) -> WrapperDefinition:
    """Return what workers need to rebuild an optimizer around another one."""
    attributes = wrapper_attributes(optimizer)
    defaults = dict(getattr(optimizer, "defaults", {}))  # its class may not call Optimizer.__init__
    return WrapperDefinition(type(optimizer), inner, defaults, attributes)


def unwrapped(obj: Any) -> Any:
    """Return the object inside a wrapper of these libraries; any other object unchanged.

    Raises:
        UnsupportedOptimizer: the wrapper accumulates gradients or scales the loss.
    """
    kind = type(obj)
    inner = _ATTRIBUTES.get(kind.__name__)
    if inner is not None and kind.__module__.startswith("accelerate."):
        if obj.gradient_state.num_steps > 1:
            _refuse(
                kind, f"gradient_accumulation_steps={obj.gradient_state.num_steps}", "Accelerator()"
            )
        if getattr(obj, "scaler", None) is not None:
            _refuse(kind, "a GradScaler", "Accelerator(mixed_precision='bf16')")
        return getattr(obj, inner)
    if isinstance(obj, Optimizer) and any(base.__module__ in _FABRIC for base in kind.__mro__):
        precision: Any = obj._strategy.precision  # type: ignore[attr-defined]
        if getattr(precision, "scaler", None) is not None:
            _refuse(kind, "a GradScaler", "Fabric(precision='bf16-mixed')")
        return obj.optimizer  # type: ignore[attr-defined]
    return obj


def _refuse(kind: type, setting: str, remedy: str) -> None:
    raise UnsupportedOptimizer(
        f"{kind.__name__} was captured by or passed to a scheduled function with {setting}: workers use the optimizer inside it, "
        f"which would not do that. Use {remedy}, and accumulate or scale in the function itself."
    )
