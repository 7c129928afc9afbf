"""Keras' losses, batch normalization and optimizers in a replica (KER-3, KER-5, KER-6)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from stratagem._core.context import Replica, current_replica
from stratagem._core.replicas import once_for_all
from stratagem._keras.forward_pass import KEY
from stratagem._keras.keras_names import names
from stratagem.errors import MisuseError


def apply_patch() -> None:
    """Replace one method of each."""
    _patch_losses()
    _patch_normalization()
    _patch_optimizers()


def _patch_losses() -> None:
    """Replace ``Loss.__call__``: in a replica without rows, return a scalar.

    Keras does not reduce an empty tensor. The scalar is 0, and the replica's gradients count for nothing in the mean over rows.
    """
    loss_class = names().keras.losses.Loss
    call = loss_class.__call__

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        value = call(self, *args, **kwargs)
        if (
            isinstance(value, Tensor)
            and value.shape == (0,)
            and self.reduction is not None
            and current_replica() is not None
        ):
            return value.sum()
        return value

    loss_class.__call__ = __call__


def _patch_normalization() -> None:
    """Replace ``BatchNormalization._moments``: take mean and variance of the whole batch.

    The replicas wait for each other in every ``BatchNormalization`` that trains. Their moments, weighted by rows (with a mask:
    by unmasked elements), give the moments of the whole batch, so the layer computes what it computes on one device.
    """
    norm = names().BatchNormalization
    moments = norm._moments

    @functools.wraps(moments)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        replica = current_replica()
        if replica is None or replica.group.size == 1 or KEY not in replica.group.shared:
            return moments(self, inputs, mask)
        mean, variance = moments(self, inputs, mask)
        count = float(len(inputs)) if mask is None else float(mask.sum())
        brought = (mean, variance, count, inputs.device)
        return replica.group.rendezvous(
            replica.id, f"the moments of {self.name!r}", brought, _combine
        )

    norm._moments = _moments


def _combine(brought: list[Any]) -> list[Any]:
    """Return the moments of all rows, one pair for each replica."""
    present = [each for each in brought if each is not None]
    device = present[0][3]
    total = sum(count for _, _, count, _ in present) or 1.0
    weights = [count / total for _, _, count, _ in present]
    means = [each[0].to(device) for each in present]
    mean = sum(weight * own for weight, own in zip(weights, means, strict=True))
    # Not E[x²] − mean²: that loses the digits of a small variance.
    variance = sum(
        weight * (each[1].to(device) + torch.square(own - mean))
        for weight, own, each in zip(weights, means, present, strict=True)
    )
    return [None if each is None else (mean.to(each[3]), variance.to(each[3])) for each in brought]


def _patch_optimizers() -> None:
    """Replace ``BaseOptimizer.apply``: make one update for all replicas (KER-5, KER-6).

    The gradients of the replicas are averaged over the rows of the global batch, and the optimizer updates the central
    variables once. A gradient that ``backward()`` has already averaged is the same on every replica, so that its average is
    itself.
    """
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
