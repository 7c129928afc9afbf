"""Frames over one non-blocking socket: a queue of bytes to send, and a parser of received bytes.

The lowest layer with a socket. `channel.py` adds requests, replies, threads and deadlines.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import final

from typing_extensions import override

from stratagem import config
from stratagem._wire import frames, messages
from stratagem._wire.frames import Buffer, FrameParser, Limits
from stratagem._wire.messages import Frame, Message
from stratagem._wire.tls import TlsSocket
from stratagem.errors import ConnectionLost, WireError

_IOV_LIMIT = 512
"""Buffers in one sendmsg; the kernel takes 1024."""

WAKE_BYTES = 1 << 18
"""While twice as many bytes of a frame are missing, the kernel wakes the reader for so many at a time, not for each
packet: every time costs tens of microseconds on both sides. TLS holds back less than the other half."""


_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_hooks_installed: list[bool] = []


def close_in_children(sock: socket.socket) -> None:
    """Close the copies of this socket that processes forked from this one get.

    A connection ends when its last copy is closed. Without this, a child (of a DataLoader, say) that outlives
    this process would keep its sessions open.
    """
    if not _hooks_installed:
        _hooks_installed.append(True)
        os.register_at_fork(after_in_child=_close_inherited)
    _open_sockets.add(sock)


def _close_inherited() -> None:
    for sock in list(_open_sockets):
        sock.close()  # closes the child's descriptor only; the connection goes on


def prepare(sock: socket.socket) -> None:
    """Set the options of a connection: no delay, never block, detect a peer that is gone."""
    sock.setblocking(False)
    close_in_children(sock)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that is gone sends no FIN. The kernel probes in times of silence, and ends the connection when
        # neither probes nor data have been acknowledged for the limit.
        limit_s = config.partition_limit_s()
        pause_s = max(1, min(5, int(limit_s / 4)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
        sock.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(limit_s / pause_s) - 1)
        )
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))


def wait_for(sock: socket.socket, events: int, deadline: float) -> bool:
    """Wait until the socket is ready; False when the deadline (monotonic seconds) has passed."""
    poll = select.poll()
    poll.register(sock, events)
    left = deadline - time.monotonic()
    return bool(poll.poll(max(0.0, left) * 1000.0))


def _nothing() -> int:
    return 0


@final
class FrameStream:
    """One connected socket, as frames. At most one thread may send and one receive at a time."""

    def __init__(self, sock: socket.socket, *, peer: str, limits: Limits | None = None) -> None:
        prepare(sock)
        self.sock = sock
        self.peer = peer
        self._send_pieces: Callable[[Iterable[Buffer]], int] = sock.sendmsg
        self._decrypted = _nothing  # bytes that no poll reports
        if isinstance(sock, TlsSocket):
            self._send_pieces, self._decrypted = sock.send_pieces, sock.pending
        self.outgoing: deque[Buffer] = deque()
        self.outgoing_bytes = 0
        self.parser = FrameParser(limits)
        self._wake_bytes = 1

    def append(self, kind: int, call: int, message: Message, buffers: Sequence[Buffer]) -> None:
        """Queue a frame; its buffers must not change until they are sent."""
        pieces = frames.encode_frame(kind, call, messages.encode(message), buffers)
        if not buffers:
            self.outgoing.append(pieces[0])
            self.outgoing_bytes += len(pieces[0])
            return
        for piece in pieces:
            self.append_bytes(piece)

    def append_bytes(self, piece: Buffer) -> None:
        """Queue bytes as they are."""
        view = memoryview(piece)
        if view.ndim != 1 or view.format != "B":
            view = view.cast("B")
        self.outgoing.append(view)
        self.outgoing_bytes += view.nbytes

    def send_some(self) -> bool:
        """Send once from the queue; False if the socket takes nothing now. ConnectionLost if the peer is gone."""
        pieces = self.outgoing
        try:
            if len(pieces) == 1:
                sent = self.sock.send(pieces[0])
            else:
                few = pieces if len(pieces) <= _IOV_LIMIT else list(pieces)[:_IOV_LIMIT]
                sent = self._send_pieces(few)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise ConnectionLost(f"the connection to {self.peer} broke: {error}") from error
        self.outgoing_bytes -= sent
        if self.outgoing_bytes == 0:
            pieces.clear()
            return True
        while sent:
            first = memoryview(pieces[0])
            if sent < first.nbytes:
                pieces[0] = first[sent:]
                break
            sent -= first.nbytes
            pieces.popleft()
        return True

    def keep_unsent(self) -> None:
        """Copy the queue, so that callers may change the buffers they gave."""
        if self.outgoing:
            self.outgoing = deque(bytes(piece) for piece in self.outgoing)

    def receive(self) -> list[Frame]:
        """Return the complete frames that have arrived, without waiting.

        Stop at the first read that completes a frame, so that other connections of the thread have their turn.

        Raises:
            ConnectionLost: the peer closed, or is gone.
            ProtocolError: the bytes are not our protocol.
            WireError: no memory is left for the message.
        """
        found: list[Frame] = []
        full = False
        try:
            while not found or (full and self._decrypted()):
                space = self.parser.space()
                count = self._read_into(space)
                if count < 0:
                    break
                full = count == len(space)
                self.parser.advance(count)
                while (frame := self.parser.next_frame()) is not None:
                    if not frame.places:
                        frame.message = messages.decode(frame.data)
                    found.append(frame)
                if not full:
                    break
        except MemoryError as error:  # the rest of the stream could not be parsed
            raise WireError(f"no memory is left to receive a message of {self.peer}") from error
        wake_bytes = WAKE_BYTES if self.parser.missing >= 2 * WAKE_BYTES else 1
        if wake_bytes != self._wake_bytes:
            self._wake_bytes = wake_bytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
        return found

    @override
    def __repr__(self) -> str:
        return f"<FrameStream to {self.peer}, {self.outgoing_bytes} bytes queued>"

    def _read_into(self, space: memoryview) -> int:
        """Return the number of bytes read; -1 if there are none now."""
        try:
            count = self.sock.recv_into(space)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError as error:
            raise ConnectionLost(f"the connection to {self.peer} broke: {error}") from error
        if count == 0:
            how = "" if self.parser.is_between_frames else " in the middle of a message"
            raise ConnectionLost(f"{self.peer} closed the connection{how}")
        return count
