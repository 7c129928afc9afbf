"""Batch normalization on several replicas: mean and variance of the whole batch.

The replicas wait for each other in every ``BatchNormalization`` that trains. Their moments, weighted by rows (with a mask: by
unmasked elements), give the moments of the whole batch, so the layer computes what it computes on one device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from stratagem._core.context import current_replica
from stratagem._keras.forward_pass import KEY
from stratagem._keras.keras_names import names


def apply_patch() -> None:
    """Replace ``BatchNormalization._moments``."""
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
