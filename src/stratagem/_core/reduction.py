"""`ReduceOp`, reduce and gather, as pure functions of values.

`collectives` (``all_reduce`` and ``all_gather`` in replicas) uses the functions here. Components are combined in replica
order, so that results do not depend on timing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stratagem._core import devices, values
from stratagem._core.torch_patches.private_api import sparse_parts
from stratagem._core.values import DistributedValues, convert_to_tensor
from stratagem.errors import WrongArgumentType


class ReduceOp(enum.Enum):
    """Operation that combines components.

    Example:
        >>> import stratagem as sg
        >>> sg.ReduceOp.SUM.name
        'SUM'
    """

    SUM = "SUM"
    MEAN = "MEAN"


def as_reduce_op(op: Any) -> ReduceOp:
    """Return the `ReduceOp` for an operation or its name in any letter case.

    Raises:
        ValueError: an unknown name.
        WrongArgumentType: neither; a TypeError, and an AssertionError as in tf.distribute.
    """
    if isinstance(op, ReduceOp):
        return op
    if not isinstance(op, str):
        raise WrongArgumentType(
            f"reduce_op={op!r} has type {type(op).__name__}: expected ReduceOp.SUM, ReduceOp.MEAN or one "
            "of their names."
        )
    found = ReduceOp.__members__.get(op.upper())
    if found is None:
        raise ValueError(
            f"reduce_op={op!r} is not known: expected 'sum' or 'mean' in any letter case, "
            "ReduceOp.SUM or ReduceOp.MEAN."
        )
    return found


# ------------------------------------------------------------------ components


def is_sparse(value: Any) -> bool:
    """Return whether this is a sparse tensor (indexed slices in tf.distribute)."""
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def refuse_sparse(value: Any, what: str) -> None:
    """Raise for sparse tensors, in gather and all_gather (GAT-2, AG-1)."""
    parts = value.values if isinstance(value, DistributedValues) else (value,)
    if any(is_sparse(part) for part in parts):
        raise NotImplementedError(
            f"{what} of sparse tensors is not supported: a joined sparse tensor has no row order. "
            "Use .to_dense() first."
        )


def combine(op: ReduceOp, parts: Sequence[torch.Tensor], to: torch.device) -> torch.Tensor:
    """Return the elementwise sum or mean of equally shaped tensors, in order, on one device.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    first = parts[0]
    for i, part in enumerate(parts):
        if part.shape != first.shape:
            raise ValueError(
                f"components have different shapes: {[tuple(p.shape) for p in parts]}. With "
                "axis=None they are combined elementwise; for a partial batch give an axis, "
                "typically axis=0."
            )
        if part.dtype != first.dtype:
            raise ValueError(
                f"components have different dtypes: {[p.dtype for p in parts]} (replica {i} "
                f"differs from the first). Convert them to one dtype inside the step."
            )
    if first.layout is torch.sparse_coo and not any(part.requires_grad for part in parts):
        total = _join_sparse(parts, to)
        return total / len(parts) if op is ReduceOp.MEAN else total
    total = first.to(to)
    if total.dtype is torch.bool:  # torch adds booleans by "or"; their sum is a count
        total = total.to(torch.int64)
    if len(parts) > 1:
        total = total + parts[1].to(to)
        for part in parts[2:]:
            if total.requires_grad or part.requires_grad or is_sparse(part):
                total = total + part.to(to)
            else:
                total += part.to(to)
    return total / len(parts) if op is ReduceOp.MEAN else total


def _join_sparse(parts: Sequence[torch.Tensor], to: torch.device) -> torch.Tensor:
    """Return the sum of sparse tensors: all their entries, in order, not added up yet (RED-13)."""
    entries = [sparse_parts(part) for part in parts]
    return torch.sparse_coo_tensor(
        torch.cat([indices.to(to) for indices, _ in entries], dim=1),
        torch.cat([found.to(to) for _, found in entries]),
        parts[0].shape,
        check_invariants=False,
    )


def components(value: DistributedValues) -> list[torch.Tensor]:
    """Return the components as tensors, without those of replicas that ended early (None)."""
    return _tensors(value, value.values)


def contributing(value: DistributedValues) -> list[torch.Tensor]:
    """Return the components of replicas with rows, if ``run`` marked its results with row counts."""
    rows = value.rows if isinstance(value, values.PerReplica) else None
    if rows is None or not any(rows):
        return components(value)
    return _tensors(value, [part for part, n in zip(value.values, rows, strict=False) if n])


def _tensors(value: DistributedValues, parts: Sequence[Any]) -> list[torch.Tensor]:
    present = [part for part in parts if part is not None]
    if not present:
        raise ValueError(f"nothing to reduce: every component of {value!r} is None.")
    return [convert_to_tensor(part) for part in present]


# ------------------------------------------------------------------ reduce


def reduce(op: ReduceOp, value: Any, axis: Any, *, size: int, nests: bool) -> Any:
    """Implement ``Strategy.reduce`` for strategies that slice (RED-1 … RED-13).

    Args:
        op: the operation.
        value: a distributed value, a plain one, or (``nests``) a structure of them.
        axis: None, a dimension, or several.
        size: number of replicas.
        nests: whether structures are mapped over (mirrored) or refused (central storage).
    """
    if nests and values.open_node(value) is not None:
        return values.map_leaves(lambda leaf: reduce(op, leaf, axis, size=size, nests=False), value)
    here = devices.current_device()
    if axis is not None:
        if isinstance(value, DistributedValues):
            parts = components(value)
        else:
            # Every replica has the plain value (RED-9).
            parts = [convert_to_tensor(value)] * size
        return _reduce_axis(op, parts, _axes(axis), here)
    if isinstance(value, DistributedValues):
        return combine(op, contributing(value), here)
    return _reduce_plain(op, value, size)


def _reduce_plain(op: ReduceOp, value: Any, size: int) -> Any:
    if size == 1:
        if value is None:
            raise ValueError(
                "nothing to reduce: the value is None. Return something from the step."
            )
        return convert_to_tensor(value)
    if op is ReduceOp.MEAN:
        return value
    if isinstance(value, np.ndarray) and not value.any():
        return np.zeros_like(value)
    if isinstance(value, int | float) and value == 0:
        return value
    if isinstance(value, dict | list | tuple):
        raise ValueError(
            f"cannot sum a {type(value).__name__} over {size} replicas: reduce takes one per-replica "
            f"value at a time here. Reduce each of its parts; got {value!r:.200}."
        )
    raise ValueError(
        f"cannot sum {value!r} over {size} replicas: it is a single value, not one per replica, so "
        "it is unclear how often it counts. Return a tensor from the step, or use 'mean' if every "
        "replica has the same value."
    )


def reduce_alone(op: ReduceOp, value: Any, axis: Any) -> Any:
    """Implement ``Strategy.reduce`` for one replica that is not sliced (RED-10)."""
    if axis is None:
        return value
    return _reduce_axis(op, [convert_to_tensor(value)], _axes(axis), None)


def _axes(axis: Any) -> tuple[int, ...]:
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    axes = []
    for each in given:
        if isinstance(each, torch.Tensor) and each.ndim == 0 and not each.is_floating_point():
            each = int(each)
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise TypeError(
                f"axis={axis!r}: {each!r} is not a dimension. Expected None, an int, or a tuple of "
                "ints."
            )
        axes.append(int(each))
    return tuple(axes)


def _reduce_axis(
    op: ReduceOp, parts: Sequence[torch.Tensor], axes: tuple[int, ...], to: torch.device | None
) -> torch.Tensor:
    sums: list[torch.Tensor] = []
    count = 0
    for part in parts:
        rank = part.ndim
        for axis in axes:
            if not -rank <= axis < rank:
                raise ValueError(
                    f"axis={axis!r} is out of range for a component of shape {tuple(part.shape)}: "
                    f"expected {-rank} ≤ axis < {rank}."
                )
        count += math.prod(part.shape[axis] for axis in axes)
        sums.append(part.sum(dim=axes) if axes else part)
    total = combine(ReduceOp.SUM, sums, sums[0].device if to is None else to)
    return total / count if op is ReduceOp.MEAN else total


# ------------------------------------------------------------------ gather


def gather(value: Any, axis: Any, *, negative: bool) -> Any:
    """Implement ``Strategy.gather`` for strategies that slice (GAT-1 … GAT-3).

    Args:
        value: a distributed value or a structure of them; anything else is returned unchanged.
        axis: the dimension to join along.
        negative: whether it may be counted from the end.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, DistributedValues):
            return leaf
        refuse_sparse(leaf, "gather")
        return join(components(leaf), axis, devices.current_device(), negative=negative)

    return values.map_leaves(one, value)


def join(
    parts: Sequence[torch.Tensor], axis: Any, to: torch.device, *, negative: bool = True
) -> torch.Tensor:
    """Concatenate parts on one device; they may differ in size along ``axis`` only.

    Raises:
        ValueError: rank 0, ranks, other sizes or dtypes differ, axis out of range.
    """
    axes = _axes(axis)
    first = parts[0]
    shapes = [tuple(part.shape) for part in parts]
    if first.ndim == 0:
        raise ValueError(
            "scalars cannot be gathered: a component of rank 0 has no axis to join along. Use "
            ".unsqueeze(0) in the step, or reduce() instead."
        )
    low = -first.ndim if negative else 0
    if len(axes) != 1 or not low <= axes[0] < first.ndim:
        raise ValueError(
            f"axis={axis!r} is out of range for components of shape {shapes[0]}: expected "
            f"{low} ≤ axis < {first.ndim}."
        )
    where = axes[0] % first.ndim
    for shape in shapes:
        if len(shape) != first.ndim or any(
            a != b for i, (a, b) in enumerate(zip(shape, shapes[0], strict=True)) if i != where
        ):
            raise ValueError(
                f"components of shapes {shapes} cannot be joined along axis {where}: they must "
                "have one rank and differ along that axis only."
            )
    if any(part.dtype != first.dtype for part in parts):
        raise ValueError(f"components have different dtypes: {[part.dtype for part in parts]}.")
    return torch.cat([part.to(to) for part in parts], dim=where)
