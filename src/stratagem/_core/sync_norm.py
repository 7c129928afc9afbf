"""``nn.SyncBatchNorm`` over the replicas of a run: the statistics of the whole batch.

torch's own synchronises processes; here the replicas of a run meet once per layer in forward and once in
backward, and every one normalises with the mean and variance of all rows, as one device would: uneven
batches and a replica with one row or none included. Outside replicas, in evaluation and with
one replica it is torch's.

Backward: replica j's loss depends on replica i's rows through the statistics, and i's gradients are
then weighted by i's share of the rows (`gradients`), although it is j's loss. So what comes back is

    sum over j of  (weight of j) * d loss j / d statistics,   divided by the weight of i

with weights 1 under ``gradient_aggregation="sum"``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.context import Replica


def normalise(module: Any, replica: Replica, x: Tensor) -> Tensor:
    """The training forward of a ``SyncBatchNorm`` in a replica of several."""
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
    mean, variance, count = _apply(replica, exact)
    if module.track_running_stats:
        _track(module, mean.detach(), variance.detach(), float(count))
    shape = [1, -1] + [1] * (x.dim() - 2)
    y = (exact - mean.view(shape)) * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        y = y * module.weight.view(shape)
    if module.bias is not None:
        y = y + module.bias.view(shape)
    return y.to(x.dtype)


def _apply(replica: Replica, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    function: Any = _Statistics
    result: tuple[Tensor, Tensor, Tensor] = function.apply(replica, x)
    return result


@torch.no_grad()
def _track(module: Any, mean: Tensor, variance: Tensor, count: float) -> None:
    """Running statistics, as torch keeps them; every replica writes the same to its copy."""
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:  # a cumulative average
        momentum = 1.0 / float(module.num_batches_tracked)
    kept: Tensor = module.running_mean
    kept.mul_(1 - momentum).add_(mean.to(kept.dtype), alpha=momentum)
    kept = module.running_var
    kept.mul_(1 - momentum).add_(variance.to(kept.dtype), alpha=momentum * count / (count - 1))


class _Statistics(torch.autograd.Function):
    """Mean and biased variance per channel over the rows of all replicas, and how many values."""

    @staticmethod
    @override
    def forward(ctx: Any, replica: Replica, x: Tensor) -> Any:
        over = [0, *range(2, x.dim())]
        count = x.numel() // x.shape[1]
        mean = x.mean(over) if count else x.new_zeros(x.shape[1])
        squares = (x - _spread(mean, x)).square().sum(over)
        shape = x.shape

        def combine(brought: list[Any]) -> list[Any]:
            present = [each for each in brought if each is not None and each[0]]
            total = sum(n for n, _, _ in present)
            if total <= 1:
                raise ValueError(
                    "Expected more than 1 value per channel when training, got input size "
                    f"{shape} in the whole batch"
                )
            managed = present[0][1].device
            whole = sum(m.to(managed) * (n / total) for n, m, _ in present)
            apart = sum(s.to(managed) + (m.to(managed) - whole).square() * n for n, m, s in present)
            results = (whole, apart / total, torch.tensor(float(total)))
            return [results] * len(brought)

        found = replica.group.meet(
            replica.id, "forward of SyncBatchNorm", (count, mean, squares), combine
        )
        mean, variance, total = (each.to(x.device, copy=True) for each in found)
        ctx.replica = replica
        ctx.save_for_backward(x, mean, total)
        ctx.mark_non_differentiable(total)
        return mean, variance, total

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        to_mean, to_variance, _ = gradients
        replica: Replica = ctx.replica
        x, mean, total = ctx.saved_tensors
        weights = replica.group.row_weights
        if replica.strategy.gradient_aggregation == "sum":
            weights = tuple(float(weight > 0) for weight in weights)

        def combine(brought: list[Any]) -> list[Any]:
            # A replica without rows may bring NaN: it is left out, not multiplied by 0.
            parts = [(each, weights[j]) for j, each in enumerate(brought) if each is not None]
            live = [(each, weight) for each, weight in parts if weight > 0]
            managed = live[0][0][0].device
            return [
                tuple(sum(each[k].to(managed) * weight for each, weight in live) for k in range(2))
            ] * len(brought)

        label = "backward of SyncBatchNorm"
        summed = replica.group.meet(replica.id, label, (to_mean, to_variance), combine)
        if not x.numel():
            return None, torch.zeros_like(x)
        to_mean, to_variance = (each.to(x.device) / weights[replica.id] for each in summed)
        back = _spread(to_mean, x) + _spread(to_variance, x) * 2 * (x - _spread(mean, x))
        return None, back / total


def _spread(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view([1, -1] + [1] * (x.dim() - 2))
