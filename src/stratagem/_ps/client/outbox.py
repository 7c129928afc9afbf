"""Writes that were sent to servers and are not acknowledged yet.

`PsClient` has one `Outbox`. Outside a scheduled function the caller of a write also waits for it
(`wait`). Inside one (`begin_closure`) it does not: a write that fails later is kept for the closure that
made it (`failures`), and the worker reports the closure as finished only after all its writes are
acknowledged. Small writes of very short functions are gathered, so that many of them share a system
call and a turn of the server.

Every write has two numbers, by which servers recognise repetitions: its place among all writes of this
client, and its place among the writes of its closure. Not thread-safe: `PsClient` holds a lock.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, final

from typing_extensions import override

from stratagem._ps.client.send_buffers import SendBuffers
from stratagem._ps.client.server_connection import Pending, ServerConnection
from stratagem._ps.client.value_reads import (
    Newer,
    PlaceOfRead,
    narrow_dtype,
    newer_values,
    place_values,
)
from stratagem._ps.client.write_batch import Destination, ServerPart, WriteBatch
from stratagem._ps.inline_write import inline_write
from stratagem._wire import messages
from stratagem._wire.messages import ReadItem
from stratagem.errors import NotFoundError, ParameterServerLost, ProtocolError

_log = logging.getLogger("stratagem.ps")

HALF_BYTES: Final = 1 << 22
"""Bytes copied into one half of the send buffers before the other one is used; more would not stay in
the processor's caches."""

HALF_WRITES: Final = 32
"""Writes sent from one half before the other one is used."""

GATHERED_BYTES: Final = 1 << 14
"""Larger writes are sent at once: their server can begin with them."""


class _Write(NamedTuple):
    """One write to one server."""

    server: int
    pending: Pending
    closure: int | None  # that made it
    half: int  # of the send buffers, which the server reads


@final
class Outbox:
    """The writes of one client.

    Args:
        connections: to the servers.
        writer: name under which servers know this client.
        incarnation: the client's incarnation; part of every write.
        may_share: whether servers may read this client's memory at all; `share_memory` finds out which can.
    """

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        writer: str,
        incarnation: int,
        *,
        may_share: bool,
    ) -> None:
        self._connections = connections
        self._writer = writer
        self._incarnation = incarnation
        self._may_share = may_share
        self.destinations: list[Destination] = []  # of the servers of which `share_memory` was told
        self.buffers = SendBuffers()
        for index, one in enumerate(connections):
            one.segments = self.buffers.refs
            one.on_unmapped = functools.partial(self._stop_sharing, index)
        self.duplicates = 0
        """Writes that a server had applied before."""
        self.sent = 0
        """Writes sent so far."""
        self.failures: dict[int, Exception] = {}
        """Errors of writes whose closures had ended; the worker takes them out and reports them."""
        self.is_deferring = False
        """True if the caller of a write need not wait for it."""
        self.values: dict[tuple[int, int], Newer] = {}
        """Values that came with acknowledgements, by server and variable; the caller takes them out."""
        self._gathers = False
        self._has_gathered = False  # writes that are not on their way
        self._closure: int | None = None
        self._is_numbered = False  # whether writes carry the closure's number
        self._next_nth = 0  # among the writes of the closure
        self._unacknowledged: deque[_Write] = deque()
        self._in_half = [0, 0]  # how many of them read each half

    # -- closures -----------------------------------------------------------------------------

    def begin_closure(self, closure: int, *, exactly_once: bool, gathers: bool) -> None:
        """Let the following writes belong to a closure.

        Args:
            closure: its number.
            exactly_once: servers recognise its writes if another worker repeats them.
            gathers: small writes may wait for others.
        """
        self._closure, self._gathers, self.is_deferring = closure, gathers, True
        self._is_numbered, self._next_nth = exactly_once, 0

    def end_closure(self) -> None:
        """Let the following writes belong to no closure; earlier ones may be unacknowledged."""
        self._closure = None
        self._is_numbered = self.is_deferring = self._gathers = False

    # -- writing ------------------------------------------------------------------------------

    def batch(self) -> WriteBatch:
        """Return a new batch. Fill it and send it before asking for the next one."""
        buffers = self.buffers
        if not self._unacknowledged:
            buffers.reset()
        elif buffers.used_bytes >= HALF_BYTES or self._in_half[buffers.current] >= HALF_WRITES:
            other = 1 - buffers.current
            self.wait(half=other)
            buffers.switch()
        return WriteBatch(buffers, self.destinations)

    def send(
        self,
        batch: WriteBatch,
        reads: Mapping[int, Sequence[ReadItem]] | None = None,
        place: PlaceOfRead | None = None,
    ) -> None:
        """Send a batch to its servers. `reads`, by server: read these after the write, into memory that `place` finds."""
        batch.copy_in()
        gathered = self._gathers and batch.nbytes <= GATHERED_BYTES
        self._has_gathered |= gathered
        first = self._next_nth
        for server, parts in batch.parts.items():
            if self.destinations[server].shares_memory:
                self._announce(server)
            for nth, part in enumerate(parts, first):
                read = reads.get(server, ()) if reads and part is parts[-1] else ()
                self._send_one(server, part, nth, tuple(read), place, gathered=gathered)
            self._next_nth = max(self._next_nth, first + len(parts))

    def _send_one(
        self,
        server: int,
        part: ServerPart,
        nth: int,
        read: tuple[ReadItem, ...],
        place: PlaceOfRead | None,
        *,
        gathered: bool,
    ) -> None:
        connection = self._connections[server]
        connection.sequence += 1
        closure = self._closure if self._is_numbered else None
        write_id = messages.WriteId(
            self._writer, self._incarnation, connection.sequence, closure, nth
        )
        message = messages.Write(origin=write_id, operations=part.encoded(), read=read)
        pending = Pending(message, part.buffers_now())
        if place is not None and read:
            pending.place = functools.partial(place_values, place, server, read)
        if part.is_shared and not self.destinations[server].shares_memory:
            self._inline(server, pending)
        write = _Write(server, pending, self._closure, self.buffers.current)
        # Noted first: if anything interrupts the sending, its memory is not used again before the server
        # has answered.
        self._unacknowledged.append(write)
        self._in_half[write.half] += 1
        self.sent += 1
        try:
            connection.send(write.pending, later=gathered)
        except Exception as error:  # the write was not sent
            self.sent -= 1
            self._in_half[write.half] -= 1
            self._unacknowledged.pop()
            self._after(error)
            raise
        except BaseException:  # Ctrl-C: it may have been sent
            self._interrupted()
            raise

    def wait(self, *, half: int | None = None) -> dict[tuple[int, int], int]:
        """Take in acknowledgements, oldest first; return the versions of the variables written.

        `half`: only until no write reads this half of the send buffers.

        Raises:
            Exception: the first error of a write of the present closure; the others are in its notes.
        """
        versions: dict[tuple[int, int], int] = {}
        first: Exception | None = None
        try:
            self._send_gathered()
            while self._unacknowledged if half is None else self._in_half[half]:
                write = self._unacknowledged[0]
                try:
                    self._take_reply(write, versions)
                except Exception as error:  # noqa: BLE001 - raised when all replies are here
                    self._after(error)
                    if write.closure != self._closure and write.closure is not None:
                        self.failures.setdefault(write.closure, error)
                    elif first is None:
                        first = error
                    else:
                        first.add_note(f"also: {type(error).__name__}: {error}")
                self._remove_oldest()
        except BaseException:  # wherever it struck: a reply taken but not noted would be awaited
            self._interrupted()
            raise
        if first is not None:
            raise first
        return versions

    def progress(self) -> None:
        """Send gathered writes and take in acknowledgements that have arrived; never wait."""
        self._send_gathered()
        while self._unacknowledged:
            write = self._unacknowledged[0]
            if not self._connections[write.server].is_answered(write.pending):
                return
            try:
                self._take_reply(write, {})
            except Exception as error:  # noqa: BLE001 - kept for its closure
                self._after(error)
                if write.closure is not None:
                    self.failures.setdefault(write.closure, error)
            self._remove_oldest()

    def keep_unacknowledged(self) -> None:
        """Copy what unacknowledged writes would send again, so that callers may change their tensors."""
        for write in self._unacknowledged:
            write.pending.buffers = [bytes(buffer) for buffer in write.pending.buffers]

    @property
    def acknowledged(self) -> int:
        """How many writes, counted from the first, were acknowledged or failed."""
        return self.sent - len(self._unacknowledged)

    @property
    def is_idle(self) -> bool:
        """True if no write waits for its acknowledgement."""
        return not self._unacknowledged

    def share_memory(self, server: int, *, allowed: bool) -> None:
        """Find out whether a server can map this client's memory; `allowed`: whether it wants to. Called for each server in order."""
        one, shares = self._connections[server], allowed and self._may_share
        made = Destination(one.task, shares, one.frame_bytes, one.names, narrow_dtype())
        self.destinations.append(made)
        if shares:
            self.buffers.prepare()
            self._announce(server)

    def close(self) -> None:
        """Release the shared memory. May be called again."""
        self.buffers.close()

    @override
    def __repr__(self) -> str:
        return f"<Outbox {self.sent} writes sent, {len(self._unacknowledged)} unacknowledged>"

    # -- inside -------------------------------------------------------------------------------

    def _announce(self, server: int) -> None:
        """Tell a server on this host about memory it has not mapped yet."""
        connection = self._connections[server]
        refs = self.buffers.refs()
        if refs is not connection.announced:
            if refs != connection.announced:
                try:
                    connection.request(messages.OpenSegments(segments=refs))
                except NotFoundError as error:
                    _log.debug("%s", error)
                    self._stop_sharing(server)
                    return
            connection.announced = refs

    def _stop_sharing(self, server: int) -> None:
        """Send values over the connection from now on, also those of unacknowledged writes.

        The server is on another host, in another container or of another user. One that took over may be, too.
        """
        self._connections[server].announced = ()
        self.destinations[server] = self.destinations[server]._replace(shares_memory=False)
        for write in self._unacknowledged:
            if write.server == server:
                try:
                    self._inline(server, write.pending)
                except ValueError as error:
                    write.pending.failure = f"cannot get a write again: {error}"

    def _inline(self, server: int, pending: Pending) -> None:
        """Put the values of a write into its message.

        Raises:
            ValueError: they are too large for one message.
        """
        assert isinstance(pending.message, messages.Write)
        message, buffers = inline_write(pending.message, pending.buffers, self.buffers.bytes_at)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        limit = self._connections[server].frame_bytes
        if size > limit:
            raise ValueError(
                f"one write has {size} bytes of values for {self.destinations[server].task}, which "
                f"cannot map the shared memory of this process and takes at most {limit} bytes in "
                "one message. Use a variable_partitioner that cuts large variables, or set "
                "STRATAGEM_FRAME_BYTES for the servers."
            )
        pending.message, pending.buffers = message, buffers

    def _send_gathered(self) -> None:
        """Send gathered writes to all servers, so that these work at the same time."""
        if self._has_gathered:
            self._has_gathered = False
            for connection in self._connections:
                connection.flush()

    def _remove_oldest(self) -> None:
        write = self._unacknowledged.popleft()
        self._in_half[write.half] -= 1
        if not self._unacknowledged:
            self.buffers.release_retired()

    def _take_reply(self, write: _Write, versions: dict[tuple[int, int], int]) -> None:
        server = write.server
        frame = self._connections[server].collect(write.pending)
        reply = frame.message
        if not isinstance(reply, messages.Written):
            raise ProtocolError(f"a write was answered by {type(reply).__name__}")
        if reply.duplicate:
            self._count_duplicate(write.pending)
        for variable, version in reply.versions.items():
            versions[server, variable] = version
        if reply.values is not None:
            assert isinstance(write.pending.message, messages.Write)
            read = write.pending.message.read
            for item, value in zip(read, newer_values(reply.values, frame), strict=True):
                self.values[server, item.variable] = value

    def _after(self, error: Exception) -> None:
        """Give up memory that a server which did not answer may still read."""
        if isinstance(error, ParameterServerLost):
            self.buffers.retire()

    def _interrupted(self) -> None:
        """Keep the writes that Ctrl-C left unacknowledged: the next use of the connections repeats them.

        Servers recognise the ones they have applied. Until then their memory is not used again.
        """
        self.keep_unacknowledged()
        for index, connection in enumerate(self._connections):
            kept = [one.pending for one in self._unacknowledged if one.server == index]
            connection.interrupted(kept)

    def _count_duplicate(self, pending: Pending) -> None:
        """Accept that a server had applied a write before, if the write was repeated."""
        self.duplicates += 1
        assert isinstance(pending.message, messages.Write)
        if not pending.was_repeated and pending.message.origin.closure is None:
            raise ProtocolError(
                f"the first write of {self._writer!r}, incarnation {self._incarnation}, was taken "
                f"for a repetition: another client writes under the same name. Give every "
                f"incarnation of a task its own number, and one PsClient."
            )
