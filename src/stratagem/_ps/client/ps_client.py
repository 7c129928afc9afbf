"""What workers and the coordinator use to talk to all parameter servers.

`PsClient` fuses: one request per server carries everything asked of it, requests to several servers are out at
the same time. Reads on the same host come from shared memory; elsewhere, or when sharing is switched off, bytes come over the
connection. Where a variable lives is the caller's knowledge: servers are given by index.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Final, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem import config
from stratagem._owner import Owner
from stratagem._ps.client.connect_all import reach_all
from stratagem._ps.client.mapping import PIECE_BYTES, MappedVariable, Mappings, ShardLocation
from stratagem._ps.client.outbox import Outbox
from stratagem._ps.client.server_connection import Membership, Pending, ServerConnection
from stratagem._ps.client.server_liveness import ControlConnections
from stratagem._ps.client.write_batch import WriteBatch
from stratagem._ps.rows import take_rows
from stratagem._ps.server.shard_optimizer import GroupSpec, Hyperparameters
from stratagem._ps.server.store import InitOp, StateEntry
from stratagem._wire import codec, messages
from stratagem._wire.codec import Outgoing
from stratagem._wire.messages import Frame, Message, Setting, TensorRef
from stratagem.config import ClusterOptions
from stratagem.errors import ParameterServerLost

_log = logging.getLogger("stratagem.ps")

CLOSE_LIMIT_S: Final = 5.0
"""For all servers together to hear that the session is over; each needs a millisecond, or is in a long step."""


@final
class PsClient(Owner):
    """One task's connections to all parameter servers of a session.

    Safe for several threads (one works at a time). Writes are sent by `send` and acknowledged later: `settle` waits for all
    acknowledgements; reads of this client see its own writes.

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
        ...         print(client.settle(), client.read([w]))
        {(0, 1): 2} [(tensor([2., 2.]), 2)]
    """

    def __init__(
        self,
        servers: Sequence[tuple[str, str]],
        membership: Membership,
        *,
        incarnation: int = 0,
        shared_memory: bool | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        """Connects to every server.

        Args:
            servers: (task, address) of each; their order gives the indices used everywhere.
            membership: session, own task name and role.
            incarnation: which life of its task this is; part of every write.
            shared_memory: False forces bytes over the connection; by default as configured.
            connect_timeout_s: for each server; for the session's owner, who waits for servers that
                are just starting, for all of them.

        Raises:
            ValueError: an address that is none.
            ParameterServerLost: a server cannot be reached.
        """
        self._membership = membership
        allowed = config.shared_memory_allowed() if shared_memory is None else shared_memory
        # Two directions, since containers may see each other's processes one way only: reading a
        # server's variables, and letting a server read this client's slots.
        self._shares_reads = [allowed] * len(servers)
        # Several clients of one coordinator may write to one session; each counts its own writes.
        unique = f"#{secrets.token_hex(4)}" if membership.is_owner else ""
        self._links = [ServerConnection(task, address, membership) for task, address in servers]
        self.outbox = Outbox(
            self._links, membership.task + unique, incarnation, shares_memory=allowed
        )
        lost = [link.declare_lost for link in self._links]
        self._control = ControlConnections(servers, key=membership.key, lost=lost)
        self._lock = threading.RLock()
        self._mappings = Mappings()
        self._closed = False
        try:
            reach_all(self._links, timeout_s=connect_timeout_s, patient=membership.is_owner)
            for server, link in enumerate(self._links):
                if link.welcome is not None:
                    self._control.introduce(server, link.welcome)
                self._try_sharing(server)
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
        """Creates one variable from a value, or by initialisations run on its server."""
        self.create_all([(place, name, recipe)])
        if value is not None:
            self.assign(place, value)

    def create_all(self, wanted: Sequence[tuple[ShardLocation, str, Sequence[InitOp]]]) -> None:
        """Creates many variables, one request per server; without a recipe they are undefined."""
        specs: dict[int, list[messages.VariableSpec]] = {}
        for place, name, recipe in wanted:
            operations = tuple(messages.Initialise(one.name, one.args, one.seed) for one in recipe)
            dtype = codec.dtype_name(place.dtype)
            spec = messages.VariableSpec(place.variable, name, dtype, place.shape, operations)
            specs.setdefault(place.server, []).append(spec)
            self._links[place.server].names[place.variable] = name
        self._ask_all(
            {
                server: messages.CreateVariables(variables=tuple(some))
                for server, some in specs.items()
            }
        )

    def delete(self, places: Sequence[ShardLocation]) -> None:
        """Frees variables."""
        by_server: dict[int, list[int]] = {}
        with self._lock:
            for place in places:
                by_server.setdefault(place.server, []).append(place.variable)
                self._mappings.forget(place)
                self._links[place.server].names.pop(place.variable, None)
            self._ask_all(
                {
                    server: messages.DeleteVariables(variables=tuple(some))
                    for server, some in by_server.items()
                }
            )

    def assign(self, place: ShardLocation, value: Tensor) -> int:
        """Overwrites a whole variable, in pieces if it is large; returns when it is done.

        Returns:
            The version that has exactly this value; -1 if somebody else wrote between two pieces.
        """
        if tuple(value.shape) != place.shape:
            raise ValueError(
                f"cannot assign a value of shape {tuple(value.shape)!r} to a variable of shape "
                f"{place.shape!r}"
            )
        with self._lock:
            self.settle()
            versions = []
            for start, count in place.pieces():
                batch = self.batch()
                piece = value if count < 0 else value[start : start + count]
                if count < 0:
                    batch.assign(place.server, place.variable, "set", piece.to(place.dtype))
                else:
                    batch.assign_rows(place.server, place.variable, start, piece.to(place.dtype))
                self.send(batch)
                versions.append(self.settle().get((place.server, place.variable), -1))
            undisturbed = versions[-1] - versions[0] == len(versions) - 1
            return versions[-1] if undisturbed else -1

    def name_variables(self, server: int, names: dict[int, str]) -> None:
        """Tells the names of variables this client did not create, for errors."""
        self._links[server].names.update(names)

    # -- reads --------------------------------------------------------------------------------

    def map(self, places: Sequence[ShardLocation]) -> list[MappedVariable | None]:
        """The variables in shared memory, without a copy; None for those that cannot be shared.

        Settle first if own writes must show.
        """
        with self._lock:
            missing: dict[int, list[ShardLocation]] = {}
            for place in places:
                if self._shares_reads[place.server] and self._mappings.get(place) is None:
                    missing.setdefault(place.server, []).append(place)
            for server, some in missing.items():
                self._map_more(server, some)
            return [self._mappings.get(place) for place in places]

    def read(self, places: Sequence[ShardLocation]) -> list[tuple[Tensor, int]]:
        """Whole values, each consistent in itself, with their versions."""
        with self._lock:
            self.settle()
            found: list[tuple[Tensor, int] | None] = [
                one.copy() if one is not None else None for one in self.map(places)
            ]
            absent = [index for index, one in enumerate(found) if one is None]
            for index, value in zip(
                absent, self._fetch([places[index] for index in absent]), strict=True
            ):
                found[index] = value
            return [one for one in found if one is not None]

    def read_rows(self, wanted: Sequence[tuple[ShardLocation, Tensor]]) -> list[tuple[Tensor, int]]:
        """Rows of variables in the order asked, with the versions; one request per server at most."""
        with self._lock:
            mapped = self.map([place for place, _ in wanted])
            if all(one is not None for one in mapped):
                self.settle()
                return [
                    (take_rows(one.tensor, ids), one.version)
                    for one, (_, ids) in zip(mapped, wanted, strict=True)
                    if one is not None
                ]
            items: dict[int, list[tuple[int, messages.ReadItem]]] = {}
            outgoing: dict[int, Outgoing] = {}
            for index, (place, ids) in enumerate(wanted):
                ref = outgoing.setdefault(place.server, Outgoing()).add(ids)
                item = messages.ReadItem(place.variable, ids=ref)
                items.setdefault(place.server, []).append((index, item))
            return self._collect_values(items, outgoing, len(wanted))

    def versions(self, server: int, variables: Sequence[int] = ()) -> dict[int, int]:
        """Versions of variables on one server; of all of them if none is named."""
        reply = self._ask(server, messages.AskVersions(variables=tuple(variables))).message
        assert isinstance(reply, messages.Versions)
        return dict(reply.versions)

    # -- writes -------------------------------------------------------------------------------

    @property
    def lock(self) -> AbstractContextManager[object]:
        """To be held from `batch` to `settle` where several threads write; reads take it too."""
        return self._lock

    def batch(self, *, lends_from: float = math.inf) -> WriteBatch:
        """A new batch of writes. One at a time: fill it, send it, then ask for the next.

        Args:
            lends_from: of so many bytes on, servers on this host read tensors where they lie if they can,
                and the caller must `settle` before anybody may change them.
        """
        with self._lock:
            return self.outbox.batch(lends_from=lends_from)

    def send(self, batch: WriteBatch) -> None:
        """Sends a batch to its servers and returns; `settle` waits for the acknowledgements.

        Raises:
            ValueError: more bytes for one server than a frame may have; nothing was sent.
        """
        with self._lock:
            self.outbox.send(batch)

    def settle(self, *, timeout_s: float | None = None) -> dict[tuple[int, int], int]:
        """Waits until every write sent is acknowledged.

        Returns:
            (server, variable) → its version after the write.

        Raises:
            ParameterServerLost: a server is gone; whether the write was applied is not known.
            WriteFenced: this life of the task was declared lost.
            Exception: what a server raised; the first, the others are in its notes. Errors of writes
                that belong to an earlier closure are kept for it (`Outbox.failures`).
            KeyboardInterrupt: Ctrl-C; the writes stay unsettled, and the next call waits for them.
        """
        with self._lock:
            return {} if self.outbox.is_settled else self.outbox.settle(timeout_s=timeout_s)

    def settle_if_due(self, batch: WriteBatch) -> None:
        """As `settle`, where a write is waited for at once: if it lent anything, or outside a scheduled function."""
        if batch.lends or not self.outbox.defers:
            self.settle()

    def progress(self) -> None:
        """Takes in acknowledgements that are here, without waiting for anything or anybody."""
        if self._lock.acquire(blocking=False):
            try:
                self.outbox.progress()
            finally:
                self._lock.release()

    def fence(self, task: str, incarnation: int) -> None:
        """Every server refuses writes of this life of the task, and of earlier ones, from now on."""
        self._ask_all(self._everywhere(messages.Fence(worker=task, incarnation=incarnation)))

    def forget_closures(self, closures: Sequence[int]) -> None:
        """These exactly-once closures are finished: nobody repeats their writes."""
        self._ask_all(self._everywhere(messages.ForgetClosures(closures=tuple(closures))))

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
        """Sets up an optimizer class, by dotted name, over variables of one server.

        `defaults` and `attributes` are what the object here was made with and keeps.
        """
        made = tuple(
            messages.Group(group.variables, _settings(group.hyperparameters)) for group in groups
        )
        self._ask(
            server,
            messages.CreateOptimizer(
                optimizer=optimizer,
                class_name=class_name,
                groups=made,
                defaults=_settings(defaults),
                attributes=_settings(attributes),
            ),
        )

    def read_state(self, server: int, optimizer: int, variables: Sequence[int]) -> list[StateEntry]:
        """What an optimizer remembers about these variables; one variable per request."""
        entries = []
        for variable in variables:
            frame = self._ask(
                server, messages.ReadState(optimizer=optimizer, variables=(variable,))
            )
            assert isinstance(frame.message, messages.State)
            for item in frame.message.items:
                tensor = item.tensor
                value: Tensor | float | int | bool | None = item.value
                if tensor is not None and tensor.buffer < 0:
                    value = self._fetch_state(server, optimizer, item)
                elif tensor is not None:
                    value = codec.tensor_from(tensor, frame)
                entries.append(StateEntry(variable=item.variable, key=item.key, value=value))
        return entries

    def _fetch_state(self, server: int, optimizer: int, item: messages.StateItem) -> Tensor:
        """A large tensor of optimizer state, in pieces."""
        ref = item.tensor
        assert ref is not None
        whole = torch.empty(ref.shape, dtype=codec.dtype_from(ref.dtype))
        for start, count in _pieces_of(whole):
            message = messages.ReadState(
                optimizer=optimizer,
                variables=(item.variable,),
                key=item.key,
                start=start,
                count=count,
            )
            frame = self._ask(server, message)
            assert isinstance(frame.message, messages.State)
            (piece,) = frame.message.items
            assert piece.tensor is not None
            whole[start : start + count].copy_(codec.tensor_from(piece.tensor, frame))
        return whole

    def write_state(self, server: int, optimizer: int, entries: Sequence[StateEntry]) -> None:
        """Replaces what an optimizer remembers about the variables of the entries."""
        by_variable: dict[int, list[StateEntry]] = {}
        for entry in entries:
            by_variable.setdefault(entry.variable, []).append(entry)
        for some in by_variable.values():
            outgoing = Outgoing()
            items = []
            later: list[tuple[StateEntry, Tensor]] = []
            size = 0
            for entry in some:
                value = entry.value
                if not isinstance(value, Tensor):
                    items.append(messages.StateItem(entry.variable, entry.key, value=value))
                    continue
                size += value.nbytes
                if size > PIECE_BYTES and value.dim():
                    later.append((entry, value))
                    ref = TensorRef(codec.dtype_name(value.dtype), tuple(value.shape))
                else:
                    ref = outgoing.add(value)
                items.append(messages.StateItem(entry.variable, entry.key, tensor=ref))
            message = messages.WriteState(optimizer=optimizer, items=tuple(items))
            with self._lock:
                self._links[server].request(message, outgoing.buffers)
            for entry, value in later:
                self._write_state_pieces(server, optimizer, entry, value)

    def _write_state_pieces(
        self, server: int, optimizer: int, entry: StateEntry, value: Tensor
    ) -> None:
        for start, count in _pieces_of(value):
            outgoing = Outgoing()
            ref = outgoing.add(value[start : start + count])
            item = messages.StateItem(entry.variable, entry.key, tensor=ref)
            message = messages.WriteState(optimizer=optimizer, items=(item,), start=start)
            with self._lock:
                self._links[server].request(message, outgoing.buffers)

    # -- facts and end ------------------------------------------------------------------------

    def ping(self, server: int, *, timeout_s: float = 2.0) -> messages.Pong:
        """Asks whether a server lives; answered even while it works on a long step.

        Raises:
            ParameterServerLost: it is gone, or does not answer in time.
        """
        return self._control.ping(server, timeout_s=timeout_s)

    def stats(self, server: int, *, timeout_s: float = 5.0) -> dict[str, object]:
        """Numbers about a server, at most half a second old."""
        return self._control.stats(server, timeout_s=timeout_s)

    def look_after_servers(self, options: ClusterOptions) -> None:
        """One look at every server, to be repeated; waits for none that is connected.

        Raises:
            ParameterServerLost: one is gone, or has been silent for too long.
        """
        self._control.look_after(options)

    def await_servers(self, options: ClusterOptions) -> None:
        """Returns when every server has answered, or counts as lost from now on, which is logged.

        All are waited for at once: for ``heartbeat_limit_s``, or longer while one on this host computes.
        """
        present = [server for server, link in enumerate(self._links) if link.is_open]
        self._control.await_answers(options, of=present)

    @property
    def tasks(self) -> list[str]:
        """Task names of the servers, by index."""
        return [link.task for link in self._links]

    def shares_memory(self, server: int) -> bool:
        """Whether this process may read the server's variables in shared memory."""
        return self._shares_reads[server]

    @override
    def close(self) -> None:
        """Hangs up; the coordinator's client first ends the session. Repeatable.

        Servers that do not answer are waited for once, all together, for `CLOSE_LIMIT_S`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._membership.is_owner:
                    self._end_session()
            finally:
                self._hang_up()

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<PsClient of {self._membership.task} {state}, {len(self._links)} servers, "
            f"{self.outbox!r}, {self._mappings!r}>"
        )

    # -- inside -------------------------------------------------------------------------------

    def _end_session(self) -> None:
        deadline = time.monotonic() + CLOSE_LIMIT_S
        calls: list[tuple[ServerConnection, Pending]] = []
        for link in self._links:
            if link.is_open:  # else it is gone, and its variables with it
                pending = Pending(messages.CloseSession(session=self._membership.session), ())
                link.send(pending, later=True)
                link.flush()
                calls.append((link, pending))
        for link, pending in calls:
            try:
                link.collect(pending, timeout_s=max(0.0, deadline - time.monotonic()))
            except ParameterServerLost as error:
                _log.warning(
                    "%s was not told that its session is over, and frees the variables %g s after "
                    "the connection has ended: %s",
                    link.task,
                    self._membership.lease_s,
                    error,
                )

    def _hang_up(self) -> None:
        for link in self._links:
            link.close()
        self._control.close()
        self._mappings.close()
        self.outbox.close()

    def _everywhere(self, message: Message) -> dict[int, Message]:
        return dict.fromkeys(range(len(self._links)), message)

    def _ask(self, server: int, message: Message) -> Frame:
        with self._lock:
            return self._links[server].request(message)

    def _ask_all(self, wanted: dict[int, Message]) -> None:
        """One request to each server, all out at once; raises the first error when all are back."""
        with self._lock:
            calls = [(self._links[one], self._links[one].begin(m)) for one, m in wanted.items()]
            first: Exception | None = None
            for link, pending in calls:
                try:
                    link.collect(pending)
                except Exception as error:  # noqa: BLE001 - raised below, when all replies are here
                    first = first or error
            if first is not None:
                raise first

    def _try_sharing(self, server: int) -> None:
        """Finds out whether the server can map this client's slots."""
        link = self._links[server]
        self._shares_reads[server] &= link.server_shares_memory
        self.outbox.try_sharing(server, allowed=link.server_shares_memory)

    def _map_more(self, server: int, places: Sequence[ShardLocation]) -> None:
        message = messages.Locate(variables=tuple(place.variable for place in places))
        located = self._ask(server, message).message
        assert isinstance(located, messages.Located)
        if not self._mappings.add(server, places, located):
            self._shares_reads[server] = False

    def _fetch(self, places: Sequence[ShardLocation]) -> list[tuple[Tensor, int]]:
        """Values over the connection, large ones in pieces, many in several requests."""
        items: dict[int, list[tuple[int, messages.ReadItem]]] = {}
        asked: dict[int, int] = {}  # bytes, by server
        found: dict[int, tuple[Tensor, int]] = {}

        def collect() -> None:
            values = self._collect_values(items, {}, len(places))
            for some in items.values():
                found.update((index, values[index]) for index, _ in some)
            items.clear()
            asked.clear()

        for index, place in enumerate(places):
            pieces = place.pieces()
            if len(pieces) > 1:
                found[index] = self._fetch_pieces(place, pieces)
                continue
            if items.get(place.server) and asked[place.server] + place.nbytes > PIECE_BYTES:
                collect()
            asked[place.server] = asked.get(place.server, 0) + place.nbytes
            item = messages.ReadItem(place.variable)
            items.setdefault(place.server, []).append((index, item))
        collect()
        return [found[index] for index in range(len(places))]

    def _fetch_pieces(
        self, place: ShardLocation, pieces: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, int]:
        """A large value; its version is the last piece's: writes may run between pieces."""
        whole = torch.empty(place.shape, dtype=place.dtype)
        version = 0
        for start, count in pieces:
            frame = self._ask(
                place.server,
                messages.Read(items=(messages.ReadItem(place.variable, start, count),)),
            )
            assert isinstance(frame.message, messages.Values)
            piece = codec.tensor_from(frame.message.values[0], frame)
            whole[start : start + count].copy_(piece)
            version = frame.message.versions[0]
        return whole, version

    def _collect_values(
        self,
        items: dict[int, list[tuple[int, messages.ReadItem]]],
        outgoing: dict[int, Outgoing],
        count: int,
    ) -> list[tuple[Tensor, int]]:
        """Sends one or more Reads per server, then puts the values where they belong."""
        calls: list[tuple[int, list[int], Pending]] = []
        for server, some in items.items():
            message = messages.Read(items=tuple(item for _, item in some))
            buffers = outgoing[server].buffers if server in outgoing else ()
            pending = self._links[server].begin(message, buffers)
            calls.append((server, [index for index, _ in some], pending))
        self.settle()  # their acknowledgements come first anyway
        found: list[tuple[Tensor, int]] = [(_NOTHING, -1)] * count
        for server, indices, pending in calls:
            frame = self._links[server].collect(pending)
            assert isinstance(frame.message, messages.Values)
            refs: tuple[TensorRef, ...] = frame.message.values
            for index, ref, version in zip(indices, refs, frame.message.versions, strict=True):
                found[index] = (codec.tensor_from(ref, frame), version)
        return found


def _settings(values: Hyperparameters) -> dict[str, Setting]:
    return {
        key: tuple(value) if isinstance(value, list | tuple) else value  # type: ignore[misc]
        for key, value in values.items()
    }


def _pieces_of(value: Tensor) -> list[tuple[int, int]]:
    """(start, count) of the rows of each piece a large tensor travels in."""
    rows = value.shape[0]
    step = max(1, PIECE_BYTES * rows // max(1, value.nbytes))
    return [(start, min(step, rows - start)) for start in range(0, rows, step)]


_NOTHING = torch.empty(0)
