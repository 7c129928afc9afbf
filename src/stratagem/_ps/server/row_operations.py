"""Operations on rows of one tensor of a store: checks, copies, blocks, scatters."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from stratagem._ps.rows import in_range

LARGEST_EXPANSION_BYTES: Final = 1 << 30
"""Of one value that a scatter applies to many rows."""


def copy_rows(values: Tensor, target: Tensor, start: int, name: str) -> None:
    """Copy rows into consecutive rows of a tensor; one without axes is one row."""
    rows = target if target.dim() else target.reshape(1)
    values = values if values.dim() else values.reshape(1)
    stop = start + values.shape[0]
    if start < 0 or stop > rows.shape[0] or values.shape[1:] != rows.shape[1:]:
        raise ValueError(
            f"rows {start}…{stop} of shape {tuple(values.shape[1:])!r} do not fit into {name}, which "
            f"has {rows.shape[0]} rows of shape {tuple(rows.shape[1:])!r}."
        )
    rows[start:stop].copy_(values)


def check_ids(ids: Tensor, tensor: Tensor, name: str) -> None:
    """Refuse ids that are not rows of the tensor."""
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise ValueError(
            f"row ids for {name!r} have shape {tuple(ids.shape)!r} and {ids.dtype}: expected one "
            "axis of int64."
        )
    if ids.numel() == 0:
        return
    if tensor.dim() == 0:
        raise ValueError(f"{name!r} has no axis, so it has no rows.")
    if ids.is_contiguous() and in_range(ids, tensor.shape[0]):
        return
    smallest, largest = torch.aminmax(ids)
    if smallest < 0 or largest >= tensor.shape[0]:
        bad = int(smallest) if smallest < 0 else int(largest)
        raise ValueError(
            f"row id {bad!r} is out of range for {name!r}: expected 0 <= id < {tensor.shape[0]}."
        )


def expand_values(values: Tensor, ids: Tensor, tensor: Tensor, name: str) -> Tensor:
    """Return the values of a scatter with one row for each id; ValueError if they do not fit."""
    if values.dtype != tensor.dtype:
        raise ValueError(f"cannot scatter {values.dtype} into {name!r}: expected {tensor.dtype}.")
    expected = (ids.numel(), *tensor.shape[1:])
    if tuple(values.shape) == expected:
        return values
    if math.prod(expected) * values.itemsize > LARGEST_EXPANSION_BYTES:
        raise ValueError(
            f"cannot expand a value of shape {tuple(values.shape)!r} to {expected!r}: that is more "
            f"than {LARGEST_EXPANSION_BYTES} bytes. Scatter fewer rows at a time."
        )
    return values.expand(expected)


def scatter_rows(tensor: Tensor, operation: str, ids: Tensor, values: Tensor) -> None:
    """Combine rows into a tensor; several values for one row accumulate, or the last one wins."""
    if operation in ("add", "sub"):
        tensor.index_add_(0, ids, values, alpha=1 if operation == "add" else -1)
        return
    # The others work on the rows touched alone: gathered, combined, put back.
    unique, inverse = torch.unique(ids, return_inverse=True)
    rows = tensor.index_select(0, unique)
    target = inverse.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    if operation in ("min", "max"):
        rows.scatter_reduce_(0, target, values, "amin" if operation == "min" else "amax")
    elif operation == "mul":
        rows.scatter_reduce_(0, target, values, "prod")
    elif operation == "div":
        # a / b1 / b2 = a / (b1·b2): the divisors of each row are multiplied first.
        divisors = torch.ones_like(rows).scatter_reduce_(0, target, values, "prod")
        if tensor.is_floating_point() or tensor.is_complex():
            rows.div_(divisors)
        else:
            # The processor traps when it divides the smallest integer by -1: negate instead.
            negate = divisors == -1
            rows = rows.div_(divisors.masked_fill_(negate, 1), rounding_mode="trunc")
            rows = torch.where(negate, -rows, rows) if tensor.dtype.is_signed else rows
    elif operation == "update":
        # Of several values for one row the last counts; scatter_ alone leaves the winner open.
        order = torch.arange(ids.numel())
        last = torch.zeros_like(unique).scatter_reduce_(
            0, inverse, order, "amax", include_self=False
        )
        rows = values.index_select(0, last)
    else:
        raise ValueError(
            f"unknown scatter operation {operation!r}: expected add, sub, mul, div, min, max or "
            "update."
        )
    tensor.index_copy_(0, unique, rows)
