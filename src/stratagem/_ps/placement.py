"""Place shards on servers in round-robin order, and describe a variable for all tasks.

Pure. The coordinator's `Placement` numbers shards and assigns them to servers. Its `Description` is sent to workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from stratagem._ps.partition import ShardLayout, shard_sizes


def device_name(task: str) -> str:
    """Return the name of a parameter server's memory, as in tf.distribute.

    Example:
        >>> device_name("/job:ps/task:1")
        '/job:ps/replica:0/task:1/device:CPU:0'
    """
    return f"{task.replace('/task:', '/replica:0/task:')}/device:CPU:0"


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a variable: its number on its server, the index of the server, its rows."""

    number: int
    server: int
    rows: int


@dataclass(frozen=True, slots=True)
class Description:
    """A variable on parameter servers, in one shard or several.

    Example:
        >>> where = Placement(servers=2).place("w", (5, 3), torch.float32, shards=2)
        >>> where.shards
        (Shard(number=1, server=0, rows=3), Shard(number=2, server=1, rows=2))
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]

    @property
    def is_sharded(self) -> bool:
        """True if there is more than one shard."""
        return len(self.shards) > 1

    @property
    def layout(self) -> ShardLayout:
        """Rows of each shard."""
        return ShardLayout([shard.rows for shard in self.shards])

    def shard_names(self) -> list[str]:
        """Return the name of each shard; that of a single one is the variable's own."""
        if not self.is_sharded:
            return [self.name]
        return [self.part(index).name for index in range(len(self.shards))]

    def part(self, index: int) -> Description:
        """Return one shard as a variable of its own, named ``<name>/part_<index>``."""
        shard = self.shards[index]
        shape = (shard.rows, *self.shape[1:])
        return Description(f"{self.name}/part_{index}", shape, self.dtype, (shard,))


class Placement:
    """Round-robin assignment of shards to servers."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._assigned = 0
        self.next_number = 1
        """Number of the next shard; the same in every run of a script."""

    def place(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        shards: int = 1,
        beside: Description | None = None,
        unit: int = 1,
        like: Description | None = None,
    ) -> Description:
        """Decide where a new variable goes.

        `beside`: another variable whose server it shares; such a variable has one shard and does
        not count in the round-robin. `unit`: shards consist of so many rows, or a multiple. `like`: another variable
        with the same rows, whose shards it follows.
        """
        rows = shape[0] if len(shape) else 1
        if like is not None:
            placed: tuple[Shard, ...] = tuple(
                Shard(self._number(), one.server, one.rows) for one in like.shards
            )
        elif beside is not None:
            placed = (Shard(self._number(), beside.shards[0].server, rows),)
        else:
            placed = tuple(
                Shard(self._number(), self._next_server(), size * unit)
                for size in (shard_sizes(rows // unit, shards) if shards > 1 else [rows // unit])
            )
        return Description(name, tuple(shape), dtype, placed)

    def _number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def _next_server(self) -> int:
        self._assigned += 1
        return (self._assigned - 1) % self._servers

    @override
    def __repr__(self) -> str:
        return f"<Placement {self._assigned} shards on {self._servers} servers>"
