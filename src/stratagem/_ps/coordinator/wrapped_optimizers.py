"""Optimizers and schedulers that Lightning Fabric or accelerate have wrapped: workers get the ones inside.

The wrappers prepare a step for the library's own distribution, mixed precision and gradient accumulation. Under parameter servers the
strategy distributes the step, so that the wrapped object alone is sent. Settings that would be lost are refused.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from stratagem.errors import UnsupportedOptimizer

_ATTRIBUTES = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}
_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")


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
