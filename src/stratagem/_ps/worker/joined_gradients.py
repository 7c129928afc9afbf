"""Combine the gradients of several tables with equal row shapes: sort, sum and send them as one.

Lookups leave gradients in the order of the ids asked. A step removes duplicates in all tables at once: each shard of each
table gets its own range of numbers, ordered by server, so that one sort puts together what one server gets. The C kernels do it;
without them, and for rows that are not of float32, each table is sorted and sent by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor

from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.row_kernels import is_plain, kernels
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
        # Of each table: first rows of its shards, and what to add to a row of the shard.
        self._shards: list[tuple[Tensor, Tensor]] = []
        for index in range(len(remotes)):
            own = sorted(
                (part.first, start - part.first)
                for part, start in zip(parts, starts, strict=False)
                if part.table == index
            )
            firsts, shifts = zip(*own, strict=True)
            self._shards.append((torch.tensor(firsts), torch.tensor(shifts)))

    def numbers(self, tables: Sequence[RawTable]) -> Tensor:
        """Return the numbers of the rows of all lookups, one after the other."""
        assert kernels is not None
        pieces = [(index, ids) for index, one in enumerate(tables) for ids, _ in one.pieces]
        sizes = [ids.numel() for _, ids in pieces]
        numbers = torch.empty(sum(sizes), dtype=torch.int64)
        for (index, ids), out in zip(pieces, numbers.split(sizes), strict=True):
            kernels.shift(ids, *self._shards[index], out)
        return numbers


def join(
    tables: Sequence[RawTable],
    layout: JoinLayout,
    reserve: Callable[[tuple[int, ...], torch.dtype], Tensor],
) -> list[tuple[int, JoinedGradient]] | None:
    """Return what each server gets; every shard is named, also without a row. None if the kernels cannot do it.

    Args:
        tables: their gradients.
        layout: of these tables.
        reserve: returns memory for the rows and ids of a server.
    """
    pieces = [value for one in tables for _, value in one.pieces]
    values = (torch.cat(pieces) if len(pieces) > 1 else pieces[0].detach()).contiguous()
    if kernels is None or not is_plain(values):
        return None
    grouped = kernels.group(layout.numbers(tables), layout.edges)
    if grouped is None:
        return None
    sizes: list[int] = grouped.bounds[1].tolist()  # how many different rows each part has
    joined: list[tuple[int, JoinedGradient]] = []
    for server, begin, end in layout.servers:
        count = sum(sizes[begin:end])
        rows = reserve((count, *values.shape[1:]), values.dtype)
        ids = reserve((count,), torch.int64)
        kernels.sum_groups(values, grouped, begin, end, rows, ids)
        gradient = JoinedGradient(
            variables=layout.variables[begin:end],
            counts=tuple(sizes[begin:end]),
            values=rows,
            ids=ids,
            sparse=tables[0].table.gradient.sparse,
        )
        joined.append((server, gradient))
    for part, size in zip(layout.parts, sizes, strict=True):
        count_lookup(layout.names[part.table], ids=0, rows=size)
    return joined
