"""The gradient of a table, and the interface through which a table reaches its rows.

Every use of a table puts a *leaf* into the autograd graph: one with a row for each id of a lookup, or one over the whole table. When a
backward pass has put a gradient on a leaf, `RowGradient` takes that gradient over at once. So the table's gradient does not depend on which
leaves exist, and ``table.grad = None`` between the forward and the backward pass loses nothing.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor
from typing_extensions import override

from stratagem import metrics
from stratagem._core.torch_patches.private_api import own_memory
from stratagem._ps.rows import SortedIds, sort_ids, sum_rows
from stratagem._ps.tables.table_gradient import GradientPiece, TableGradient


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


class RowGradient:
    """Gradient of one table since the last `zero_grad`.

    Attributes:
        sparse: whether the gradient is sparse in plain PyTorch: every lookup had ``sparse=True``.
        before: called in a backward pass before a gradient is added.
        after: called in a backward pass after a gradient was added.
    """

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._pieces: list[GradientPiece] = []
        self._shown: TableGradient | None = None  # over the rows, once code of the user has asked
        # Leaves to which graphs lead, oldest first; each with its ids as an attribute.
        self._leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._whole: Callable[[], Tensor | None] = lambda: None  # the leaf over the whole table
        self.sparse = False
        self.before: Callable[[Tensor], None] | None = None
        self.after: Callable[[Tensor], None] | None = None

    # -------------------------------------------------------------- leaves

    def rows_leaf(
        self, rows: Tensor, ids: Tensor, found: SortedIds | None, *, sparse: bool, skip: int | None
    ) -> Tensor:
        """Return rows as the result of an operator on a leaf.

        The caller of a lookup may write into the result, so that it is not the leaf. The leaf has a shape and takes the gradient, but no
        memory: nothing reads its values.

        Args:
            rows: one for each id asked.
            ids: the ids, in the order asked.
            found: the ids sorted, if their gradients are to be added up at once.
            sparse: whether the gradient is sparse in plain PyTorch.
            skip: row that takes no gradient (padding).
        """
        ids = ids if found is None else found.unique
        leaf = rows.new_empty(()).expand(ids.numel(), *rows.shape[1:]).requires_grad_()
        self._watch(leaf, ids, skip, sparse=sparse, repeats=found is None)
        return cast("Tensor", cast("Any", _Rows).apply(leaf, [rows], found))

    def whole_leaf(self) -> Tensor:
        """Return a leaf over the whole table; all uses share one, so that autograd adds up their gradients."""
        current, leaf = self._source.whole(), self._whole()
        if leaf is None or leaf.data_ptr() != current.data_ptr():
            leaf = current.detach().requires_grad_()
            self._watch(leaf, None, None, sparse=False, repeats=False)
            self._whole = weakref.ref(leaf)
        return leaf

    def _watch(
        self, leaf: Any, ids: Tensor | None, skip: int | None, *, sparse: bool, repeats: bool
    ) -> None:
        leaf.kept = functools.partial(_kept, ids, skip)
        self._leaves[next(self._numbers)] = leaf
        take = weakref.WeakMethod(self._take)  # a graph may outlive the table

        def arrived(ready: Tensor) -> None:
            if (taken := take()) is not None:
                taken(ready, sparse=sparse, repeats=repeats)

        leaf.register_post_accumulate_grad_hook(arrived)

    def leaves(self) -> list[Tensor]:
        """Return the leaves that still exist, oldest first.

        The method ``kept`` of each returns, for its gradient, ids (None: all rows) and the values that count.
        """
        return list(self._leaves.values())

    def _take(self, leaf: Any, *, sparse: bool, repeats: bool) -> None:
        values, leaf.grad = leaf.grad, None
        if values is None:
            return
        if self.before is not None:
            self.before(leaf)
        self.sparse = sparse and (not self._pieces or self.sparse)
        ids, values = leaf.kept(values)
        self._pieces.append(GradientPiece(ids, values, repeats))
        if ids is None:
            self._merge()
        if self.after is not None:
            self.after(leaf)

    # -------------------------------------------------------------- the gradient

    def pieces(self) -> Sequence[tuple[Tensor, Tensor]] | None:
        """Return the rows of each lookup, in the order asked; None if they were added up already."""
        found = [(one.ids, one.values) for one in self._pieces if one.ids is not None]
        if len(found) < len(self._pieces) or not any(one.repeats for one in self._pieces):
            return None
        return None if any(values.requires_grad for _, values in found) else found

    def mark(self) -> Sequence[tuple[Tensor, int]]:
        """Return the tensors of the gradient, and their versions: others after every change."""
        return [(one.values, one.values._version) for one in self._pieces]

    def ids(self) -> Tensor | None:
        """Return the ids of the rows in `value`; None if it is the whole table's or None."""
        piece = self._merge()
        return None if piece is None else piece.ids

    def value(self) -> Tensor | None:
        """Return the gradient so far: rows, or the whole table's if an operator used the whole table."""
        piece = self._merge()
        return None if piece is None else piece.values

    def shown(self) -> Tensor | None:
        """Return the gradient of the whole table, as code of the user sees it."""
        piece = self._merge()
        if piece is None or piece.ids is None:
            return None if piece is None else piece.values
        if self._shown is None or self._shown.piece is not piece:
            self._shown = TableGradient.over(piece, self._source.shape)
        return self._shown

    def replace(self, value: Tensor | None) -> None:
        """Set the gradient: None, one of a `TableGradient`, a sparse or a whole one. Later backward passes add to it."""
        self._pieces = []
        if value is None:
            return
        if tuple(value.shape) != self._source.shape:
            raise ValueError(
                f"a gradient of shape {tuple(value.shape)!r} does not fit table "
                f"{self._source.name!r}: expected its shape {self._source.shape!r}."
            )
        if isinstance(value, TableGradient):
            self._pieces = [value.piece]
        elif value.is_sparse:
            value = value.coalesce()
            self._pieces = [GradientPiece(value.indices()[0], value.values())]
        else:
            self._pieces = [GradientPiece(None, value)]

    def take_over(self, other: RowGradient, *, copy: bool) -> None:
        """Become the gradient of another view of the same table; without `copy` both share memory."""
        piece, self.sparse = other._merge(), other.sparse
        self._pieces = []
        if piece is not None:
            values = piece.values.clone() if copy else piece.values.data
            self._pieces = [GradientPiece(piece.ids, values)]

    def as_sparse(self) -> Tensor | None:
        """Return rows as a sparse tensor of the table's shape, a whole gradient as it is."""
        piece = self._merge()
        if piece is None or piece.ids is None:
            return None if piece is None else piece.values
        return torch.sparse_coo_tensor(
            piece.ids.unsqueeze(0),
            piece.values,
            self._source.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def _merge(self) -> GradientPiece | None:
        """Return the gradient in one piece with sorted unique ids; None if there is none."""
        pieces = self._pieces
        if len(pieces) > 1 or (pieces and pieces[0].repeats):
            whole = [one for one in pieces if one.ids is None]
            merged = self._sum_of_rows(pieces) if not whole else _sum_with(whole[0], pieces)
            self._pieces = pieces = [merged]
        return pieces[0] if pieces else None

    def _sum_of_rows(self, pieces: Sequence[GradientPiece]) -> GradientPiece:
        found = sort_ids(torch.cat([one.ids for one in pieces if one.ids is not None]))
        values = torch.cat([one.values for one in pieces])
        if any(one.repeats for one in pieces):
            count_lookup(self._source.name, ids=0, rows=found.unique.numel())
        return GradientPiece(found.unique, _summed(values, found, has_graph=values.requires_grad))


def _kept(
    ids: Tensor | None, skip: int | None, values: Tensor, dim: int = 0
) -> tuple[Tensor | None, Tensor]:
    """Return the ids and rows of a gradient without one row; rows are along `dim`."""
    if ids is None or skip is None:
        return ids, values
    keep = (ids != skip).nonzero().flatten()
    return ids[keep], values.index_select(dim, keep)


def _sum_with(whole: GradientPiece, pieces: Sequence[GradientPiece]) -> GradientPiece:
    """Add pieces to that with all rows, in place unless that would be seen elsewhere."""
    total = whole.values
    for one in pieces:
        ids, values = one.ids, one.values
        if one is whole:
            continue
        if total.requires_grad or values.requires_grad or not own_memory([total]):
            total = total + values if ids is None else total.index_add(0, ids, values)
        else:
            total = total.add_(values) if ids is None else total.index_add_(0, ids, values)
    return GradientPiece(None, total)


def _summed(values: Tensor, found: SortedIds, *, has_graph: bool) -> Tensor:
    """Return the sum of the values of each id, as part of a graph if necessary."""
    if not has_graph:
        return sum_rows(values, found)
    total = values.new_zeros(found.unique.numel(), *values.shape[1:])
    return total.index_add(0, found.places.reshape(-1), values)


class _Rows(torch.autograd.Function):
    """Rows that were fetched for a leaf; their gradient is the leaf's. With sorted ids it adds up neighbours instead of scattering."""

    @staticmethod
    @override
    def forward(ctx: Any, leaf: Tensor, rows: list[Tensor], found: SortedIds | None) -> Tensor:
        ctx.found = found
        return rows[0]

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        found: SortedIds | None = ctx.found
        if found is not None:
            gradient = _summed(gradient, found, has_graph=torch.is_grad_enabled())
        return gradient, None, None


_counters: Final[dict[str, tuple[metrics.Counter, metrics.Counter]]] = {}


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
