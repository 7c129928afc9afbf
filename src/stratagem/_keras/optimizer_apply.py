"""A Keras optimizer inside ``strategy.run``: one update for all replicas (KER-5, KER-6).

The gradients of the replicas are averaged over the rows of the global batch, and the optimizer updates the central variables once. A
gradient that ``backward()`` has already averaged is the same on every replica, so that its average is itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from stratagem._core.context import Replica, current_replica
from stratagem._core.replicas import once_for_all
from stratagem._keras.keras_names import names
from stratagem.errors import MisuseError


def apply_patch() -> None:
    """Replace ``BaseOptimizer.apply``."""
    optimizer_class = names().BaseOptimizer
    apply = optimizer_class.apply

    @functools.wraps(apply)
    def apply_once(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        replica = current_replica()
        if replica is None or replica.group.size == 1:
            return apply(self, grads, trainable_variables)
        return _apply_in_replica(replica, apply, self, list(grads), trainable_variables)

    optimizer_class.apply = apply_once


def _apply_in_replica(
    replica: Replica, apply: Any, optimizer: Any, grads: list[Any], variables: Any
) -> Any:
    strategy = replica.strategy
    if strategy.gradient_aggregation != "mean":
        raise MisuseError(
            f"apply() of Keras optimizer {optimizer.name!r} was called in a replica of {strategy!r}: it cannot tell "
            "whether a gradient was already summed. Use gradient_aggregation='mean', or a torch.optim optimizer."
        )
    if not strategy._steps_here:
        raise MisuseError(
            f"Keras optimizer {optimizer.name!r} was used in a function on a worker, but parameter servers hold the "
            "variables. Use model.fit(), or a torch.optim optimizer created under the scope."
        )
    weights = replica.group.row_weights

    def combine(brought: list[Any]) -> list[Any]:
        mean = [_mean(parts, weights) for parts in zip(*brought, strict=True)]
        with torch.no_grad():
            apply(optimizer, mean, variables)
        return [None] * len(brought)

    return once_for_all(replica, f"apply() of {optimizer.name!r}", grads, combine)


def _mean(parts: tuple[Any, ...], weights: tuple[float, ...]) -> Any:
    present = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight > 0]
    if any(part is None for part, _ in present):
        return None
    device = present[0][0].device
    return sum(part.to(device) * weight for part, weight in present)
