"""Questions that parameter servers answer at any time, on connections of their own.

Pings and statistics go to the servers' door threads, which answer while the work thread is in a long step, and never wait
behind the requests of `client.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from typing_extensions import override

from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.messages import Message
from stratagem.errors import ConnectionLost, DeadlineExceeded, ParameterServerLost


@final
class ControlConnections:
    """One control connection per server, made when first needed. Safe for several threads.

    Example:
        >>> from stratagem._ps.control import ControlConnections
        >>> from stratagem._ps.server import ParameterServer
        >>> with ParameterServer("127.0.0.1:0").start() as server:
        ...     control = ControlConnections([("/job:ps/task:0", server.address)], key=None)
        ...     control.ping(0, timeout_s=5.0).busy_s
        ...     control.close()
        0.0
    """

    def __init__(
        self,
        servers: Sequence[tuple[str, str]],
        *,
        key: ClusterKey | None,
        lost: Sequence[Callable[[str], ParameterServerLost]] = (),
    ) -> None:
        """Connects to nobody yet.

        Args:
            servers: task and address of each.
            key: the cluster's key.
            lost: for each server, called with the reason when it does not answer; gives the error
                to raise, which knows the server's variables.
        """
        self._servers = tuple(servers)
        self._on_lost = tuple(lost)
        self._key = key
        self._channels: list[Channel | None] = [None] * len(servers)
        self._locks = [threading.Lock() for _ in servers]
        self._closed = False

    def ping(self, server: int, *, timeout_s: float) -> messages.Pong:
        """Asks whether a server lives.

        Raises:
            ParameterServerLost: it is gone, or does not answer in time.
        """
        reply = self._ask(server, messages.Ping(), timeout_s)
        assert isinstance(reply, messages.Pong)
        return reply

    def stats(self, server: int, *, timeout_s: float) -> dict[str, object]:
        """Numbers about a server, at most half a second old."""
        reply = self._ask(server, messages.AskStats(), timeout_s)
        assert isinstance(reply, messages.Stats)
        return dict(reply.facts)

    def close(self) -> None:
        """Hangs up; who asks now or later is told so. Repeatable."""
        self._closed = True
        for channel in self._channels:
            if channel is not None:
                channel.close()

    @override
    def __repr__(self) -> str:
        count = sum(channel is not None and channel.is_open for channel in self._channels)
        return f"<ControlConnections {count} of {len(self._servers)} open>"

    def _ask(self, server: int, message: Message, timeout_s: float) -> Message:
        task, address = self._servers[server]
        deadline = time.monotonic() + timeout_s
        with self._locks[server]:
            try:
                channel = self._channel(server, deadline)
                return channel.request(message, timeout_s=_left(deadline)).message
            except (ConnectionLost, DeadlineExceeded) as error:
                stale = self._channels[server]
                if stale is not None:
                    stale.close()
                # Two things that people look for in different places: a process that hangs, or a
                # machine that is cut off; and a process that is not there.
                silent = isinstance(error, DeadlineExceeded)
                what = f"did not answer within {timeout_s:g} s" if silent else "is gone"
                what = f"{what}: {error}"
                if self._on_lost:
                    raise self._on_lost[server](what) from error
                raise ParameterServerLost(
                    f"parameter server {task} at {address!r} {what}. Start it again, create the "
                    f"strategy anew and restore the last checkpoint.",
                    task=task,
                ) from error

    def _channel(self, server: int, deadline: float) -> Channel:
        channel = self._channels[server]
        if channel is not None and channel.is_open:
            return channel
        task, address = self._servers[server]
        channel = connect(address, key=self._key, peer=task, timeout_s=_left(deadline))
        self._channels[server] = channel
        if self._closed:  # by another thread, which may have looked before the channel was there
            channel.close()
            raise ConnectionLost(f"the connection to {task} was closed by this process")
        channel.request(messages.Hello(purpose="control"), timeout_s=_left(deadline))
        return channel


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
