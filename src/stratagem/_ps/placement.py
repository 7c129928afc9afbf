"""Which server holds which shard: round-robin placement and what is known of a variable everywhere.

Pure. The coordinator's `Placement` numbers shards and deals them to servers; the
`Description` it makes travels to workers and tells `remote.py` where to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from stratagem._ps.partition import ShardLayout, shard_sizes


def device_name(task: str) -> str:
    """How tf.distribute calls the memory of a parameter server.

    Example:
        >>> device_name("/job:ps/task:1")
        '/job:ps/replica:0/task:1/device:CPU:0'
    """
    return f"{task.replace('/task:', '/replica:0/task:')}/device:CPU:0"


@dataclass(frozen=True, slots=True)
class Shard:
    """One piece of a variable: its number on its server, that server's place in the list, its rows."""

    number: int
    server: int
    rows: int


@dataclass(frozen=True, slots=True)
class Description:
    """A variable on parameter servers, in one piece or several.

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
        """Whether there is more than one piece."""
        return len(self.shards) > 1

    @property
    def layout(self) -> ShardLayout:
        """Which rows are in which piece."""
        return ShardLayout([shard.rows for shard in self.shards])

    def part(self, index: int) -> Description:
        """One piece as a variable of its own, named ``<name>/part_<index>``."""
        shard = self.shards[index]
        shape = (shard.rows, *self.shape[1:])
        return Description(f"{self.name}/part_{index}", shape, self.dtype, (shard,))


class Placement:
    """Deals shards to servers in turn and numbers them; each shard counts one.

    Args:
        servers: how many parameter servers there are.
    """

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._dealt = 0
        self._next_number = 1

    def place(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        shards: int = 1,
        beside: Description | None = None,
    ) -> Description:
        """Decide where a new variable goes.

        `beside`: another variable whose server it shares; such a variable is in one piece and does
        not count in the dealing.
        """
        rows = shape[0] if len(shape) else 1
        if beside is not None:
            pieces: tuple[Shard, ...] = (Shard(self._number(), beside.shards[0].server, rows),)
        else:
            pieces = tuple(
                Shard(self._number(), self._deal(), size)
                for size in (shard_sizes(rows, shards) if shards > 1 else [rows])
            )
        return Description(name, tuple(shape), dtype, pieces)

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _deal(self) -> int:
        self._dealt += 1
        return (self._dealt - 1) % self._servers

    @override
    def __repr__(self) -> str:
        return f"<Placement {self._dealt} shards on {self._servers} servers>"
