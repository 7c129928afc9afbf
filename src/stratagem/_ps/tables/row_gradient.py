"""Gradient of a table of rows, and the interface through which a table reaches its rows.

Every use of a table puts a *leaf* into the autograd graph: a tensor with the rows that were looked up, or one
over the whole table. When a backward pass has put a gradient on a leaf, `RowGradient` takes that gradient over at once.
So the table's gradient does not depend on which leaves exist, and ``table.grad = None`` between
the forward and the backward pass loses nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from stratagem import metrics
from stratagem._core.torch_patches.private_api import own_memory
from stratagem._ps.rows import sort_ids, sum_rows
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

    def whole_leaf(self, wants_gradient: bool) -> Tensor:
        """Return a leaf over the whole table; all uses share one, so that autograd adds up their gradients."""
        current = self._source.whole()
        if not wants_gradient:
            return current.detach()
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
