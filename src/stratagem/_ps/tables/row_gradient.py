"""Rows that operators look up, the gradient of a table, and the interface through which a table reaches its rows.

Every use of a table puts a *leaf* into the autograd graph: a tensor with the rows that were looked up, or one
over the whole table. When a backward pass has put a gradient on a leaf, `RowGradient` takes that gradient over at once.
So the table's gradient does not depend on which leaves exist, and ``table.grad = None`` between
the forward and the backward pass loses nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from typing_extensions import override

from stratagem import metrics
from stratagem._core.context import current_replica
from stratagem._core.torch_patches.private_api import own_memory
from stratagem._ps.rows import SortedIds, sort_ids, sum_rows, take_rows
from stratagem._ps.tables.table_gradient import TableGradient


class RowSource(Protocol):
    """Storage of a table's rows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, ids: Tensor) -> Tensor:
        """Return a new tensor with these rows; `ids` are sorted, unique and in range."""

    def whole(self) -> Tensor:
        """Return all rows, current at the time of the call; the caller must not write to them."""

    def rows_as_asked(self, ids: Tensor) -> Tensor | None:
        """Return a new tensor with these rows, in any order and repeated; None if that would be slow."""

    def update_rows(self, ids: Tensor, values: Tensor) -> None:
        """Overwrite rows (a lookup with ``max_norm`` shortens them, as in plain PyTorch)."""


_FIRST_CLEANUP = 64
"""Number of recorded leaves at which dead ones are removed for the first time."""


class LiveLeaf(NamedTuple):
    """A leaf that a graph may still lead to, with the ids of its rows (None: the whole table)."""

    ids: Tensor | None
    leaf: Tensor


class RowGradient:
    """Gradient of one table since the last `zero_grad`.

    Attributes:
        sparse: whether the gradient is sparse in plain PyTorch: every lookup had ``sparse=True``.
        before: called in a backward pass before a gradient is added.
        after: called in a backward pass after a gradient was added.
    """

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._ids: Tensor | None = None  # rows of `_values`; None: the whole table
        self._values: Tensor | None = None
        self._shown: TableGradient | None = None  # over `_values`, once code of the user has asked
        # Rows not yet added to `_values`; ids of a lookup in the order asked may repeat.
        self._arrived: list[tuple[Tensor, Tensor]] = []
        self._repeats = False  # whether ids of `_arrived` may repeat
        self._whole: Tensor | None = None  # the leaf over the whole table
        self._leaves: list[tuple[Tensor | None, weakref.ref[Tensor]]] = []
        self._clean_at = _FIRST_CLEANUP
        self.sparse = False
        self.before: Callable[[Tensor], None] | None = None
        self.after: Callable[[Tensor], None] | None = None

    # -------------------------------------------------------------- leaves

    def watch(
        self,
        ids: Tensor | None,
        leaf: Tensor,
        *,
        sparse: bool,
        skip: int | None,
        repeats: bool = False,
    ) -> None:
        """Take over every gradient of a leaf with these rows.

        Args:
            ids: the rows; None for the whole table.
            leaf: the leaf.
            sparse: whether the gradient is sparse in plain PyTorch.
            skip: position of a row to leave out.
            repeats: whether ids may repeat and are not sorted.
        """
        if len(self._leaves) >= self._clean_at:
            self._leaves = [one for one in self._leaves if one[1]() is not None]
            self._clean_at = max(_FIRST_CLEANUP, 2 * len(self._leaves))
        self._leaves.append((ids, weakref.ref(leaf)))
        reference = weakref.ref(self)  # this object holds the leaf over the whole table

        def arrived(ready: Tensor) -> None:
            gradient = reference()
            if gradient is not None:
                gradient._take(ids, ready, sparse=sparse, skip=skip)
                gradient._repeats = gradient._repeats or repeats

        cast("Any", leaf).register_post_accumulate_grad_hook(arrived)

    def whole_leaf(self) -> Tensor:
        """Return a leaf over the whole table; all uses share one, so that autograd adds up their gradients."""
        current = self._source.whole()
        if self._whole is None or self._whole.data_ptr() != current.data_ptr():
            self._whole = current.detach().requires_grad_()
            self.watch(None, self._whole, sparse=False, skip=None)
        return self._whole

    def mark(self) -> tuple[Tensor, ...]:
        """Return the tensors of the gradient: others after every change by a backward pass or `zero_grad`."""
        kept = () if self._values is None else (self._values,)
        return *kept, *(values for _, values in self._arrived)

    def leaves(self) -> list[LiveLeaf]:
        """Return the leaves that still exist, oldest first."""
        found = [(ids, leaf()) for ids, leaf in self._leaves]
        return [LiveLeaf(ids, leaf) for ids, leaf in found if leaf is not None]

    def _take(self, ids: Tensor | None, leaf: Tensor, *, sparse: bool, skip: int | None) -> None:
        values, leaf.grad = leaf.grad, None
        if values is None:
            return
        if self.before is not None:
            self.before(leaf)
        is_first = self._values is None and not self._arrived
        self.sparse = sparse and (is_first or self.sparse)
        if ids is None:
            self._add_whole(values)
        else:
            if skip is not None and sparse:
                keep = torch.arange(ids.numel()) != skip
                ids, values = ids[keep], values[keep]
            self._arrived.append((ids, values))
        if self.after is not None:
            self.after(leaf)

    # -------------------------------------------------------------- the gradient

    def pieces(self) -> list[tuple[Tensor, Tensor]] | None:
        """Return the rows of each lookup, in the order asked; None if they were added up already."""
        if self._values is not None or not self._arrived or not self._repeats:
            return None
        if any(values.requires_grad for _, values in self._arrived):
            return None
        return self._arrived

    def ids(self) -> Tensor | None:
        """Return the ids of the rows in `value`; None if it is the whole table's or None."""
        self._merge()
        return self._ids

    def value(self) -> Tensor | None:
        """Return the gradient so far: rows, or the whole table's if an operator used the whole table."""
        self._merge()
        return self._values

    def shown(self) -> Tensor | None:
        """Return the gradient of the whole table, as code of the user sees it."""
        values, ids = self.value(), self._ids
        if values is None or ids is None:
            return values
        if self._shown is None or self._shown.rows is not values:
            self._shown = TableGradient.over(ids, values, self._source.shape, self)
        return self._shown

    def become_whole(self, rows: Tensor, whole: Tensor) -> None:
        """Hold all rows instead of these."""
        if self._values is not None and self._values.data_ptr() == rows.data_ptr():
            self._ids, self._values = None, whole

    def replace(self, value: Tensor | None) -> None:
        """Set the gradient: None, one of a `TableGradient`, a sparse or a whole one."""
        if value is None:
            self.clear()
            return
        ids: Tensor | None = None
        if tuple(value.shape) != self._source.shape:
            self.clear()
            raise ValueError(
                f"a gradient of shape {tuple(value.shape)!r} does not fit table "
                f"{self._source.name!r}: expected its shape {self._source.shape!r}."
            )
        if isinstance(value, TableGradient):
            ids, value = value.ids, value.rows
        elif value.is_sparse:
            value = value.coalesce()
            ids, value = value.indices()[0], value.values()
        self._arrived = []
        self._repeats = False
        self._ids, self._values = ids, value

    def take_over(self, other: RowGradient, *, copy: bool) -> None:
        """Become the gradient of another view of the same table; without `copy` both share memory."""
        value, ids = other.value(), other.ids()
        self.clear()
        self.sparse = other.sparse
        if value is not None:
            self._ids, self._values = ids, value.clone() if copy else value.data

    def as_sparse(self) -> Tensor | None:
        """Return rows as a sparse tensor of the table's shape, a whole gradient as it is."""
        value, ids = self.value(), self.ids()
        if value is None or ids is None:
            return value
        return torch.sparse_coo_tensor(
            ids.unsqueeze(0), value, self._source.shape, is_coalesced=True, check_invariants=False
        )

    def clear(self) -> None:
        """Set the gradient to None. Backward passes that come later add to it."""
        self._arrived = []
        self._repeats = False
        self._ids = self._values = None

    def _add_whole(self, values: Tensor) -> None:
        self._merge()
        ids, others = self._ids, self._values
        self._ids = None
        if others is None:
            self._values = values
        elif ids is not None:
            self._values = _added(values, ids, others)
        else:
            self._values = _added(others, None, values)

    def _merge(self) -> None:
        if not self._arrived:
            return
        pieces, self._arrived = self._arrived, []
        if self._values is not None and self._ids is None:
            for ids, values in pieces:
                self._values = _added(self._values, ids, values)
            return
        if self._ids is not None and self._values is not None:
            pieces.insert(0, (self._ids, self._values))
        repeats, self._repeats = self._repeats, False
        if len(pieces) == 1 and not repeats:
            self._ids, self._values = pieces[0]
            return
        found = sort_ids(torch.cat([ids for ids, _ in pieces]))
        values = torch.cat([values for _, values in pieces])
        self._ids = found.unique
        if repeats:
            count_lookup(self._source.name, ids=0, rows=found.unique.numel())
        if values.requires_grad:
            total = values.new_zeros(found.unique.numel(), *values.shape[1:])
            self._values = total.index_add(0, found.places, values)
        else:
            self._values = sum_rows(values, found)


def _added(total: Tensor, ids: Tensor | None, values: Tensor) -> Tensor:
    """Add rows (`ids` None: all of them) to a whole gradient, in place unless that would be seen elsewhere."""
    if total.requires_grad or values.requires_grad or not own_memory([total]):
        return total + values if ids is None else total.index_add(0, ids, values)
    return total.add_(values) if ids is None else total.index_add_(0, ids, values)


_counters: dict[str, tuple[metrics.Counter, metrics.Counter]] = {}


def count_lookup(table: str, *, ids: int, rows: int) -> None:
    """Count one lookup in the metrics ``table.ids:NAME`` and ``table.rows:NAME``.

    Example:
        >>> count_lookup("doc", ids=4, rows=3)
        >>> metrics.snapshot().counters["table.rows:doc"] >= 3
        True
    """
    found = _counters.get(table)
    if found is None:
        names = (f"table.ids:{table}", f"table.rows:{table}")
        found = _counters[table] = (metrics.counter(names[0]), metrics.counter(names[1]))
    found[0].add(ids)
    found[1].add(rows)


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
