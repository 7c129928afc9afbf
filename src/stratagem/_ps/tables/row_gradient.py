"""The gradient of a table of rows: what arrived, row by row or whole, since the last `zero_grad`.

Filled by `tables.py` (lookups), read by the optimizer's home in `workers.py`. Here is also what both
need to know of the place the rows are in (`RowSource`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from stratagem._ps.rows import sort_ids, sum_rows


class RowSource(Protocol):
    """Where a table's rows are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, ids: Tensor) -> Tensor:
        """A fresh tensor with these rows; `ids` are sorted, unique and in range."""

    def whole(self) -> Tensor:
        """All rows, current at the time of the call; not to be written to."""

    def update_rows(self, ids: Tensor, values: Tensor) -> None:
        """Overwrite rows (a lookup with ``max_norm`` shortens them, as in plain PyTorch)."""


HANDED_OUT = 64
"""Leaves of a table remembered before those that are gone are dropped."""


class LiveLeaf(NamedTuple):
    """A leaf that some graph may still lead to: which rows it holds (None: all)."""

    ids: Tensor | None
    leaf: Tensor


class RowGradient:
    """What has arrived as gradient of one table since the last `zero_grad`.

    Leaves report when their gradient arrives, so a lookup without a `backward` costs nothing later.
    """

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._arrived: dict[int, tuple[Tensor, Tensor, int | None]] = {}
        self._ids: Tensor | None = None
        self._values: Tensor | None = None
        self._whole: Tensor | None = None
        self._handed_out: list[tuple[Tensor | None, weakref.ref[Tensor]]] = []
        self._drop_at = HANDED_OUT
        self.sparse = False
        # Called in a backward pass, before a gradient is added and after.
        self.before: Callable[[Tensor], None] | None = None
        self.after: Callable[[Tensor], None] | None = None

    def watch(self, ids: Tensor, leaf: Tensor, *, sparse: bool, skip: int | None) -> None:
        """Take the leaf's gradient when it arrives."""
        self._hand_out(ids, leaf)

        def arrived(ready: Tensor) -> None:
            if self.before is not None:
                self.before(ready)
            self._arrived[id(ready)] = (ids, ready, skip)
            self.sparse = sparse
            if self.after is not None:
                self.after(ready)

        cast("Any", leaf).register_post_accumulate_grad_hook(arrived)

    def whole_leaf(self, wants_gradient: bool) -> Tensor:
        """A leaf over the whole table; the same one until `clear`, so gradients accumulate."""
        current = self._source.whole()
        if not wants_gradient:
            return current.detach()
        if self._whole is None or self._whole.data_ptr() != current.data_ptr():
            grad = None if self._whole is None else self._whole.grad
            self._whole = current.detach().requires_grad_()
            self._whole.grad = grad
            self._hand_out(None, self._whole)
            if self.after is not None:
                self._report_whole(self._whole)
        return self._whole

    def leaves(self) -> list[LiveLeaf]:
        """What has been handed out to be differentiated and still exists, oldest first."""
        found = [(ids, leaf()) for ids, leaf in self._handed_out]
        return [LiveLeaf(ids, leaf) for ids, leaf in found if leaf is not None]

    def _hand_out(self, ids: Tensor | None, leaf: Tensor) -> None:
        # Leaves live as long as the graphs they are in; now and then those that are gone are dropped.
        if len(self._handed_out) >= self._drop_at:
            self._handed_out = [one for one in self._handed_out if one[1]() is not None]
            self._drop_at = max(HANDED_OUT, 2 * len(self._handed_out))
        self._handed_out.append((ids, weakref.ref(leaf)))

    def _report_whole(self, leaf: Tensor) -> None:
        mine = weakref.ref(self)  # the leaf, which we keep, keeps the hooks

        def before(grad: Tensor) -> None:
            owner = mine()
            if owner is not None and owner.before is not None:
                owner.before(grad)

        def arrived(ready: Tensor) -> None:
            owner = mine()
            if owner is not None and owner.after is not None:
                owner._whole = (
                    ready  # what was there before may have been put aside, and this with it
                )
                owner.after(ready)

        leaf.register_hook(before)
        cast("Any", leaf).register_post_accumulate_grad_hook(arrived)

    def ids(self) -> Tensor | None:
        """Ids of the rows `value` speaks of; None for a whole gradient or none."""
        return self._ids if self.value() is not None and not self._is_whole() else None

    def value(self) -> Tensor | None:
        """The gradient so far: rows, or the whole table's if an operator used the whole table."""
        self._merge()
        if self._is_whole():
            assert self._whole is not None
            if self._values is not None:
                assert self._ids is not None
                assert self._whole.grad is not None
                self._whole.grad.index_add_(0, self._ids, self._values)
                self._ids = self._values = None
            return self._whole.grad
        return self._values

    def replace(self, value: Tensor | None) -> None:
        """``table.grad = value``: None, rows as `value` gave them, a sparse or a whole gradient."""
        ids = self.ids()
        if value is not None and value.is_sparse:
            value = value.coalesce()
            ids, value = value.indices()[0], value.values()
        elif value is not None and ids is not None and value.shape[0] != ids.numel():
            ids = None
        self.clear()
        if value is None:
            return
        if ids is not None:
            self._ids, self._values = ids, value
            return
        if tuple(value.shape) != self._source.shape:
            raise ValueError(
                f"a gradient of shape {tuple(value.shape)!r} does not fit table "
                f"{self._source.name!r}: expected its shape {self._source.shape!r}, or the shape of "
                "the gradient's rows."
            )
        self._whole = self._source.whole().detach().requires_grad_()
        self._whole.grad = value
        self._hand_out(None, self._whole)

    def take_over(self, other: RowGradient, *, copy: bool) -> None:
        """Become the gradient of another view of the same table; not copied, it shares its memory."""
        value, ids = other.value(), other.ids()
        self.clear()
        self.sparse = other.sparse
        if value is None:
            return
        value = value.clone() if copy else value.data
        if ids is None:
            self.replace(value)
        else:
            self._ids, self._values = ids, value

    def as_sparse(self) -> Tensor | None:
        """The gradient as a sparse tensor of the table's shape; the whole one as it is."""
        value, ids = self.value(), self.ids()
        if value is None or ids is None:
            return value
        return torch.sparse_coo_tensor(
            ids.unsqueeze(0), value, self._source.shape, is_coalesced=True, check_invariants=False
        )

    def clear(self) -> None:
        """Forget everything that arrived."""
        self._arrived.clear()
        self._ids = self._values = None
        if self._whole is not None:
            self._whole.grad = None
            self._whole = None

    def _is_whole(self) -> bool:
        return self._whole is not None and self._whole.grad is not None

    def _merge(self) -> None:
        if not self._arrived:
            return
        pieces = [] if self._ids is None else [(self._ids, self._values)]
        for ids, leaf, skip in self._arrived.values():
            values, leaf.grad = leaf.grad, None
            if values is None:
                continue
            if skip is not None and self.sparse:
                keep = torch.arange(ids.numel()) != skip
                ids, values = ids[keep], values[keep]
            pieces.append((ids, values))
        self._arrived.clear()
        if not pieces:
            return
        if len(pieces) == 1:
            self._ids, self._values = pieces[0]
            return
        found = sort_ids(torch.cat([ids for ids, _ in pieces]))
        values = torch.cat([values for _, values in pieces if values is not None])
        self._ids, self._values = found.unique, sum_rows(values, found)
