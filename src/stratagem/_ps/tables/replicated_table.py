"""A table in a worker with several replicas.

Every replica has its own table over the same rows, which takes the gradient of the rows that this replica looked up. At
the end of `backward` the replicas' gradients are aggregated as sparse tensors of the table's shape (`_core/gradients.py`).
Each table then has the gradient of all rows that any replica looked up. No replica holds the whole table.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import cast, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core import gradients
from stratagem._core.context import Replica
from stratagem._core.managed import read_grad, run_record
from stratagem._core.replicated_parameters import Leaf, ReplicatedParameter
from stratagem._core.torch_patches.private_api import has_hooks
from stratagem._ps.tables.table_parameter import TableParameter


@final
class ReplicatedTable(ReplicatedParameter):
    """One table and one view of it per replica."""

    __slots__ = ()

    has_rows = True
    central: TableParameter

    @override
    def gradient_of(self, leaf: Leaf) -> Tensor | None:
        return _table(leaf).gradient.as_sparse()

    @override
    def gradient_device(self, replica: Replica) -> torch.device:
        return self.central.device  # rows come from host memory

    @override
    def add_pre_gradient_hook(self, leaf: Leaf, hook: Callable[[Tensor], None]) -> None:
        _table(leaf).gradient.before = hook

    @override
    def expose_gradient(self, leaf: Leaf | None, *, apart: bool = False) -> None:
        if leaf is None:
            self.central.grad = None
        else:
            self.central.gradient.take_over(_table(leaf).gradient, copy=apart)

    @override
    def _refresh(self, replica: Replica) -> Tensor:
        return self.central if replica.strategy is not self.strategy else self._join(replica)

    @override
    def _join(self, replica: Replica) -> Tensor:
        central = self.central
        leaf = self.by_replica.get(replica.id)
        if leaf is None:
            leaf = self._new_leaf(replica)
        elif not leaf.record.closed:  # its last run failed
            leaf.aggregated = leaf.synced_with = leaf.base = None
        table = _table(leaf)
        if table.requires_grad != central.requires_grad:
            table.requires_grad_(central.requires_grad)
        self._follow_gradient(leaf)
        if not leaf.has_base_hook and (self.adds_up or has_hooks(central)):
            gradients.add_base_hook(leaf)
        leaf.record = record = run_record(replica)
        record.leaves.append(leaf)
        return table

    @override
    def _new_leaf(self, replica: Replica) -> Leaf:
        table = TableParameter.over(self.central.source, requires_grad=self.central.requires_grad)
        leaf = Leaf(self, replica.id, table, shares=True)
        self.by_replica[replica.id] = leaf
        self.register_alias(table)
        table.gradient.after = gradients.accumulation_hook(leaf)
        return leaf

    def _follow_gradient(self, leaf: Leaf) -> None:
        """Give the view central's gradient at the start of a run: code outside may have changed it."""
        table, grad = _table(leaf), read_grad(self.central)
        if grad is None:
            table.grad = None
        elif table.grad is None or not leaf.is_synced_with(grad):
            table.gradient.take_over(self.central.gradient, copy=True)
            kept = table.grad
            leaf.aggregated = None if kept is None else weakref.ref(kept)


def _table(leaf: Leaf) -> TableParameter:
    return cast("TableParameter", leaf.tensor)
