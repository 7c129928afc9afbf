"""Connections between two processes: requests and replies, notifications, deadlines.

A channel sends and receives messages (`messages.py`) with buffers beside them; it does not interpret them. All processes
communicate through channels. Two ways to use one, not to be mixed on one channel:

- *Calling* (clients): `request`, or `begin` … `collect` for several outstanding requests, `notify`, `receive`.
  Any thread may call.
- *Serving* (event loops): `fileno` in a selector, `receive_ready` when readable, `enqueue` and
  `flush`, `wants_write`. One thread at a time.

Sockets (`stream.py`) never block; every wait is a poll with a deadline.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

from typing_extensions import override

from stratagem import config
from stratagem._owner import Owner
from stratagem._wire import frames, messages
from stratagem._wire.failures import exception_from
from stratagem._wire.frames import Buffer, Limits, Place
from stratagem._wire.messages import Frame, Message
from stratagem._wire.round_trip import RoundTrip
from stratagem._wire.stream import FrameStream, wait_for
from stratagem.errors import ConnectionLost, DeadlineExceeded, WireError

_POLL_SLICE_S = 0.5
"""Longest sleep of a caller while another thread reads replies."""

_NO_CALL = 0
"""Number of no call: requests are counted from 1."""

_TCP_INFO = struct.Struct("=2xB21xI28xI")
"""tcpi_retransmits, tcpi_unacked and tcpi_last_ack_recv (ms) of the kernel's struct tcp_info."""


@final
class Channel(Owner):
    """One authenticated connection."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: str,
        limits: Limits | None = None,
        may_unpickle: bool = False,
        round_trip: RoundTrip | None = None,
    ) -> None:
        """Use a connected, authenticated socket.

        Args:
            sock: owned by the channel from now on.
            peer: name of the peer in errors and logs.
            limits: size limits of received frames.
            may_unpickle: whether to unpickle exceptions: only from peers that may run code here.
            round_trip: measured in the handshake; unknown by default.
        """
        self.peer = peer
        self.round_trip = RoundTrip() if round_trip is None else round_trip
        self._stream = FrameStream(sock, peer=peer, limits=limits)
        self._may_unpickle = may_unpickle
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()  # protects everything below
        self._arrival = threading.Condition(self._lock)
        self._sleepers = 0
        self._has_reader = False
        self._next_call = 0
        self._awaited: set[int] = set()
        self._replies: dict[int, Frame] = {}
        self._inbox: deque[Frame] = deque()
        self._lost: Exception | None = None
        self._closed = False
        self._heard_at = time.monotonic()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    # -- calling ------------------------------------------------------------------------------

    def request(
        self, message: Message, buffers: Sequence[Buffer] = (), *, timeout_s: float | None = None
    ) -> Frame:
        """Send a request and return its reply.

        Raises:
            DeadlineExceeded: no reply within `timeout_s` (default: `config.wire_timeout_s()`).
            ConnectionLost: the peer is gone.
            Exception: the peer's exception, with its traceback as cause.
        """
        timeout_s = config.wire_timeout_s() if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        return self.collect(self.begin(message, buffers, timeout_s=timeout_s), deadline=deadline)

    def begin(
        self,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float | None = None,
        later: bool = False,
        place: Place | None = None,
    ) -> int:
        """Send a request without waiting for its reply; return the number to `collect` it by.

        With `later` it is queued: the next message, `collect` or `flush` sends it. `place` says where large buffers of
        the reply are received; it is called by the thread that reads.
        """
        with self._lock:
            self._next_call = self._next_call % 0xFFFFFFFF + 1
            call = self._next_call
            self._awaited.add(call)
            if place is not None:
                self._stream.parser.places[call] = place
        try:
            if later:
                self.enqueue(frames.REQUEST, call, message, buffers)
            else:
                self._send(frames.REQUEST, call, message, buffers, timeout_s)
        except BaseException:  # Ctrl-C too: there is no caller to collect it
            with self._lock:
                self._forget(call)
            raise
        return call

    def collect(
        self, call: int, *, timeout_s: float | None = None, deadline: float | None = None
    ) -> Frame:
        """Return the reply to one `begin`; errors as `request`."""
        if deadline is None:
            timeout_s = config.wire_timeout_s() if timeout_s is None else timeout_s
            deadline = time.monotonic() + timeout_s
        try:
            if self._stream.outgoing:
                with self._send_lock:
                    self._drain(max(0.0, deadline - time.monotonic()))
            frame = self._await(call, deadline)
        except BaseException:  # Ctrl-C too
            with self._lock:
                self._forget(call)
            raise
        if frame is None:
            with self._lock:
                self._forget(call)
            raise DeadlineExceeded(
                f"{self.peer} did not reply within the limit: it is overloaded, hangs, or is unreachable"
            )
        if frame.kind == frames.FAILURE:
            raise exception_from(frame.message, may_unpickle=self._may_unpickle)
        return frame

    def has_reply(self, call: int) -> bool:
        """Return whether the reply has arrived, so that `collect` does not wait."""
        with self._lock:
            if call in self._replies:
                return True
            if self._lost is not None or self._closed or self._has_reader:
                return False  # the thread that reads will receive it
            self._has_reader = True
        found: Sequence[Frame] = ()
        try:
            if self._readable.poll(0):
                found = self._receive_arrived()
        finally:
            self._end_reading(found)
        return call in self._replies

    def notify(
        self, message: Message, buffers: Sequence[Buffer] = (), *, timeout_s: float | None = None
    ) -> None:
        """Send a message that has no reply."""
        self._send(frames.NOTIFY, 0, message, buffers, timeout_s)

    def notify_all(self, batch: Iterable[tuple[Message, Sequence[Buffer]]]) -> None:
        """Send several messages that have no reply, with few system calls."""
        with self._send_lock:
            for message, buffers in batch:
                self._stream.append(frames.NOTIFY, 0, message, buffers)
            self._drain(None)

    def try_notify(self, message: Message) -> bool:
        """Send a message without waiting; False if another thread sends, or the socket takes nothing.

        Raises:
            ConnectionLost: the peer is gone.
        """
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            while self._stream.outgoing:
                if not self._send_some():
                    return False
            self._stream.append(frames.NOTIFY, 0, message, ())
            while self._stream.outgoing and self._send_some():
                pass  # the rest is sent before the next message
        finally:
            self._send_lock.release()
        return True

    def silent_s(self) -> float:
        """Return the seconds since the peer was heard; 0 if received bytes wait to be read."""
        try:
            waiting = wait_for(self._stream.sock, select.POLLIN, 0.0)
        except (OSError, ValueError):  # closed meanwhile
            waiting = False
        return 0.0 if waiting else time.monotonic() - self._heard_at

    def cut_off_s(self) -> float:
        """Return the seconds since the peer's kernel has acknowledged unacknowledged bytes.

        The kernel acknowledges also for a process that reads nothing.
        """
        try:
            facts = self._stream.sock.getsockopt(
                socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size
            )
            repeated, unacknowledged, last_ms = _TCP_INFO.unpack(facts)
        except (OSError, struct.error):  # closed meanwhile, or not TCP
            return 0.0
        # Bytes sent just now are unacknowledged too: only retransmitted ones count.
        return last_ms / 1000.0 if unacknowledged and repeated else 0.0

    def reply(
        self,
        frame: Frame,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Answer a request received by `receive`; do nothing for a notification."""
        if frame.kind == frames.REQUEST:
            failed = isinstance(message, messages.RemoteFailure)
            kind = frames.FAILURE if failed else frames.REPLY
            self._send(kind, frame.call, message, buffers, timeout_s)

    def receive(self, *, timeout_s: float) -> Frame | None:
        """Return the next request or notification of the peer; None if none came within the limit.

        Raises:
            ConnectionLost: the peer is gone.
        """
        return self._await(_NO_CALL, time.monotonic() + timeout_s)

    def receive_some(self, *, timeout_s: float, most: int) -> list[Frame]:
        """Wait for a request or notification; return it and those that came with it, at most so many.

        Raises:
            ConnectionLost: the peer is gone.
        """
        first = self.receive(timeout_s=timeout_s)
        if first is None:
            return []
        found = [first]
        with self._lock:
            while self._inbox and len(found) < most:
                found.append(self._inbox.popleft())
        return found

    # -- serving ------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the descriptor for selectors."""
        return self._stream.sock.fileno()

    def receive_ready(self) -> list[Frame]:
        """Return the complete frames that have arrived; errors as `FrameStream.receive`."""
        return self._stream.receive()

    def enqueue(
        self, kind: int, call: int, message: Message, buffers: Sequence[Buffer] = ()
    ) -> None:
        """Queue a frame; `flush` sends. The buffers must not change until they are sent."""
        with self._send_lock:
            self._stream.append(kind, call, message, buffers)

    def enqueue_reply(self, frame: Frame, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue the answer to a request; do nothing for a notification."""
        if frame.kind == frames.REQUEST:
            failed = isinstance(message, messages.RemoteFailure)
            self.enqueue(frames.FAILURE if failed else frames.REPLY, frame.call, message, buffers)

    def flush(self) -> bool:
        """Send what the socket takes now; return whether nothing is left. ConnectionLost if the peer is gone."""
        with self._send_lock:
            while self._stream.outgoing:
                if not self._send_some():
                    return False
            return True

    def keep_unsent(self) -> None:
        """Copy the queue, so that callers may change the buffers they gave."""
        with self._send_lock:
            self._stream.keep_unsent()

    @property
    def wants_write(self) -> bool:
        """True if bytes are queued."""
        return bool(self._stream.outgoing)

    @property
    def outgoing_bytes(self) -> int:
        """Number of queued bytes."""
        return self._stream.outgoing_bytes

    # -- end ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """False once closed, or once the loss of the peer was noticed."""
        return not self._closed and self._lost is None

    @override
    def close(self) -> None:
        """End the connection; the peer notices at once. May be called again, from any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            has_reader = self._has_reader
            self._arrival.notify_all()
        try:
            self._stream.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that polls this socket
        except OSError:
            pass  # the peer is gone already
        if not has_reader:
            self._stream.sock.close()

    def abandon(self) -> None:
        """Close after an interruption in a reader, which may have kept the reader's flag set."""
        self.close()
        self._stream.sock.close()

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else "lost" if self._lost else "open"
        return (
            f"<Channel to {self.peer} {state}, {len(self._awaited)} awaited, "
            f"{self._stream.outgoing_bytes} bytes queued>"
        )

    # -- inside -------------------------------------------------------------------------------

    def _await(self, call: int, deadline: float) -> Frame | None:
        """Wait for the reply to a call, or for the next frame that is no reply; None if it is late.

        One waiting thread reads for all, the others sleep.
        """
        while True:
            with self._lock:
                while True:
                    if call == _NO_CALL:
                        if self._inbox:
                            return self._inbox.popleft()
                    elif call in self._replies:
                        frame = self._replies[call]
                        self._forget(call)
                        return frame
                    if self._lost is not None:
                        raise self._lost_error()
                    if self._closed:
                        raise ConnectionLost(f"the channel to {self.peer} is closed")
                    left = deadline - time.monotonic()
                    if not self._has_reader:
                        break
                    if left <= 0:
                        return None
                    self._sleepers += 1
                    self._arrival.wait(min(left, _POLL_SLICE_S))
                    self._sleepers -= 1
                self._has_reader = True
            found: Sequence[Frame] = ()
            try:
                if not self._readable.poll(left * 1000.0 if left > 0 else 0):
                    return None  # the deadline passed; no other thread has read meanwhile
                found = self._receive_arrived()
            finally:
                self._end_reading(found)

    def _forget(self, call: int) -> None:
        self._replies.pop(call, None)
        self._awaited.discard(call)
        self._stream.parser.places.pop(call, None)

    def _end_reading(self, found: Sequence[Frame]) -> None:
        """Pass on what was received, and let another thread read."""
        with self._lock:
            for frame in found:
                if frame.kind in (frames.REPLY, frames.FAILURE):
                    if frame.call in self._awaited:  # else its caller has given up
                        self._replies[frame.call] = frame
                else:
                    self._inbox.append(frame)
            self._has_reader = False
            if self._sleepers:
                self._arrival.notify_all()
            if self._closed:  # close() left the socket to the reader
                self._stream.sock.close()

    def _receive_arrived(self) -> Sequence[Frame]:
        """Return the frames that have arrived; the caller is the only reader, and calls `_end_reading`."""
        try:
            found = self._stream.receive()
        except WireError as error:
            self._lost = error
            return ()
        self._heard_at = time.monotonic()
        return found

    def _lost_error(self) -> Exception:
        assert self._lost is not None
        return type(self._lost)(*self._lost.args)

    def _send(
        self,
        kind: int,
        call: int,
        message: Message,
        buffers: Sequence[Buffer],
        timeout_s: float | None,
    ) -> None:
        with self._send_lock:
            self._stream.append(kind, call, message, buffers)
            self._drain(timeout_s)

    def _drain(self, timeout_s: float | None) -> None:
        """Send the queue. Read meanwhile, so that two peers that send to each other do not block."""
        deadline = None
        while self._stream.outgoing:
            if self._send_some():
                continue
            if deadline is None:
                timeout_s = config.wire_timeout_s() if timeout_s is None else timeout_s
                deadline = time.monotonic() + timeout_s
            self._wait_to_send(deadline, timeout_s or 0.0)

    def _wait_to_send(self, deadline: float, timeout_s: float) -> None:
        with self._lock:
            reads = not self._has_reader
            if reads:
                self._has_reader = True
        found: Sequence[Frame] = ()
        try:
            events = select.POLLOUT | (select.POLLIN if reads else 0)
            ready = wait_for(self._stream.sock, events, deadline)
            if ready and reads:
                found = self._receive_arrived()
        finally:
            if reads:
                self._end_reading(found)
        if self._lost is not None:
            raise self._lost_error()
        if not ready:
            # Half a frame may have been sent: no other frame can follow it.
            self._lost = ConnectionLost(
                f"{self.peer} took no more bytes for {timeout_s:g} s, in the middle of a message"
            )
            raise DeadlineExceeded(str(self._lost))

    def _send_some(self) -> bool:
        """Send once; False if the socket takes nothing now."""
        if self._lost is not None:
            raise self._lost_error()
        if self._closed:
            raise ConnectionLost(f"the channel to {self.peer} is closed")
        try:
            return self._stream.send_some()
        except ConnectionLost as error:
            self._lost = error
            raise
