"""Writes on their way to the servers: numbered, sent, not yet acknowledged.

`PsClient` has one `Outbox`. Outside a scheduled function whoever writes also waits (`settle`). Inside one (`closure`) a
write need not be waited for: what fails later is kept for the closure that wrote (`failures`), which the worker reports as
finished only when everything it wrote is acknowledged. Small writes of functions that are over in no time are gathered, so that
many of them share a system call and a turn of the server.

Not for several threads at once: `client.py` has the lock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from torch import Tensor
from typing_extensions import override

from stratagem._ps.client.server_connection import Pending, ServerConnection
from stratagem._ps.client.splitting import Piece, TooLargeError, size_of, size_of_operations, split
from stratagem._ps.client.write_batch import SendBuffers, ServerPart, Sharing, WriteBatch
from stratagem._wire import messages
from stratagem.errors import NotFoundError, ProtocolError

UNSETTLED_BYTES: Final = 1 << 22
"""Bytes written ahead of their acknowledgements; more would only leave the caches."""

UNSETTLED_WRITES: Final = 64

GATHERED_BYTES: Final = 1 << 14
"""Larger writes are not held back: their server can begin with them."""


class _Write(NamedTuple):
    """One write to one server."""

    server: int
    pending: Pending
    owner: int | None  # the closure it belongs to
    lent: Sequence[Tensor]  # what the server reads where it lies: not freed before it has answered


@final
class Outbox:
    """The writes of one client.

    Args:
        links: the servers.
        writer: name under which servers know who writes.
        incarnation: which life of its task this is; part of every write.
        shares_memory: whether servers may read this client's memory at all; who can is found out by
            `try_sharing`.
    """

    def __init__(
        self,
        links: Sequence[ServerConnection],
        writer: str,
        incarnation: int,
        *,
        shares_memory: bool,
    ) -> None:
        self._links = links
        self._writer = writer
        self._incarnation = incarnation
        self._may_share = shares_memory
        self.sharing = [Sharing.NOTHING] * len(links)
        """By server, what it reads in this process's memory."""
        self.slots = SendBuffers()
        self.duplicates = 0
        """Writes a server answered it had applied before."""
        self.sent = 0
        """Writes sent so far."""
        self.failures: dict[int, Exception] = {}
        """Closures whose writes failed after they had ended; taken out by who reports them."""
        self.defers = False
        """Whether a write need not be waited for."""
        self._gathers = False
        self._owner: int | None = None
        self._once: int | None = None  # the exactly-once closure that runs now
        self._nth: dict[int, int] = {}  # how many writes to each server it has made
        self._unsettled: deque[_Write] = deque()
        self._unsettled_bytes = 0

    # -- closures -----------------------------------------------------------------------------

    def begin_closure(self, owner: int, *, exactly_once: bool, gathers: bool) -> None:
        """Writes belong to this closure from now on.

        Args:
            owner: its number.
            exactly_once: repeated elsewhere its writes count once.
            gathers: small writes may wait for more.
        """
        self._owner, self._gathers, self.defers = owner, gathers, True
        self._once = owner if exactly_once else None
        if self._nth:
            self._nth = {}

    def end_closure(self) -> None:
        """It is over; what it wrote may be unsettled."""
        self._owner, self._once = None, None
        self.defers = self._gathers = False

    # -- writing ------------------------------------------------------------------------------

    def batch(self, *, lends_from: float = math.inf) -> WriteBatch:
        """A new batch of writes. One at a time: fill it, send it, then ask for the next."""
        if self._unsettled_bytes > UNSETTLED_BYTES or len(self._unsettled) >= UNSETTLED_WRITES:
            self.settle()
        if not self._unsettled:
            self.slots.reset()
        return WriteBatch(self.slots, self.sharing, lends_from=lends_from)

    def send(self, batch: WriteBatch) -> None:
        """Sends a batch to its servers.

        Raises:
            ValueError: more bytes for one variable than its server takes at once; nothing was sent.
        """
        pieces: dict[int, Sequence[ServerPart | Piece]] = {}
        for server, part in batch.parts.items():
            if part.buffers or self._once is not None:
                pieces[server] = self._pieces(server, part)
        batch.copy_in()
        later = self._gathers and batch.nbytes <= GATHERED_BYTES and not batch.lends
        lent = batch.take_lent()
        self._unsettled_bytes += batch.nbytes
        try:
            for server, part in batch.parts.items():
                if part.sharing is not Sharing.NOTHING:
                    self._announce(server)
                for piece in pieces.get(server) or (part,):
                    self._send_one(server, piece, lent, later=later)
        except Exception as error:
            if lent:  # the caller will not wait for those that got it, and use its tensors again
                self._settle_after(error)
            raise

    def _send_one(
        self, server: int, piece: ServerPart | Piece, lent: Sequence[Tensor], *, later: bool
    ) -> None:
        link = self._links[server]
        link.sequence += 1
        nth = 0
        if self._once is not None:
            nth = self._nth.get(server, 0)
            self._nth[server] = nth + 1
        origin = messages.Origin(self._writer, self._incarnation, link.sequence, self._once, nth)
        message = messages.Write(origin=origin, operations=piece.encoded())
        pending = Pending(message, piece.buffers)
        # Noted first: whatever interrupts the sending, its slots are not used again before the
        # server has answered.
        self._unsettled.append(_Write(server, pending, self._owner, lent))
        self.sent += 1
        try:
            link.send(pending, later=later)
        except Exception:  # whichever it was, the write has not been sent: it was never made
            self.sent -= 1
            self._unsettled.pop()
            raise
        except BaseException:  # Ctrl-C: it may have been sent
            self._interrupted()
            raise

    def settle(self, *, timeout_s: float | None = None) -> dict[tuple[int, int], int]:
        """Waits until every write is acknowledged; see `PsClient.settle`."""
        versions: dict[tuple[int, int], int] = {}
        first: Exception | None = None
        try:
            while self._unsettled:
                write = self._unsettled[0]
                try:
                    self._take_reply(write, versions, timeout_s)
                except Exception as error:  # noqa: BLE001 - raised when all replies are here
                    if write.owner != self._owner and write.owner is not None:
                        self.failures.setdefault(write.owner, error)
                    elif first is None:
                        first = error
                    else:
                        first.add_note(f"also: {type(error).__name__}: {error}")
                self._unsettled.popleft()
        except BaseException:  # wherever it struck: a reply taken but not noted would be awaited
            self._interrupted()
            raise
        self._unsettled_bytes = 0
        if first is not None:
            raise first
        return versions

    def _settle_after(self, error: Exception) -> None:
        try:
            self.settle()
        except Exception as another:  # noqa: BLE001 - the first one is raised by the caller
            error.add_note(f"also: {type(another).__name__}: {another}")

    def progress(self) -> None:
        """Sends what was gathered and takes in what has been acknowledged; never waits."""
        for link in self._links:
            link.flush()
        while self._unsettled:
            write = self._unsettled[0]
            if not self._links[write.server].is_answered(write.pending):
                return
            try:
                self._take_reply(write, {}, None)
            except Exception as error:  # noqa: BLE001 - kept for its closure
                if write.owner is not None:
                    self.failures.setdefault(write.owner, error)
            self._unsettled.popleft()
        self._unsettled_bytes = 0

    @property
    def settled(self) -> int:
        """How many writes, counted from the first, are acknowledged or failed."""
        return self.sent - len(self._unsettled)

    @property
    def is_settled(self) -> bool:
        """Whether every write sent so far is acknowledged, so that the slots are free."""
        return not self._unsettled

    def try_sharing(self, server: int, *, allowed: bool) -> None:
        """Finds out what a server can map of this process's memory; `allowed`: whether it wants to."""
        if not allowed or not self._may_share:
            return
        self.slots.prepare()
        # A limit of its address space may keep it from mapping a whole heap. If it cannot map slots either it
        # is on another host, in another container, or another user's: bytes go over the connection.
        for sharing in (Sharing.HEAP, Sharing.SLOTS):
            if sharing is Sharing.HEAP and not self.slots.heap_refs:
                continue
            self.sharing[server] = sharing
            try:
                self._announce(server)
                return
            except NotFoundError:
                self.sharing[server] = Sharing.NOTHING

    def close(self) -> None:
        """Gives the slots up. Repeatable."""
        self.slots.close()

    @override
    def __repr__(self) -> str:
        return f"<Outbox {self.sent} writes sent, {len(self._unsettled)} unsettled>"

    # -- inside -------------------------------------------------------------------------------

    def _announce(self, server: int) -> None:
        """Tells a server on this host about memory it has not mapped yet."""
        link = self._links[server]
        refs = self.slots.refs()
        if self.sharing[server] is Sharing.HEAP:
            refs = self.slots.heap_refs + refs
        if refs != link.announced:
            link.request(messages.OpenSegments(segments=refs))
            link.announced = refs

    def _pieces(self, server: int, part: ServerPart) -> Sequence[ServerPart | Piece]:
        """What is sent to a server that shares no memory, in one message or, if it is large, several.

        A closure that is to count once may be repeated by a worker of the other kind: it is cut in the
        same places if memory is shared.
        """
        link = self._links[server]
        apart = part.sharing is not Sharing.NOTHING
        size = size_of_operations(part.operations) if apart else size_of(part.buffers)
        if size <= link.frame_bytes:
            return (part,)
        try:
            return split(part.operations, part.buffers, link.frame_bytes)
        except TooLargeError as error:
            name = link.names.get(error.variable, f"number {error.variable}")
            raise ValueError(
                f"one step writes {error.size} bytes of variable {name!r} to {link.task} over the "
                f"connection, which takes at most {link.frame_bytes} at once. Use a "
                "variable_partitioner that cuts large variables, or set STRATAGEM_FRAME_BYTES for the "
                "servers."
            ) from None

    def _take_reply(
        self, write: _Write, versions: dict[tuple[int, int], int], timeout_s: float | None
    ) -> None:
        server = write.server
        reply = self._links[server].collect(write.pending, timeout_s=timeout_s).message
        if not isinstance(reply, messages.Written):
            raise ProtocolError(f"a write was answered by {type(reply).__name__}")
        if reply.duplicate:
            self._note_duplicate(write.pending)
        for variable, version in reply.versions.items():
            versions[server, variable] = version

    def _interrupted(self) -> None:
        """Ctrl-C while writes were sent or awaited: they stay unsettled, and are repeated.

        Else their slots would be filled anew while a server still reads them. Servers recognise
        the writes they have applied.
        """
        for index, link in enumerate(self._links):
            link.interrupted([one.pending for one in self._unsettled if one.server == index])

    def _note_duplicate(self, pending: Pending) -> None:
        """A write the server has applied before: expected of repeated ones only."""
        self.duplicates += 1
        origin = pending.message.origin if isinstance(pending.message, messages.Write) else None
        if not pending.was_repeated and (origin is None or origin.closure is None):
            raise ProtocolError(
                f"a first write of {self._writer!r}, life {self._incarnation}, was taken for a "
                f"repeated one: another client writes under the same name. Give every life of a "
                f"task its own incarnation, and one PsClient."
            )
