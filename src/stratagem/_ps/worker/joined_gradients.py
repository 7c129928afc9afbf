"""Combine the gradients of several tables with equal row shapes: sort, sum and send them as one.

Lookups leave gradients in the order of the ids asked. A step removes duplicates in all tables at once: each shard of each
table gets its own range of numbers, ordered by server, so that one sort puts together what one server gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.row_kernels import GroupedRows, is_plain, kernels
from stratagem._ps.rows import sort_ids, sum_rows_into
from stratagem._ps.tables.row_gradient import count_lookup
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem._ps.types import JoinedGradient


class RawTable(NamedTuple):
    """A table whose gradient has only rows in the order asked: (ids, values) of each lookup."""

    table: TableParameter
    remote: RemoteVariable
    pieces: Sequence[tuple[Tensor, Tensor]]


class _Part(NamedTuple):
    """One shard: its server and variable, the table's position, the shard's first row, its number of rows."""

    server: int
    variable: int
    table: int
    first: int
    rows: int


@final
class JoinLayout:
    """Numbers of the rows of some tables, such that the shards of each server are together."""

    def __init__(self, remotes: Sequence[RemoteVariable]) -> None:
        parts = [
            _Part(place.server, place.variable, index, first, place.shape[0])
            for index, remote in enumerate(remotes)
            for place, first in zip(remote.places, remote.layout.offsets, strict=True)
        ]
        # Servers in the order of the first table's shards: the rows of one table alone keep their numbers.
        order = {server: n for n, server in enumerate(dict.fromkeys(one.server for one in parts))}
        parts.sort(key=lambda one: order[one.server])  # stable: in the order of the tables
        self.parts = parts
        starts = [0, *accumulate(one.rows for one in parts)]
        self.edges = torch.tensor(starts)  # the parts' first numbers, and the end
        self.variables = tuple(one.variable for one in parts)
        cuts = [n for n, one in enumerate(parts) if not n or one.server != parts[n - 1].server]
        # Each server, with its first part and the end of its parts.
        self.servers = [(parts[a].server, a, b) for a, b in pairwise([*cuts, len(parts)])]
        self.names = [remote.name for remote in remotes]
        shifts: list[list[tuple[int, int]]] = [[] for _ in remotes]
        for part, start in zip(parts, starts, strict=False):
            shifts[part.table].append((part.first, start - part.first))
        # Of each table: first rows of its shards, and what to add to a row of the shard.
        self.firsts: list[Tensor] = []
        self.shifts: list[Tensor] = []
        for some in shifts:
            some.sort()
            self.firsts.append(torch.tensor([first for first, _ in some]))
            self.shifts.append(torch.tensor([shift for _, shift in some]))
        self.is_shifted = any(bool(one.any()) for one in self.shifts)

    def numbers(self, table: int, ids: Tensor, out: Tensor) -> None:
        """Write the numbers of rows of one table."""
        firsts, shifts = self.firsts[table], self.shifts[table]
        if kernels is not None:
            kernels.shift(ids, firsts, shifts, out)
        elif shifts.numel() == 1:
            torch.add(ids, shifts, out=out)
        else:
            shard = np.searchsorted(firsts.numpy(), ids.numpy(), side="right") - 1
            np.add(ids.numpy(), shifts.numpy()[shard], out=out.numpy())

    def all_numbers(self, tables: Sequence[RawTable]) -> Tensor:
        """Return the numbers of the rows of all lookups, one after the other."""
        pieces = [(index, ids) for index, one in enumerate(tables) for ids, _ in one.pieces]
        if len(pieces) == 1 and not self.is_shifted:
            return pieces[0][1]
        numbers = torch.empty(sum(ids.numel() for _, ids in pieces), dtype=torch.int64)
        for (index, ids), out in zip(
            pieces, numbers.split([ids.numel() for _, ids in pieces]), strict=True
        ):
            self.numbers(index, ids, out)
        return numbers


@final
class _SummedRows:
    """Rows of some tables, to be summed by their numbers. `parts` are those of the layout.

    Attributes:
        sizes: how many different rows each part has.
    """

    def __init__(self, values: Tensor, numbers: Tensor, edges: Tensor) -> None:
        self._values = values
        self._grouped: GroupedRows | None = None
        if kernels is not None and is_plain(values):
            self._grouped = kernels.group(numbers, edges)
        if self._grouped is not None:
            self.sizes: list[int] = self._grouped.bounds[1].tolist()
            return
        self._found = sort_ids(numbers)
        bounds = np.searchsorted(self._found.unique.numpy(), edges.numpy())
        self._firsts = edges.numpy()[:-1].repeat(np.diff(bounds))
        self._ends = bounds.tolist()
        self.sizes = np.diff(bounds).tolist()

    def write(self, begin: int, end: int, rows: Tensor, ids: Tensor) -> None:
        """Write the sums of parts `begin` to below `end`, and their rows counted from each part's first."""
        if self._grouped is not None and kernels is not None:
            kernels.sum_groups(self._values, self._grouped, begin, end, rows, ids)
            return
        first, last = self._ends[begin], self._ends[end]
        sum_rows_into(self._values, self._found, [first, last], [rows])
        unique = self._found.unique.numpy()
        np.subtract(unique[first:last], self._firsts[first:last], out=ids.numpy())


def join(
    tables: Sequence[RawTable],
    layout: JoinLayout,
    reserve: Callable[[tuple[int, ...], torch.dtype], Tensor],
) -> list[tuple[int, JoinedGradient]]:
    """Return what each server gets; every shard is named, also without a row.

    Args:
        tables: their gradients.
        layout: of these tables.
        reserve: returns memory for the rows and ids of a server.
    """
    pieces = [value for one in tables for _, value in one.pieces]
    values = (torch.cat(pieces) if len(pieces) > 1 else pieces[0].detach()).contiguous()
    summed = _SummedRows(values, layout.all_numbers(tables), layout.edges)
    joined: list[tuple[int, JoinedGradient]] = []
    for server, begin, end in layout.servers:
        sizes = tuple(summed.sizes[begin:end])
        count = sum(sizes)
        rows, ids = (
            reserve((count, *values.shape[1:]), values.dtype),
            reserve((count,), torch.int64),
        )
        summed.write(begin, end, rows, ids)
        gradient = JoinedGradient(
            variables=layout.variables[begin:end],
            counts=sizes,
            values=rows,
            ids=ids,
            sparse=tables[0].table.gradient.sparse,
        )
        joined.append((server, gradient))
    distinct = [0] * len(tables)
    for part, size in zip(layout.parts, summed.sizes, strict=True):
        distinct[part.table] += size
    for name, rows_used in zip(layout.names, distinct, strict=True):
        count_lookup(name, ids=0, rows=rows_used)
    return joined
