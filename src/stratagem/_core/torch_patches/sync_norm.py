"""``nn.SyncBatchNorm`` over the replicas of a run: statistics of the whole batch.

torch's own class synchronises processes. Here the replicas exchange their statistics once per layer in forward
and once in backward (``all_gather``), and each normalises with mean and variance of all rows, as one device does.
Uneven batches and a replica with one row or none are allowed.

Backward: replica j's loss depends on replica i's rows through the statistics. Replica i's gradients are later
weighted by i's share of the rows (`gradients`), although they belong to j's loss. So replica i must receive

    sum over j of  (weight of j) * d loss j / d statistics,   divided by the weight of i

with weights 1 under ``gradient_aggregation="sum"``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratagem._core import collectives
from stratagem._core.context import Replica


def normalise(module: Any, replica: Replica, x: Tensor) -> Tensor:
    """Compute the training forward of a ``SyncBatchNorm`` in a replica of several."""
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
    mean, variance, count = _statistics(replica, exact)
    if module.track_running_stats:
        _track(module, mean.detach(), variance.detach(), count)
    shape = [1, -1] + [1] * (x.dim() - 2)
    y = (exact - mean.view(shape)) * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        y = y * module.weight.view(shape)
    if module.bias is not None:
        y = y + module.bias.view(shape)
    return y.to(x.dtype)


def _statistics(replica: Replica, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean and biased variance per channel over all replicas' rows, and the number of values."""
    count = x.numel() // x.shape[1]
    if count:
        variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        own = torch.stack([mean, variance]).unsqueeze(0)
    else:
        own = x.sum() + x.new_zeros(1, 2, x.shape[1])  # part of the graph, as in other replicas
    weight = replica.group.row_weights[replica.id]
    if replica.strategy.gradient_aggregation == "sum":
        weight = float(weight > 0)
    parts, counts = collectives.all_gather(replica, (own, torch.tensor([count])), 0, weight=weight)
    total = int(counts.sum())
    if total <= 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{x.shape} in the whole batch"
        )
    share = (counts.to(parts) / total).view(-1, 1)
    whole = (parts[:, 0] * share).sum(0)
    spread = (parts[:, 0] - whole).square()
    return whole, ((parts[:, 1] + spread) * share).sum(0), total


@torch.no_grad()
def _track(module: Any, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update running statistics as torch does; every replica writes the same to its copy."""
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:  # a cumulative average
        momentum = 1.0 / float(module.num_batches_tracked)
    kept: Tensor = module.running_mean
    kept.mul_(1 - momentum).add_(mean.to(kept.dtype), alpha=momentum)
    kept = module.running_var
    kept.mul_(1 - momentum).add_(variance.to(kept.dtype), alpha=momentum * count / (count - 1))
