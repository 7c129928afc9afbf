"""`PsClient`: one task's access to all parameter servers of a session.

`PsClient` joins requests: one request per server carries everything asked of it, and requests to several
servers are on their way at the same time. On the servers' host values are read from shared memory, elsewhere
over the connection. Which server holds a variable is the caller's knowledge: servers are given by index.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import final

from torch import Tensor
from typing_extensions import override

from stratagem import config
from stratagem._owner import Owner
from stratagem._ps.client import state_transfer, value_reads
from stratagem._ps.client.connect_all import connect_all, end_session
from stratagem._ps.client.mapping import MappedVariable, Mappings, ShardLocation
from stratagem._ps.client.outbox import Outbox
from stratagem._ps.client.server_connection import (
    Address,
    Membership,
    ServerConnection,
    collect_all,
)
from stratagem._ps.client.server_liveness import ControlConnections
from stratagem._ps.client.server_replacement import ServerReplacement
from stratagem._ps.client.shard_holders import Failover, ShardHolders
from stratagem._ps.client.value_reads import Placer, Reads
from stratagem._ps.client.write_batch import WriteBatch
from stratagem._ps.number_ranges import NumberRanges
from stratagem._ps.optimizer_settings import sequences_as_tuples
from stratagem._ps.types import (
    GroupSpec,
    Hyperparameters,
    InitOp,
    StateEntry,
)
from stratagem._wire import codec, messages
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Frame, Message
from stratagem._wire.round_trip import attempt_limit_s
from stratagem.config import ClusterOptions


@final
class PsClient(Owner):
    """One task's connections to all parameter servers of a session.

    Thread-safe; one thread works at a time. Writes are sent by `send` and acknowledged later:
    `wait_for_writes` waits for all acknowledgements. Reads of this client see its own writes.

    Example:
        >>> import torch
        >>> from stratagem._ps.client.ps_client import PsClient
        >>> from stratagem._ps.client.server_connection import Membership
        >>> from stratagem._ps.client.mapping import ShardLocation
        >>> from stratagem._ps.server.loop import ParameterServer
        >>> who = Membership(session="example", task="/job:chief/task:0", is_owner=True)
        >>> with ParameterServer("127.0.0.1:0").start() as server:
        ...     with PsClient([("/job:ps/task:0", server.address)], who) as client:
        ...         w = ShardLocation(0, 1, (2,), torch.float32)
        ...         client.create(w, "w", value=torch.ones(2))
        ...         batch = client.batch()
        ...         batch.assign(0, 1, "add", torch.ones(2))
        ...         client.send(batch)
        ...         print(client.wait_for_writes(), client.read([w]))
        {(0, 1): 2} [(tensor([2., 2.]), 2)]
    """

    def __init__(
        self,
        servers: Sequence[tuple[str, str | Address]],
        membership: Membership,
        *,
        incarnation: int = 0,
        shared_memory: bool | None = None,
        connect_timeout_s: float | None = None,
        holders: ShardHolders | None = None,
    ) -> None:
        """Connect to every server.

        Args:
            servers: task of each server, and its address or a function that returns it; their order gives
                the indices used everywhere.
            membership: session, own task name and role.
            incarnation: incarnation of this task; part of every write.
            shared_memory: False forces bytes over the connection; by default as configured.
            connect_timeout_s: for each server, `attempt_limit_s` by default; for the session's owner, who waits for servers that
                are just starting, for all of them.
            holders: with backups, which process has which server's part; `servers` is the result of its method.

        Raises:
            ValueError: an address is invalid.
            ParameterServerLost: a server cannot be reached.
        """
        self._membership = membership
        allowed = config.shared_memory_allowed() if shared_memory is None else shared_memory
        # Two directions, since containers may see each other's processes one way only: reading a
        # server's variables, and letting a server read this client's memory.
        self._shares_reads = [allowed] * len(servers)
        # Several clients of one coordinator may write to one session; each counts its own writes.
        unique = f"#{secrets.token_hex(4)}" if membership.is_owner else ""
        self._connections = [
            ServerConnection(*server, replace(membership, shard=-1 if holders is None else shard))
            for shard, server in enumerate(servers)
        ]
        self.outbox = Outbox(
            self._connections, membership.task + unique, incarnation, may_share=allowed
        )
        self._control = ControlConnections(self._connections, key=membership.key)
        self._finished = NumberRanges()
        self._lock = threading.RLock()
        self._mappings = Mappings()
        self.replacement = ServerReplacement(
            self._connections, self._control, self._mappings, membership, self._finished, holders
        )
        self.failover: Failover | None = None  # the coordinator decides where a shard is
        if holders is not None and not membership.is_owner:
            self.failover = Failover(self._connections, holders, membership, self._mappings)
        self._closed = False
        self.keeps_session = False
        """True if `close` leaves the session to its lease: another coordinator may continue a named job."""
        self.discards_writes = False
        """True if writes have no effect: while a coordinator adopts the variables of a live job."""
        try:
            limit_s = attempt_limit_s() if connect_timeout_s is None else connect_timeout_s
            connect_all(self._connections, timeout_s=limit_s, patient=membership.is_owner)
            for server, connection in enumerate(self._connections):
                assert connection.welcome is not None
                self._control.introduce(server, connection.welcome)
                may_map = connection.welcome.shares_memory
                self._shares_reads[server] &= may_map
                self.outbox.share_memory(server, allowed=may_map)
        except BaseException:
            self.close()
            raise

    # -- variables ----------------------------------------------------------------------------

    def create(
        self,
        place: ShardLocation,
        name: str,
        *,
        value: Tensor | None = None,
        recipe: Sequence[InitOp] = (),
    ) -> None:
        """Create one variable from a value, or by initialisations run on its server."""
        self.create_all([(place, name, recipe)])
        if value is not None:
            self.assign(place, value)

    def create_all(self, wanted: Sequence[tuple[ShardLocation, str, Sequence[InitOp]]]) -> None:
        """Create many variables, one request per server; without a recipe their values are undefined."""
        specs: dict[int, list[messages.VariableSpec]] = {}
        for place, name, recipe in wanted:
            dtype = codec.dtype_name(place.dtype)
            spec = messages.VariableSpec(place.variable, name, dtype, place.shape, tuple(recipe))
            specs.setdefault(place.server, []).append(spec)
            self._connections[place.server].names.setdefault(place.variable, name)
        self._ask_all(
            {
                server: messages.CreateVariables(variables=tuple(some))
                for server, some in specs.items()
            }
        )

    def delete(self, places: Sequence[ShardLocation]) -> None:
        """Free variables."""
        by_server: dict[int, list[int]] = {}
        with self._lock:
            for place in places:
                by_server.setdefault(place.server, []).append(place.variable)
                self._mappings.forget(place)
                self._connections[place.server].names.pop(place.variable, None)
            self._ask_all(
                {
                    server: messages.DeleteVariables(variables=tuple(some))
                    for server, some in by_server.items()
                }
            )

    def assign(self, place: ShardLocation, value: Tensor) -> int:
        """Overwrite a whole variable, in pieces if it is large, and wait until that is done.

        Returns:
            The version that has exactly this value; -1 if another task wrote between two pieces.
        """
        if tuple(value.shape) != place.shape:
            raise ValueError(
                f"cannot assign a value of shape {tuple(value.shape)!r} to a variable of shape "
                f"{place.shape!r}"
            )
        with self._lock:
            if self.discards_writes:
                return -1
            self.wait_for_writes()
            versions = []
            for start, count in place.pieces():
                batch = self.batch()
                if count < 0:
                    batch.assign(place.server, place.variable, "set", value.to(place.dtype))
                else:
                    piece = value[start : start + count].to(place.dtype)
                    batch.assign_rows(place.server, place.variable, start, piece)
                self.send(batch)
                versions.append(self.wait_for_writes().get((place.server, place.variable), -1))
            undisturbed = versions[-1] - versions[0] == len(versions) - 1
            return versions[-1] if undisturbed else -1

    def name_variables(self, server: int, names: Mapping[int, str]) -> None:
        """Note the names of variables that another client created, for errors."""
        self._connections[server].names.update(names)

    # -- reads --------------------------------------------------------------------------------

    def map(self, places: Sequence[ShardLocation]) -> list[MappedVariable | None]:
        """Return the variables in shared memory, without a copy; None for those that cannot be shared.

        Own writes show after `wait_for_writes`.
        """
        with self._lock:
            missing: dict[int, list[ShardLocation]] = {}
            for place in places:
                if self._shares_reads[place.server] and self._mappings.get(place) is None:
                    missing.setdefault(place.server, []).append(place)
            for server, some in missing.items():
                message = messages.Locate(variables=tuple(place.variable for place in some))
                located = self.ask(server, message).message
                assert isinstance(located, messages.Located)
                if not self._mappings.add(server, some, located):
                    self._shares_reads[server] = False
            return [self._mappings.get(place) for place in places]

    def read(self, places: Sequence[ShardLocation]) -> list[tuple[Tensor, int]]:
        """Return whole values, each consistent in itself, with their versions."""
        with self._lock:
            self.wait_for_writes()
            found: list[tuple[Tensor, int] | None] = [
                one.copy() if one is not None else None for one in self.map(places)
            ]
            absent = [index for index, one in enumerate(found) if one is None]
            wanted = [places[index] for index in absent]
            read = value_reads.read_values(self._connections, wanted)
            for index, value in zip(absent, read, strict=True):
                found[index] = value
            return [one for one in found if one is not None]

    def read_newer(self, wanted: value_reads.Known) -> dict[tuple[int, int], value_reads.Newer]:
        """Return values, by server and variable, whose versions differ from the given ones; None for the others."""
        with self._lock:
            self.wait_for_writes()
            return value_reads.read_newer(self._connections, wanted)

    def read_rows(self, wanted: Sequence[tuple[ShardLocation, Tensor]]) -> list[tuple[Tensor, int]]:
        """Return rows of variables in the order asked, with versions, over the connections; one request per server at most."""
        with self._lock:
            return value_reads.read_rows(self._connections, wanted, self.wait_for_writes)

    def versions(self, server: int, variables: Sequence[int] = ()) -> dict[int, int]:
        """Return versions of variables on one server; of all of them if none is named."""
        reply = self.ask(server, messages.AskVersions(variables=tuple(variables))).message
        assert isinstance(reply, messages.Versions)
        return dict(reply.versions)

    # -- writes -------------------------------------------------------------------------------

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Hold it from `batch` to `send` where several threads write; reads take it, too."""
        return self._lock

    def batch(self) -> WriteBatch:
        """Return a new batch of writes. Fill it and send it before asking for the next one."""
        with self._lock:
            return self.outbox.batch()

    def send(self, batch: WriteBatch, reads: Reads = None, place: Placer = None) -> None:
        """Send a batch and return; `wait_for_writes` waits. `reads`, by server: go into `Outbox.values`."""
        with self._lock:
            if not self.discards_writes:
                self.outbox.send(batch, reads, place)

    def wait_for_writes(self) -> dict[tuple[int, int], int]:
        """Wait until every write is acknowledged.

        Returns:
            (server, variable) → its version after the write.

        Raises:
            ParameterServerLost: a server does not answer; whether the write was applied is not known.
            WriteFenced: this incarnation of the task was declared lost.
            Exception: what a server raised; the first, the others are in its notes. Errors of writes
                that belong to an earlier closure are kept for it (`Outbox.failures`).
            KeyboardInterrupt: Ctrl-C; the writes stay unacknowledged, and the next call waits for them.
        """
        with self._lock:
            return {} if self.outbox.is_idle else self.outbox.wait()

    def progress(self) -> None:
        """Take in acknowledgements that have arrived, without waiting for a server or a thread."""
        if self._lock.acquire(blocking=False):
            try:
                self.outbox.progress()
            finally:
                self._lock.release()

    def fence(self, task: str, incarnation: int) -> None:
        """Make every server refuse writes of this incarnation of a task, and of earlier ones."""
        self.replacement.note_fence(task, incarnation)
        self._ask_all(self._everywhere(messages.Fence(worker=task, incarnation=incarnation)))

    def finish_closures(self, closures: Sequence[int]) -> None:
        """Tell the servers that these closures are finished: they refuse late writes of them.

        Never waits; one thread calls. Servers get all numbers each time, so that a message may be lost.
        """
        self._finished.add(closures)
        if self._lock.acquire(blocking=False):
            try:
                message = messages.FinishedClosures(ranges=self._finished.ranges)
                for connection in self._connections:
                    connection.notify(message)
            finally:
                self._lock.release()

    # -- optimizers ---------------------------------------------------------------------------

    def create_optimizer(
        self,
        server: int,
        optimizer: int,
        class_name: str,
        groups: Sequence[GroupSpec],
        *,
        defaults: Hyperparameters = MappingProxyType({}),
        attributes: Hyperparameters = MappingProxyType({}),
    ) -> None:
        """Set up an optimizer class, by dotted name, over variables of one server.

        `defaults` are the arguments the local object was made with, `attributes` what its class keeps on it.
        """
        message = messages.CreateOptimizer(
            optimizer=optimizer,
            class_name=class_name,
            groups=tuple(groups),
            defaults=sequences_as_tuples(defaults),
            attributes=sequences_as_tuples(attributes),
        )
        self.ask(server, message)
        self.replacement.note_optimizer(server, message)

    def read_state(self, server: int, optimizer: int, variables: Sequence[int]) -> list[StateEntry]:
        """Return what an optimizer keeps for these variables; one request per variable."""
        with self._lock:
            return state_transfer.read(self._connections[server], optimizer, variables)

    def write_state(self, server: int, optimizer: int, entries: Sequence[StateEntry]) -> None:
        """Replace what an optimizer keeps for the variables of the entries."""
        with self._lock:
            if not self.discards_writes:
                state_transfer.write(self._connections[server], optimizer, entries)

    # -- facts and end ------------------------------------------------------------------------

    def check_servers(self, options: ClusterOptions) -> None:
        """Check every server once; call it again and again. Never waits for a connected server.

        Raises:
            ParameterServerLost: a server is gone, or has been silent for too long.
        """
        self._control.check_all(options)

    def answers_checks(self, task: str) -> bool:
        """Return whether a server has answered the last check of `check_servers`. Never waits."""
        return task in self.tasks and self._control.answers_checks(self.tasks.index(task))

    def is_connected(self, task: str) -> bool:
        """Return whether the connection to a server is open, as far as this process knows."""
        return all(one.is_open for one in self._connections if one.task == task)

    def await_servers(self, options: ClusterOptions) -> None:
        """Wait until every server has answered or counts as lost, which is logged.

        All are waited for at once: for ``heartbeat_limit_s``, or longer if the process of one on this host runs.
        """
        present = [server for server, one in enumerate(self._connections) if one.is_open]
        self._control.await_answers(options, of=present)

    def await_each_server(self) -> None:
        """Ping every server on the connection for data; wait while one is restored."""
        self._ask_all(self._everywhere(messages.Ping()))

    @property
    def tasks(self) -> list[str]:
        """Task names of the servers, by index."""
        return [connection.task for connection in self._connections]

    def addresses(self) -> tuple[tuple[str, str], ...]:
        """Return task and last known address of every server."""
        return tuple((one.task, one.last_address) for one in self._connections)

    def abandon(self) -> None:
        """Let waiting and later requests fail. Takes no lock: another thread may wait for a server."""
        self._stop_failover()
        for connection in self._connections:
            connection.give_up("is no longer used: the session of this worker has ended")

    @override
    def close(self) -> None:
        """Close all connections; the coordinator's client first ends the session. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stop_failover()
            try:
                if self._membership.is_owner and not self.keeps_session:
                    end_session(self._connections, self._membership)
            finally:
                self._disconnect()

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<PsClient of {self._membership.task} {state}, {len(self._connections)} servers, "
            f"{self.outbox!r}, {self._mappings!r}>"
        )

    def ask(self, server: int, message: Message) -> Frame:
        """Send one request and return the reply."""
        with self._lock:
            return self._connections[server].request(message)

    def ask_each(self, wanted: Sequence[tuple[int, Message, Sequence[Buffer]]]) -> list[Frame]:
        """Send requests to servers, all at once, and return the replies in their order."""
        with self._lock:
            calls = [
                (self._connections[server], self._connections[server].begin(message, buffers))
                for server, message, buffers in wanted
            ]
            return collect_all(calls)

    # -- inside -------------------------------------------------------------------------------

    def _stop_failover(self) -> None:
        if self.failover is not None:
            self.failover.is_stopped = True

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()
        self.replacement.close_beside()
        self._control.close()
        self._mappings.close()
        self.outbox.close()

    def _everywhere(self, message: Message) -> dict[int, Message]:
        return dict.fromkeys(range(len(self._connections)), message)

    def _ask_all(self, wanted: Mapping[int, Message]) -> None:
        """Send one request to each server, all at once; raise the first error when all have replied."""
        with self._lock:
            calls = [
                (self._connections[one], self._connections[one].begin(message))
                for one, message in wanted.items()
            ]
            collect_all(calls)
