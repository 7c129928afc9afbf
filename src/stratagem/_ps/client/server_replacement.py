"""Replace a lost parameter server by a restored one, in the coordinator's client.

Nothing here takes the client's lock: a thread that waits for the lost server may hold it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

from stratagem._ps.client.mapping import Mappings, ShardLocation
from stratagem._ps.client.server_connection import Membership, ServerConnection
from stratagem._ps.client.server_liveness import ControlConnections
from stratagem._ps.client.shard_holders import ShardHolders
from stratagem._ps.client.transfers import TransferTurn
from stratagem._ps.number_ranges import NumberRanges
from stratagem._ps.recovery_point import RecoveryPoint
from stratagem._wire import messages
from stratagem._wire.messages import Message
from stratagem._wire.round_trip import attempt_limit_s


@final
class ServerReplacement:
    """Record of a server's state in the client of the coordinator, to set another server up in the same way."""

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        control: ControlConnections,
        mappings: Mappings,
        membership: Membership,
        finished: NumberRanges,
        holders: ShardHolders | None = None,
    ) -> None:
        self._connections = connections
        self._control = control
        self._mappings = mappings
        self._membership = membership
        self._finished = finished
        self.holders = holders
        self.point: RecoveryPoint | None = None
        self.restored = 0
        """Number of servers that got older variables."""
        self._recovery: Callable[[Exception], bool] | None = None
        self._beside: dict[int, ServerConnection] = {}
        self._has_ended = False
        self.turn = TransferTurn()
        """Of saves and restores of these servers; a lost server is restored out of turn."""
        self._left: dict[int, dict[int, int]] = {}  # last versions, see `leave`
        self._fences: dict[str, int] = {}
        self._optimizers: dict[tuple[int, int], messages.CreateOptimizer] = {}

    def note_fence(self, task: str, incarnation: int) -> None:
        """Note that servers refuse writes of this incarnation of a task."""
        self._fences[task] = max(incarnation, self._fences.get(task, 0))

    def note_optimizer(self, server: int, message: messages.CreateOptimizer) -> None:
        self._optimizers[server, message.optimizer] = message

    def connect_beside(
        self, server: int, *, timeout_s: float | None = None, as_owner: bool = False
    ) -> ServerConnection:
        """Return another connection to a server, for a thread of its own; the caller closes it.

        `as_owner` opens the session if the server does not have it.
        """
        known = self._connections[server]
        shard = -1 if self.holders is None else server
        beside = replace(self._membership, is_owner=as_owner, shard=shard)
        connection = ServerConnection(known.task, known.find_address, beside)
        connection.open(timeout_s=timeout_s or attempt_limit_s())
        return connection

    def beside(self, server: int) -> ServerConnection:
        """Return the connection to a server that saves and restores use in turn: opening one takes several round trips."""
        known = self._beside.get(server)
        if known is None or not self.is_current(server, known):
            self.drop_beside(server)
            known = self._beside[server] = self.connect_beside(server)
            if self._has_ended:  # meanwhile: the client and a save have different threads
                self.close_beside()
        return known

    def drop_beside(self, server: int) -> None:
        """Close a connection of `beside` that may be broken."""
        known = self._beside.pop(server, None)
        if known is not None:
            known.close()

    def close_beside(self) -> None:
        """Close the connections of `beside`: the client ends."""
        self._has_ended = True
        for server in list(self._beside):
            self.drop_beside(server)

    def connect_process(self, process: int, *, timeout_s: float) -> ServerConnection:
        """Return a connection to a process that enters no session; the caller closes it."""
        assert self.holders is not None
        task, address = self.holders.processes[process]
        connection = ServerConnection(
            task, address, replace(self._membership, session="", is_owner=False)
        )
        connection.open(timeout_s=timeout_s)
        return connection

    def unlinked(self) -> dict[int, int]:
        """Return the servers whose backup did not answer when they answered the last ping, and its view."""
        return self._control.unlinked(self._membership.session)

    def life_of(self, server: int) -> str:
        """Return the identity of the process that has the variables of a server."""
        return self._connections[server].server

    def promotion(self, server: int, view: int) -> messages.Promote:
        """Return the message that makes a backup the primary."""
        return promotion(self._membership, server, view)

    def is_current(self, server: int, connection: ServerConnection) -> bool:
        """Return whether a connection leads to the process that has the variables of a server."""
        return connection.server == self._connections[server].server

    def end_old_session(self, connection: ServerConnection) -> None:
        """Fence a process that hung, was replaced and answers again: it deletes what it has."""
        connection.request(messages.CloseSession(session=self._membership.session))

    def recover_with(self, recovery: Callable[[Exception], bool] | None) -> None:
        """Let requests to a lost server wait for its recovery, once there is a checkpoint."""
        self._recovery = recovery
        self.set_point(self.point)

    def set_point(self, point: RecoveryPoint | None) -> None:
        """Restore lost servers from this checkpoint; None: do not restore them."""
        self.point = point
        can_recover = point is not None or self.holders is not None
        for connection in self._connections:
            connection.recovery = self._recovery if can_recover else None

    def leave(self, server: int) -> None:
        """Use nothing of a server any more, not even its memory; requests to it wait for `accept`."""
        self._connections[server].give_up("is being replaced by its backup")
        self._left[server] = self._mappings.versions_on(server)
        self._mappings.forget_server(server)

    def accept(
        self,
        server: int,
        welcome: messages.Welcome,
        places: Sequence[ShardLocation] = (),
        located: messages.Located | None = None,
    ) -> None:
        """Use a restored server, and its memory. Takes no lock: a thread that waits may hold it."""
        self._mappings.forget_server(server)
        self._left.pop(server, None)
        if located is not None:
            self._mappings.add(server, places, located)
        self._control.accept(server, welcome)
        self._connections[server].accept(welcome.life)

    def standing_orders(self) -> list[Message]:
        """Return the messages that a restored server must have got: fences and finished closures."""
        fences: list[Message] = [
            messages.Fence(worker=task, incarnation=incarnation)
            for task, incarnation in list(self._fences.items())
        ]
        return [*fences, messages.FinishedClosures(ranges=self._finished.ranges)]

    def optimizers_on(self, server: int) -> list[messages.CreateOptimizer]:
        """Return the messages that set the optimizers of a server up."""
        return [one for (where, _), one in list(self._optimizers.items()) if where == server]

    def names_on(self, server: int) -> dict[int, str]:
        return dict(self._connections[server].names)

    def note_restored(self, point: RecoveryPoint, server: int, versions: dict[int, int]) -> None:
        """Count lost updates of a restored server from here on; a newer checkpoint may be there already."""
        self.restored += 1
        if self.point is point:
            facts = {
                **point.facts.get(server, {}),
                "versions": {str(number): version for number, version in versions.items()},
                "since": time.monotonic(),
            }
            self.point = replace(point, facts={**point.facts, server: facts})

    def last_versions(self, server: int) -> dict[int, int]:
        """Return the versions of variables in mapped memory, also after their server ended or was left."""
        return {**self._left.get(server, {}), **self._mappings.versions_on(server)}


def promotion(membership: Membership, shard: int, view: int) -> messages.Promote:
    """Return the message that makes the backup of a shard the primary."""
    return messages.Promote(
        session=membership.session,
        shard=shard,
        view=view,
        instance=membership.instance,
        epoch=membership.epoch,
    )
