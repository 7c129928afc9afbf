"""Initialisers that a parameter server runs on its shard, so that a large table is never sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from stratagem._ps.placement import Description
from stratagem._ps.types import InitOp

SEEDS: Final = 1 << 62
"""Seeds are below this."""

KEYED_ROWS: Final = "keyed_rows"
"""Of the rows of a dynamic table, which are made when a key is first used."""

KEYED_ROWS_ON_DISK: Final = "keyed_rows_on_disk"
"""The same in a file."""

KEYS_OF: Final = "keys_of"
"""Of the keys of a dynamic table: the variable of its rows, the first bucket, the rule (`KeyRule.numbers`)."""

AT_FIRST_USE: Final = InitOp("at_first_use")
"""In a recipe: the others run at the first use of the variable, unless a checkpoint is read into it before."""

MemoryKind: TypeAlias = Literal["memory", "reserved", "disk"]
"""Memory of a variable: counted at once, counted as rows are used, or a file on disk."""

RESERVING: Final = frozenset({KEYED_ROWS, KEYED_ROWS_ON_DISK, KEYS_OF})
"""Initialisations of variables that use their memory bit by bit."""


def memory_kind(operations: Iterable[InitOp]) -> MemoryKind:
    """Return the kind of memory that a variable with these initialisations needs."""
    names = {one.name for one in operations}
    if KEYED_ROWS_ON_DISK in names:
        return "disk"
    return "reserved" if names & RESERVING else "memory"


def initialise(tensor: Tensor, operation: InitOp) -> None:
    """Run one initialisation in place.

    Its name is ``zeros``, ``fill`` (value), ``uniform`` (low, high), ``normal`` (mean, std),
    ``fill_row`` (row, value) or ``scale`` (factor).

    Example:
        >>> value = torch.empty(2)
        >>> initialise(value, InitOp("fill", (3.0,)))
        >>> value
        tensor([3., 3.])
    """
    generator = torch.Generator().manual_seed(operation.seed)
    name, args = operation.name, operation.args
    if name in RESERVING:
        return  # new memory is an empty table
    if name == "zeros":
        tensor.zero_()
    elif name == "fill":
        tensor.fill_(args[0])
    elif name == "uniform":
        tensor.uniform_(args[0], args[1], generator=generator)
    elif name == "normal":
        tensor.normal_(args[0], args[1], generator=generator)
    elif name == "fill_row":
        tensor[int(args[0])].fill_(args[1])
    elif name == "scale":
        tensor.mul_(args[0])
    else:
        raise ValueError(
            f"unknown initialisation {name!r}: expected zeros, fill, uniform, normal, "
            "fill_row or scale."
        )


def shard_recipe(recipe: Sequence[InitOp], where: Description, index: int) -> list[InitOp]:
    """Return a table's recipe for one of its shards: seeds of its own, no rows of other shards."""
    begin = where.layout.offsets[index]
    end = begin + where.shards[index].rows
    mine = []
    for operation in recipe:
        if operation.name == "fill_row":
            row = int(operation.args[0])
            if begin <= row < end:
                mine.append(InitOp("fill_row", (float(row - begin), operation.args[1])))
        else:
            seed = (operation.seed + index * 0x9E3779B97F4A7C15) % SEEDS
            mine.append(InitOp(operation.name, operation.args, seed))
    return mine
