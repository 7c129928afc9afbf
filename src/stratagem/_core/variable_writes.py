"""Writes to variables in replicas: checks, aggregation, and one write for all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stratagem._core import context, reduction, values
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.variables import Variable, VariableAggregation
from stratagem.errors import StrategyMismatch


def own_replica(variable: Variable, strategy: StrategyHooks) -> context.Replica | None:
    """Return the replica that writes, or None; raise for a write under another strategy (VAR-14)."""
    current = context.current_strategy()
    if current is not None and current is not strategy:
        raise StrategyMismatch(
            f"mixing different strategy objects: variable {variable.name!r} belongs to "
            f"{strategy!r} and cannot be written under {context.describe_context()}."
        )
    return context.current_replica()


def write_together(
    replica: context.Replica,
    variable: Variable,
    how: str,
    value: Any,
    apply: Callable[[list[Any]], list[torch.Tensor]],
) -> torch.Tensor:
    """Wait for all replicas; ``apply`` writes their values once and returns one result per replica."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
    label = f"{how} of variable {variable.name!r}"
    # In a tuple, since None means a replica that has ended.
    result: torch.Tensor = replica.group.rendezvous(
        replica.id,
        label,
        (value,),
        lambda brought: apply([each and each[0] for each in brought]),
    )
    return result


def aggregated(variable: Variable, brought: list[Any]) -> Any:
    """Combine the replicas' values as the variable's aggregation says (VAR-11)."""
    present = [each for each in brought if each is not None]
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return present[0]
    op = variable.aggregation.as_reduce_op()
    merged = values.merge(present) if len(present) > 1 else values.PerReplica(present)
    return reduction.reduce(op, merged, None, size=len(brought), nests=False)


def needs_aggregation(variable: Variable, how: str) -> ValueError:
    """Return the error for a write in a replica to a variable without aggregation."""
    return ValueError(
        f"{how} of variable {variable.name!r} in a replica needs to know how to combine the replicas' "
        "values: create it with aggregation SUM, MEAN or ONLY_FIRST_REPLICA, such as "
        "sg.Variable(..., aggregation=sg.VariableAggregation.SUM)."
    )


def fitting(variable: Variable, how: str, value: Any) -> torch.Tensor:
    """Return the value as a tensor of the variable's type and shape.

    Raises:
        ValueError: another shape, or a type that would change the value.
    """
    if isinstance(value, values.PerReplica) and context.current_replica() is None:
        raise AttributeError(
            f"{how} of variable {variable.name!r} got a PerReplica outside a replica: it has no "
            "single value. Use strategy.reduce(...) first."
        )
    is_plain = type(value) is torch.Tensor  # for which the conversion does nothing, slowly
    tensor = (value if is_plain else values.convert_to_tensor(value)).detach()
    if tensor.dtype != variable.dtype:
        plain = not isinstance(value, torch.Tensor | values.Convertible)
        lossless = not (tensor.is_floating_point() or tensor.is_complex()) or (
            tensor.is_floating_point()
            and (variable.dtype.is_floating_point or variable.dtype.is_complex)
        )
        if not (plain and lossless):
            raise ValueError(
                f"{how} of variable {variable.name!r} got {tensor.dtype}: expected "
                f"{variable.dtype}. Convert it with .to({variable.dtype})."
            )
        tensor = tensor.to(variable.dtype)
    if tensor.shape != variable.shape:
        raise ValueError(
            f"{how} of variable {variable.name!r} got a value of shape {tuple(tensor.shape)}: "
            f"expected {tuple(variable.shape)}."
        )
    return tensor
