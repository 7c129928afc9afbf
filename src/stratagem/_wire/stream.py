"""Frames over one socket that never blocks: bytes out of a line, frames out of bytes.

The lowest layer that touches a socket. `channel.py` puts requests, replies, threads and deadlines on top of it;
`listener.py` and `channel.py` make the sockets.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import final

from typing_extensions import override

from stratagem import config
from stratagem._wire import frames, messages
from stratagem._wire.frames import Buffer, FrameParser, Limits
from stratagem._wire.messages import Frame, Message
from stratagem.errors import ConnectionLost, WireError

_IOV_LIMIT = 512
"""Pieces given to one sendmsg; the kernel takes 1024."""


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
    """Options of every connection: no delay, never block, notice a peer that vanished."""
    sock.setblocking(False)
    close_in_children(sock)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer whose machine is gone sends no FIN. The kernel asks it in quiet times, and ends the
        # connection when neither questions nor data have been acknowledged for the limit.
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
    """Waits until the socket is ready; False when the deadline (monotonic seconds) passed."""
    poll = select.poll()
    poll.register(sock, events)
    left = deadline - time.monotonic()
    return bool(poll.poll(max(0.0, left) * 1000.0))


@final
class FrameStream:
    """One connected socket, as frames. Callers take care that one thread sends and one receives.

    Example:
        >>> import socket
        >>> from stratagem._wire.frames import NOTIFY
        >>> from stratagem._wire.messages import Ping
        >>> from stratagem._wire.stream import FrameStream
        >>> one, other = (FrameStream(end, peer="me") for end in socket.socketpair())
        >>> one.append(NOTIFY, 0, Ping(), ())
        >>> one.send_some(), one.outgoing_bytes
        (True, 0)
        >>> [frame.message for frame in other.receive()]
        [Ping()]
        >>> one.sock.close(), other.sock.close()
        (None, None)
    """

    def __init__(self, sock: socket.socket, *, peer: str, limits: Limits | None = None) -> None:
        prepare(sock)
        self.sock = sock
        self.peer = peer
        self.outgoing: deque[Buffer] = deque()
        self.outgoing_bytes = 0
        self._parser = FrameParser(limits)

    def append(self, kind: int, call: int, message: Message, buffers: Sequence[Buffer]) -> None:
        """Puts a frame in line; its buffers must not change until they are sent."""
        pieces = frames.encode_frame(kind, call, messages.encode(message), buffers)
        if not buffers:
            self.outgoing.append(pieces[0])
            self.outgoing_bytes += len(pieces[0])
            return
        for piece in pieces:
            self.append_bytes(piece)

    def append_bytes(self, piece: Buffer) -> None:
        """Puts bytes in line as they are."""
        view = memoryview(piece)
        if view.ndim != 1 or view.format != "B":
            view = view.cast("B")
        self.outgoing.append(view)
        self.outgoing_bytes += view.nbytes

    def send_some(self) -> bool:
        """One send of what is in line; False when the socket takes nothing now.

        Raises:
            ConnectionLost: the other side is gone.
        """
        pieces = self.outgoing
        try:
            if len(pieces) == 1:
                sent = self.sock.send(pieces[0])
            else:
                few = pieces if len(pieces) <= _IOV_LIMIT else list(pieces)[:_IOV_LIMIT]
                sent = self.sock.sendmsg(few)
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
        """Copies what is in line, so that the caller may change the buffers it gave."""
        if self.outgoing:
            self.outgoing = deque(bytes(piece) for piece in self.outgoing)

    def receive(self) -> list[Frame]:
        """Frames that are there now; empty if none is complete. Never waits.

        Stops at the first read that completes a frame: an end behind it is noticed next time, and
        other connections of the same thread have their turn.

        Raises:
            ConnectionLost: the other side closed, or is gone.
            ProtocolError: what it sends is not our protocol.
            WireError: no memory is left to take in what it sends.
        """
        found: list[Frame] = []
        try:
            while not found:
                space = self._parser.space()
                count = self._read_into(space)
                if count < 0:
                    break
                full = count == len(space)
                self._parser.advance(count)
                while (raw := self._parser.next_frame()) is not None:
                    found.append(messages.decode_frame(raw))
                if not full:
                    break
        except MemoryError as error:  # half taken in: nothing that follows could be understood
            raise WireError(f"no memory is left to take in a message of {self.peer}") from error
        return found

    @override
    def __repr__(self) -> str:
        return f"<FrameStream to {self.peer}, {self.outgoing_bytes} bytes in line>"

    def _read_into(self, space: memoryview) -> int:
        """Bytes read; -1 when none are there now."""
        try:
            count = self.sock.recv_into(space)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError as error:
            raise ConnectionLost(f"the connection to {self.peer} broke: {error}") from error
        if count == 0:
            how = "" if self._parser.is_between_frames else " in the middle of a message"
            raise ConnectionLost(f"{self.peer} closed the connection{how}")
        return count
