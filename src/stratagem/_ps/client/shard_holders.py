"""Find the process that serves a shard, in a session with backups.

Without backups, server number i is process number i. With backups, process j may have taken the shard of server i over.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, final

from typing_extensions import override

from stratagem import config
from stratagem._ps.client.mapping import Mappings
from stratagem._ps.client.server_connection import Address, Membership, ServerConnection
from stratagem._wire.round_trip import answer_limit_s
from stratagem.errors import CoordinatorReplaced, NotFoundError, ParameterServerLost, WireError

_log = logging.getLogger("stratagem.ps")

_PAUSE_S: Final = 0.02
"""Between two rounds of questions."""


@final
class ShardHolders:
    """The processes of a session with backups, and which of them has each shard.

    Args:
        processes: task of each process, and its address or a function that returns it.
        holders: by shard, the number of the process that has it; by default of the same number.

    Example:
        >>> holders = ShardHolders([("/job:ps/task:0", "a:1"), ("/job:ps/task:1", "b:1")])
        >>> holders.move(0, 1)
        >>> [(task, address()) for task, address in holders.servers()]
        [('/job:ps/task:0', 'b:1'), ('/job:ps/task:1', 'b:1')]
    """

    def __init__(
        self, processes: Sequence[tuple[str, str | Address]], holders: Sequence[int] = ()
    ) -> None:
        self.processes = tuple(processes)
        self.holders = list(holders) or list(range(len(processes)))
        self._found: dict[int, str] = {}  # shards that a worker found, and where

    def address(self, process: int) -> str:
        """Return where a process listens now."""
        known = self.processes[process][1]
        return known() if callable(known) else known

    def servers(self) -> list[tuple[str, Address]]:
        """Return the name of each shard's server, and a function that returns where the shard is."""
        return [
            (task, functools.partial(self._address_of, shard))
            for shard, (task, _) in enumerate(self.processes)
        ]

    def _address_of(self, shard: int) -> str:
        return self._found.get(shard) or self.address(self.holders[shard])

    def addresses(self) -> list[str]:
        """Return where the processes are, and where shards were found."""
        known = [self.address(process) for process in range(len(self.processes))]
        return [*known, *self._found.values()]

    def found(self, shard: int, address: str) -> None:
        """Note where a worker found a shard."""
        self._found[shard] = address

    def move(self, shard: int, process: int) -> None:
        self.holders[shard] = process

    @override
    def __repr__(self) -> str:
        return f"<ShardHolders {self.holders}>"


@final
class Failover:
    """Finds the process that has taken a shard over, for the client of a worker.

    A backup refuses clients until the coordinator has made it the primary, so asking all processes again and again finds
    the right one.

    Attributes:
        moves: how many shards were found elsewhere.
        on_move: called with the shard, while the client is locked; must not use the connections.
    """

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        holders: ShardHolders,
        membership: Membership,
        mappings: Mappings,
    ) -> None:
        self._connections = connections
        self._holders = holders
        self._membership = membership
        self._mappings = mappings
        self._limit_s = config.partition_limit_s()
        self.is_stopped = False
        """Set when the client is not used any more: searches end. Any thread may set it."""
        self.moves = 0
        self.on_move: Callable[[], None] | None = None
        for shard, connection in enumerate(connections):
            connection.recovery = functools.partial(self._find, shard)

    def _find(self, shard: int, error: Exception) -> bool:
        """Ask all processes for a shard until one has it; False if none has in time."""
        deadline = time.monotonic() + self._limit_s
        connection = self._connections[shard]
        candidates = dict.fromkeys([connection.backup_address, *self._holders.addresses()])
        while not self.is_stopped and time.monotonic() < deadline:
            for address in filter(None, candidates):
                try:
                    life = self._ask(shard, address)
                except CoordinatorReplaced:
                    return False
                except (WireError, NotFoundError, ParameterServerLost) as why:
                    _log.debug("%s is not at %s: %s", connection.task, address, why)
                    continue
                self._holders.found(shard, address)
                self._mappings.forget_server(shard)
                self.moves += 1
                if self.on_move is not None:
                    self.on_move()
                connection.accept(life)
                _log.info("%s is served at %s now: %s", connection.task, address, error)
                return True
            time.sleep(_PAUSE_S)
        return False

    def _ask(self, shard: int, address: str) -> str:
        """Return the identity of the process at an address, if it has a shard."""
        probe = ServerConnection(
            self._connections[shard].task, address, replace(self._membership, shard=shard)
        )
        try:
            probe.open(timeout_s=answer_limit_s())
            return probe.server
        finally:
            probe.close()

    @override
    def __repr__(self) -> str:
        return f"<Failover {self.moves} moves, {self._holders!r}>"
