"""Dynamic tables on one server: create the row of a key when it is first used.

The rows and the keys of a table are two ordinary variables, so that optimizers, checkpoints and reads through shared memory
know nothing of keys. A dynamic table is bound to both when its variable of keys is initialised (``keys_of``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from stratagem._core.key_index import KEY, IndexRecord, KeyIndex, KeyRule
from stratagem._core.key_map import Ints
from stratagem._ps.rows import put_rows
from stratagem._ps.types import Gradient, InitOp
from stratagem.errors import NotFoundError

if TYPE_CHECKING:
    from stratagem._ps.server.store import VariableStore


@dataclass(slots=True)
class _Keyed:
    keys: int  # the variable of keys
    index: KeyIndex
    rule: KeyRule
    is_stale: bool = False  # the keys were written from outside


@final
class KeyedTables:
    """The dynamic tables of one store."""

    def __init__(self, store: VariableStore) -> None:
        self._store = store
        self._tables: dict[int, _Keyed] = {}  # by the variable of rows
        self._of_keys: dict[int, int] = {}  # variable of keys → variable of rows

    def bind(self, keys: int, name: str, operation: InitOp) -> None:
        """Make two variables a dynamic table; the operation names the variable of rows."""
        rows, first_bucket, *numbers = operation.args
        rule = KeyRule.from_numbers(numbers, operation.seed)
        index = KeyIndex(
            rule,
            self._store.read(keys).numpy(),
            int(first_bucket),
            before_write=self._noting(keys),
            name=name,
        )
        self._tables[int(rows)] = _Keyed(keys, index, rule)
        self._of_keys[keys] = int(rows)

    def _noting(self, keys: int) -> Callable[[Ints], None]:
        store = self._store

        def note(rows: Ints) -> None:
            if store.is_watched:
                store.before_write(keys, torch.from_numpy(np.unique(rows)))

        return note

    def __contains__(self, variable: int) -> bool:
        return variable in self._tables

    def forget(self, variable: int) -> None:
        """Forget a table one of whose variables is deleted."""
        rows = self._of_keys.pop(variable, variable)
        gone = self._tables.pop(rows, None)
        if gone is not None:
            self._of_keys.pop(gone.keys, None)

    def ranges(self, variable: int) -> list[tuple[int, int]] | None:
        """Return the ranges of rows in use of a table's rows or keys; None for other variables."""
        rows = self._of_keys.get(variable, variable)
        return self._find(rows).index.rows_used if rows in self._tables else None

    def records(self) -> Iterator[tuple[int, IndexRecord]]:
        """Yield the variable of rows of each table, and what a copy needs beside its variables."""
        for variable in self._tables:
            yield variable, self._find(variable).index.record()

    def restore(self, variable: int, record: IndexRecord) -> None:
        """Take over a record; the rows and keys of the table have been written."""
        table = self._find(variable)
        table.index.restore(record)
        if not table.rule.on_disk:
            used = sum(last - first for first, last in table.index.rows_used)
            self._store.count_rows(used * self._store.read(variable)[:1].nbytes)

    def clear(self, variable: int) -> None:
        """Remove all keys of a table before others are read, if this is a variable of keys."""
        for first, last in self.ranges(variable) or () if variable in self._of_keys else ():
            self._store.read(variable)[first:last] = 0
            self.note_whole_write(variable)

    def note_whole_write(self, variable: int) -> None:
        """Read the keys again before their next use, if this is a variable of keys."""
        rows = self._of_keys.get(variable)
        if rows is not None:
            self._tables[rows].is_stale = True

    def resolve(
        self, variable: int, keys: Tensor, counts: Tensor | None, *, create: bool
    ) -> tuple[Tensor, int]:
        """Return the row of each key (-1: none), and the table's clock; with `create` make new rows."""
        table = self._find(variable)
        if keys.dim() != 1 or keys.dtype != torch.int64:
            raise ValueError(
                f"keys have shape {tuple(keys.shape)} and {keys.dtype}: expected int64."
            )
        if counts is not None and (counts.shape != keys.shape or counts.dtype != torch.int64):
            raise ValueError("there must be one count, int64, for each key.")
        wanted = keys.numpy()
        found = table.index.resolve(
            wanted, create=create, counts=None if counts is None else counts.numpy()
        )
        if found.new.size:
            values = self._store.read(variable)
            if not table.rule.on_disk:
                self._store.count_rows((found.new.size - found.again.size) * values[:1].nbytes)
            given = found.rows[found.new]
            order = np.argsort(given)
            rows, new = torch.from_numpy(given[order]), wanted[found.new[order]]
            self._store.before_write(variable, rows)
            first = torch.from_numpy(table.rule.first_values(new)).to(values.dtype)
            put_rows(values, rows, first.reshape(len(rows), *values.shape[1:]))
            if found.again.size:
                self._store.reset_state(variable, torch.from_numpy(found.again))
        return torch.from_numpy(found.rows), table.index.now

    def page(self, variable: int, start: int, count: int) -> tuple[Tensor, Tensor, int]:
        """Return keys and rows from a position in the order of rows, and how many there are in all."""
        table = self._find(variable)
        if count <= 0:
            none = torch.empty(0, dtype=torch.int64)
            return none, none, len(table.index)
        rows = torch.from_numpy(table.index.taken())
        some = rows[max(0, start) : max(0, start) + count].clone()
        keys = self._store.read(table.keys)[:, KEY]
        return keys.index_select(0, some), some, len(rows)

    def without_evicted(self, gradient: Gradient) -> Gradient:
        """Drop the rows of a gradient that were given to other keys since its worker looked them up."""
        if gradient.variable not in self._tables or gradient.ids is None or gradient.clock < 0:
            return gradient
        # Not the index of keys that were replaced: a backup must decide as its primary, which may have read them.
        kept = self._find(gradient.variable).index.is_older(gradient.ids.numpy(), gradient.clock)
        if kept.all():
            return gradient
        places = torch.from_numpy(np.flatnonzero(kept))
        return replace(gradient, ids=gradient.ids[places], values=gradient.values[places])

    def _find(self, variable: int) -> _Keyed:
        table = self._tables.get(variable)
        if table is None:
            raise NotFoundError(f"variable {variable!r} is not a dynamic table of this server.")
        if table.is_stale:
            table.is_stale = False
            table.index.rebuild()
        return table
