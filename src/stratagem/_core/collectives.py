"""Differentiable ``all_reduce`` and ``all_gather`` of the replicas of a run.

Each is one rendezvous forward and, where a gradient flows, one backward. `reduction` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from stratagem._core import reduction, values
from stratagem._core.context import Replica
from stratagem._core.reduction import ReduceOp


def all_reduce(replica: Replica | None, reduce_op: Any, value: Any) -> Any:
    """Return the sum or mean over all replicas of a nest of tensors."""
    op = reduction.as_reduce_op(reduce_op)
    if replica is None or replica.group.size == 1:
        return value
    tensors = _tensors(value, "all_reduce")
    label = f"all_reduce({op.name})"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        results = _apply(_AllReduce, replica, op, label, *tensors)
    else:
        results = _reduce(replica, op, tensors, label)
    return _refill(value, results)


def all_gather(
    replica: Replica | None, value: Any, axis: Any, *, weight: float | None = None
) -> Any:
    """Join a nest of tensors over all replicas along an axis.

    Args:
        replica: the calling replica.
        value: the nest.
        axis: the dimension to join along.
        weight: this replica's factor of its loss. The part of replica i then gets the gradients of all losses,
            each multiplied by the weight of its replica, divided by the weight of i. None: equal weights.
    """
    for leaf in values.leaves(value):
        reduction.refuse_sparse(leaf, "all_gather")
    if replica is None or replica.group.size == 1:
        return value
    tensors = _tensors(value, "all_gather")
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        results = _apply(_AllGather, replica, axis, weight, *tensors)
    else:
        results = _gather(replica, axis, tensors)[0]
    return _refill(value, results)


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def _tensors(value: Any, what: str) -> list[torch.Tensor]:
    found = []
    for leaf in values.leaves(value):
        if isinstance(leaf, values.Convertible):
            leaf = leaf._to_tensor()
        if not isinstance(leaf, torch.Tensor):
            raise ValueError(
                f"{what} got {leaf!r}, a {type(leaf).__name__}: expected tensors, whose device "
                "says where the result goes. Use torch.tensor(...)."
            )
        found.append(leaf)
    return found


def _refill(value: Any, results: Sequence[torch.Tensor]) -> Any:
    rest = iter(results)
    return values.map_leaves(lambda _: next(rest), value)


def _reduce(
    replica: Replica, op: ReduceOp, tensors: Sequence[torch.Tensor], label: str
) -> tuple[torch.Tensor, ...]:
    """Reduce a list of tensors in one rendezvous; every replica gets tensors of its own."""
    size = replica.group.size

    def combine(brought: list[Any]) -> list[tuple[torch.Tensor, ...]]:
        present = [each for each in brought if each is not None]
        if len({len(each) for each in present}) > 1:
            raise ValueError(f"{label}: replicas brought nests of different sizes.")
        totals = [
            reduction.combine(op, column, column[0].device) for column in zip(*present, strict=True)
        ]
        return [_own(totals, brought[i], first=i == 0) for i in range(size)]

    with torch.no_grad():
        result: tuple[torch.Tensor, ...] = replica.group.rendezvous(
            replica.id, label, [t.detach() for t in tensors], combine
        )
    return result


def _own(
    totals: Sequence[torch.Tensor], like: Sequence[torch.Tensor] | None, *, first: bool
) -> tuple[torch.Tensor, ...]:
    # The first replica takes the sums themselves; the others get copies, which they may write.
    if like is None:
        return ()
    return tuple(
        t if first else t.to(own.device, copy=True) for t, own in zip(totals, like, strict=True)
    )


def _gather(
    replica: Replica, axis: Any, tensors: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], list[tuple[int, int]]]:
    """Return the joined tensors, and begin and length of this replica's part in each."""
    size = replica.group.size

    def combine(brought: list[Any]) -> list[Any]:
        present = [each for each in brought if each is not None]
        joined = [
            reduction.join(column, axis, column[0].device) for column in zip(*present, strict=True)
        ]
        begins = [0] * len(joined)
        results: list[Any] = []
        for i in range(size):
            places = []
            for k, part in enumerate(brought[i] or ()):
                places.append((begins[k], part.shape[axis]))
                begins[k] += part.shape[axis]
            results.append((_own(joined, brought[i], first=i == 0), places))
        return results

    with torch.no_grad():
        result: tuple[tuple[torch.Tensor, ...], list[tuple[int, int]]] = replica.group.rendezvous(
            replica.id, f"all_gather(axis={axis!r})", [t.detach() for t in tensors], combine
        )
    return result


def _filled(gradients: Sequence[torch.Tensor | None], shapes: Any) -> list[torch.Tensor]:
    return [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(gradients, shapes, strict=True)
    ]


class _AllReduce(torch.autograd.Function):
    """Gradient of an all-sum is the all-sum of gradients, of an all-mean the all-mean."""

    @staticmethod
    @override
    def forward(
        ctx: Any, replica: Replica, op: ReduceOp, label: str, *tensors: torch.Tensor
    ) -> Any:
        ctx.replica, ctx.op, ctx.label = replica, op, label
        ctx.sparse = any(reduction.is_sparse(t) for t in tensors)
        return _remember(ctx, _reduce(replica, op, tensors, label))

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if ctx.sparse:
            raise NotImplementedError(
                "the gradient of all_reduce of sparse tensors is not supported. Use .to_dense() "
                "before all_reduce."
            )
        filled = _filled(gradients, ctx.shapes)
        label = f"backward of {ctx.label}"
        # By a function of the graph, so that second derivatives flow between replicas too.
        return (None, None, None, *_apply(_AllReduce, ctx.replica, ctx.op, label, *filled))


class _AllGather(torch.autograd.Function):
    """Gradient: the all-sum of gradients, of which each replica takes its own slice."""

    @staticmethod
    @override
    def forward(
        ctx: Any, replica: Replica, axis: int, weight: float | None, *tensors: torch.Tensor
    ) -> Any:
        results, places = _gather(replica, axis, tensors)
        ctx.place = replica, axis, weight, places
        return _remember(ctx, results)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        filled = _filled(gradients, ctx.shapes)
        return (None, None, None, *_apply(_AllGatherBackward, *ctx.place, *filled))


class _AllGatherBackward(torch.autograd.Function):
    """The backward of `_AllGather`. Its own gradient is an all-gather: weights cancel out."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        replica: Replica,
        axis: int,
        weight: float | None,
        places: Sequence[tuple[int, int]],
        *gradients: torch.Tensor,
    ) -> Any:
        ctx.replica, ctx.axis, ctx.weight = replica, axis, weight
        weighted = [_scaled(gradient, weight) for gradient in gradients]
        summed = _reduce(replica, ReduceOp.SUM, weighted, "backward of all_gather")
        slices = [
            total.narrow(axis, begin, length)
            for total, (begin, length) in zip(summed, places, strict=True)
        ]
        own = [_scaled(part, 1 / weight if weight else weight) for part in slices]
        return _remember(ctx, tuple(own))

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        filled = _filled(gradients, ctx.shapes)
        gathered = _apply(_AllGather, ctx.replica, ctx.axis, ctx.weight, *filled)
        return (None, None, None, None, *gathered)


def _remember(ctx: Any, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Note the shapes of a function's results for its backward; integers have no gradient."""
    ctx.shapes = [(r.shape, r.dtype, r.device) for r in results]
    ctx.mark_non_differentiable(
        *[r for r in results if not (r.is_floating_point() or r.is_complex())]
    )
    return results


def _scaled(tensor: torch.Tensor, factor: float | None) -> torch.Tensor:
    if factor is None or not tensor.is_floating_point():
        return tensor
    # The gradient of a replica without rows may be NaN: replace it, do not multiply it by 0.
    return tensor * factor if factor else torch.zeros_like(tensor)
