"""The thread of a parameter server that accepts connections and answers pings.

It is a thread of its own, so that connections are accepted and pings are answered while the working thread is in a
long optimizer step. It hands data connections to the working thread (`loop.py`) and keeps control connections.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

from stratagem import config
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.failures import failure_from
from stratagem._wire.listener import Listener
from stratagem._wire.messages import Frame
from stratagem.errors import ConnectionLost, ProtocolError, WireError

if TYPE_CHECKING:
    from stratagem._ps.server.loop import ParameterServer

_log = logging.getLogger("stratagem.ps")

TICK_S: Final = 0.5
"""How often connections without a Hello are checked."""

_UNREAD_BYTES: Final = 1 << 20
"""Replies that a control connection may leave unread."""


@final
class Acceptor:
    """Accepts connections, reads their Hellos and answers control connections, in a thread of its own."""

    def __init__(self, server: ParameterServer, listener: Listener) -> None:
        self._server = server
        self._listener = listener
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._silent: dict[int, tuple[Channel, float]] = {}  # no Hello yet; since when
        self._control: dict[int, Channel] = {}
        self._hello_limit_s = config.partition_limit_s()  # after the proof of the key
        self._stopping = False
        self.thread = threading.Thread(
            target=self._run, name=f"stratagem-ps-accept-{listener.address}", daemon=True
        )

    def stop(self) -> None:
        """End the thread, wait for it, and close everything it has."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self.thread.is_alive():
            self.thread.join(10.0)
        for channel in [*self._control.values(), *(one for one, _ in self._silent.values())]:
            channel.close()
        self._control.clear()
        self._silent.clear()
        self._listener.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            ready = self._poll.poll(TICK_S * 1000.0)
            for channel in self._listener.progress():
                self._silent[channel.fileno()] = (channel, time.monotonic())
                self._poll.register(channel, select.POLLIN)
            for fd, _ in ready:
                if fd in self._control:
                    self._serve(fd, self._control[fd])
                elif fd in self._silent:
                    self._greet(fd, self._silent[fd][0])
            now = time.monotonic()
            for fd, (channel, since) in list(self._silent.items()):
                if now - since > self._hello_limit_s:
                    self._drop(fd, channel, f"said nothing for {self._hello_limit_s:g} s")

    def _greet(self, fd: int, channel: Channel) -> None:
        try:
            frames = channel.receive_ready()
            if not frames:
                return
            hello = frames[0].message
            if not isinstance(hello, messages.Hello):
                self._introduce(channel, frames[0])
                raise ProtocolError(f"began with {type(hello).__name__}, expected Hello")
            if hello.purpose not in ("data", "control"):
                raise ProtocolError(f"came for {hello.purpose!r}, expected 'data' or 'control'")
            channel.enqueue_reply(frames[0], self._server.welcome())
            channel.flush()
        except (WireError, MemoryError) as error:
            self._drop(fd, channel, _reason(error))
            return
        del self._silent[fd]
        if hello.purpose == "data":
            self._poll.unregister(fd)
            self._server.take_over(channel, hello.task, frames[1:])
        else:
            self._control[fd] = channel
            self._answer(fd, channel, frames[1:])

    def _introduce(self, channel: Channel, frame: Frame) -> None:
        """Tell a peer that expects another kind of task what this is, as far as the connection takes it."""
        task = self._server.task
        error = ProtocolError(
            f"this is {task}, a parameter server, which does not know {type(frame.message).__name__}: "
            f"give every task the same cluster specification"
        )
        channel.enqueue_reply(frame, failure_from(error, task=task, with_traceback=False))
        channel.flush()

    def _serve(self, fd: int, channel: Channel) -> None:
        try:
            frames = channel.receive_ready()
        except (WireError, MemoryError) as error:
            self._drop(fd, channel, _reason(error), quiet=isinstance(error, ConnectionLost))
            return
        self._answer(fd, channel, frames)

    def _answer(self, fd: int, channel: Channel, frames: Sequence[Frame]) -> None:
        try:
            for frame in frames:
                if isinstance(frame.message, messages.Ping):
                    channel.enqueue_reply(frame, self._server.pong())
                elif isinstance(frame.message, messages.AskStats):
                    channel.enqueue_reply(frame, messages.Stats(facts=self._server.facts))
                else:
                    name = type(frame.message).__name__
                    raise ProtocolError(f"sent {name} on a control connection")
            # A control client reads its small replies at once; one that does not is dropped.
            if not channel.flush() and channel.outgoing_bytes > _UNREAD_BYTES:
                raise ProtocolError("does not read its replies")
        except (WireError, MemoryError) as error:
            self._drop(fd, channel, _reason(error))

    def _drop(self, fd: int, channel: Channel, reason: str, *, quiet: bool = False) -> None:
        self._poll.unregister(fd)
        self._silent.pop(fd, None)
        self._control.pop(fd, None)
        level = logging.DEBUG if quiet else logging.WARNING
        _log.log(level, "%s dropped %s: %s", self._server.task, channel.peer, reason)
        channel.close()


def _reason(error: Exception) -> str:
    return str(error) or "no memory is left to serve it"
