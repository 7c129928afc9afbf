"""Gradients of several tables with rows of one shape, sorted, summed and sent as one.

Lookups leave gradients in the order of the ids asked. A step removes duplicates in all tables at once: each shard of each
table gets its own range of numbers, ordered by server, so that one sort puts together what one server gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from stratagem._core.key_map import Ints
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.rows import sort_ids, sum_rows
from stratagem._ps.tables.lookup_counts import count_lookup
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
        parts.sort(key=lambda one: one.server)  # stable: in the order of the tables
        self.parts = parts
        self.edges: Ints = np.concatenate([[0], np.cumsum([one.rows for one in parts])])
        self.names = [remote.name for remote in remotes]
        shifts: list[list[tuple[int, int]]] = [[] for _ in remotes]
        for part, start in zip(parts, self.edges.tolist(), strict=False):
            shifts[part.table].append((part.first, start - part.first))
        # Of each table: first rows of its shards, and what to add to a row of the shard.
        self.firsts: list[Ints] = []
        self.shifts: list[Ints] = []
        for some in shifts:
            some.sort()
            self.firsts.append(np.array([first for first, _ in some]))
            self.shifts.append(np.array([shift for _, shift in some]))

    def numbers(self, table: int, ids: Ints) -> Ints:
        """Return the numbers of rows of one table."""
        shifts = self.shifts[table]
        shift: Ints
        if shifts.size <= 2:
            shift = shifts[:1]
            if shifts.size == 2:
                shift = np.where(ids < self.firsts[table][1], shifts[0], shifts[1])
        else:
            shift = shifts[np.searchsorted(self.firsts[table], ids, side="right") - 1]
        return ids + shift


def join(tables: Sequence[RawTable], layout: JoinLayout) -> list[tuple[int, JoinedGradient]]:
    """Return what each server gets; every shard is named, also without a row."""
    numbers = [
        layout.numbers(index, ids.numpy())
        for index, one in enumerate(tables)
        for ids, _ in one.pieces
    ]
    values = [value for one in tables for _, value in one.pieces]
    found = sort_ids(torch.from_numpy(np.concatenate(numbers) if len(numbers) > 1 else numbers[0]))
    summed = sum_rows(torch.cat(values) if len(values) > 1 else values[0], found)
    unique = found.unique.numpy()
    bounds = np.searchsorted(unique, layout.edges)
    counts = np.diff(bounds)
    ids = torch.from_numpy(unique - np.repeat(layout.edges[:-1], counts))
    sizes, ends = counts.tolist(), bounds.tolist()
    joined: list[tuple[int, JoinedGradient]] = []
    begin = 0
    for end in range(1, len(layout.parts) + 1):
        if end < len(layout.parts) and layout.parts[end].server == layout.parts[begin].server:
            continue
        some = slice(ends[begin], ends[end])
        gradient = JoinedGradient(
            variables=tuple(one.variable for one in layout.parts[begin:end]),
            counts=tuple(sizes[begin:end]),
            values=summed[some],
            ids=ids[some],
            sparse=tables[0].table.gradient.sparse,
        )
        joined.append((layout.parts[begin].server, gradient))
        begin = end
    distinct = [0] * len(tables)
    for part, size in zip(layout.parts, sizes, strict=True):
        distinct[part.table] += size
    for name, rows in zip(layout.names, distinct, strict=True):
        count_lookup(name, ids=0, rows=rows)
    return joined
