"""Rows that were fetched for one operator, and the autograd function that expands them."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.context import current_replica
from stratagem._ps.rows import SortedIds, sum_rows, take_rows
from stratagem._ps.tables.row_gradient import RowSource

ID_TYPES: Final = (torch.int64, torch.int32)


def replica_device() -> torch.device | None:
    """Return the device of the current replica; None for host memory, where rows are already."""
    replica = current_replica()
    return None if replica is None or replica.device.type == "cpu" else replica.device


def position_of(unique: Tensor, row: int | None, rows: int) -> int | None:
    """Return the position of one row of the table among those looked up; None if it is not there."""
    if row is None:
        return None
    row = row + rows if row < 0 else row
    found = int(torch.searchsorted(unique, row))
    return found if found < unique.numel() and int(unique[found]) == row else None


def row_ids(first: Any, rows: int) -> Tensor | None:
    """Return the row ids that a first index selects; None if it needs the whole table."""
    if isinstance(first, bool) or first is None or first is Ellipsis:
        return None
    if isinstance(first, int):
        if not -rows <= first < rows:
            raise IndexError(f"row {first!r} is out of range: the table has {rows} rows.")
        return torch.tensor(first % rows)
    if isinstance(first, slice):
        wanted = first.indices(rows)
        return None if wanted == (0, rows, 1) else torch.arange(*wanted)
    ids = torch.as_tensor(first)
    if ids.dtype == torch.bool:
        return ids.nonzero().flatten() if ids.dim() == 1 and ids.numel() == rows else None
    if ids.dtype not in ID_TYPES:
        return None  # as torch's own indexing treats them (bytes are a mask)
    return torch.where(ids < 0, ids + rows, ids)


class RowLookup:
    """Rows fetched for one operator: ids and the leaf in host memory, copies on the operator's device.

    Attributes:
        leaf: the rows; takes the gradient, from any device.
        device: the operator's device, if it is not the host.
    """

    __slots__ = ("device", "found", "leaf", "unique")

    def __init__(self, found: SortedIds, leaf: Tensor, device: torch.device | None) -> None:
        self.found = found
        self.unique = found.unique
        self.leaf = leaf
        self.device = device

    @property
    def places(self) -> Tensor:
        """Position of the row of every id asked, on the operator's device."""
        return self.found.places if self.device is None else self.found.places.to(self.device)

    @property
    def rows(self) -> Tensor:
        """The rows on the operator's device."""
        return self.leaf if self.device is None else self.leaf.to(self.device)

    def spread(self) -> Tensor:
        """Return the rows in the order and shape of the ids asked, repeated where ids repeat."""
        if self.device is None:
            flat = cast("Tensor", cast("Any", _Spread).apply(self.leaf, self.found))
        else:
            flat = self.rows.index_select(0, self.places.reshape(-1))
        return flat.view(*self.found.places.shape, *self.leaf.shape[1:])

    def shorten(self, source: RowSource, max_norm: float, norm_type: float) -> None:
        """Shorten rows longer than `max_norm`, here and on the servers, as F.embedding does in place."""
        with torch.no_grad():
            before = self.leaf.detach().clone()
            everything = torch.arange(self.unique.numel())
            torch.embedding_renorm_(self.leaf.detach(), everything, max_norm, norm_type)
            changed = (before != self.leaf.detach()).flatten(1).any(1).nonzero().flatten()
            if changed.numel():
                source.update_rows(self.unique[changed], self.leaf.detach()[changed])


def handed_over(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return a leaf for rows, and the rows as the result of an operator on it.

    The caller of a lookup may write into the result, so that it is not the leaf. The leaf has a shape and takes the gradient, but no
    memory: nothing reads its values.

    Example:
        >>> leaf, result = handed_over(torch.ones(2, 3))
        >>> result.mul_(2).sum().backward()
        >>> leaf.grad
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    leaf = rows.new_empty(()).expand(rows.shape).requires_grad_()
    return leaf, cast("Tensor", cast("Any", _HandedOver).apply(leaf, [rows]))


class _HandedOver(torch.autograd.Function):
    """Rows that were fetched for a leaf; their gradient is the leaf's."""

    @staticmethod
    @override
    def forward(ctx: Any, leaf: Tensor, rows: list[Tensor]) -> Tensor:
        return rows[0]

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    @override
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.clone()


class _Spread(torch.autograd.Function):
    """``leaf.index_select(0, places)``, bit for bit, in a quarter of its time.

    The ids are sorted already, so that the backward pass adds up neighbours instead of scattering.
    """

    @staticmethod
    @override
    def forward(ctx: Any, leaf: Tensor, found: SortedIds) -> Tensor:
        ctx.found = found
        return take_rows(leaf, found.places.reshape(-1))

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        found: SortedIds = ctx.found
        if not torch.is_grad_enabled():
            return sum_rows(gradient, found), None
        total = gradient.new_zeros(found.unique.numel(), *gradient.shape[1:])
        return total.index_add(0, found.places.reshape(-1), gradient), None

    @staticmethod
    @override
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        found: SortedIds = ctx.found
        return tangent.index_select(0, found.places.reshape(-1))
