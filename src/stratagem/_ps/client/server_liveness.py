"""Pings on separate connections, and the decision that a server is lost.

Servers answer these connections from a thread of their own, also while a long step runs, and independently
of the requests of `PsClient`. `LivenessCheck` (`_wire/process_probe.py`) judges the silence of a server that
does not answer; all servers are checked side by side, and nothing here waits for one of them alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Final, final

from typing_extensions import override

from stratagem._ps.client.server_connection import ServerConnection
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.process_probe import LivenessCheck
from stratagem._wire.round_trip import RoundTrip, answer_limit_s, attempt_limit_s
from stratagem.config import ClusterOptions
from stratagem.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ParameterServerLost,
    ProtocolError,
    WireError,
)

_log = logging.getLogger("stratagem.ps")

_CLOSE_S: Final = 1.0
"""How long `close` waits for an attempt to connect to end, which takes a tenth of that."""

_PAUSE_S: Final = 0.01
"""Between two checks of servers whose answers are awaited."""


class _ServerGone(ConnectionLost):
    """The process that held the variables has ended."""


@final
class ControlConnections:
    """One control connection per server, made when first needed. Thread-safe.

    Args:
        connections: for data, of the same client, by server. They know the servers' variables, and their waiting
            requests fail when a server does not answer here.
        key: the cluster's key.
    """

    def __init__(self, connections: Sequence[ServerConnection], *, key: ClusterKey | None) -> None:
        self._controls = [_Control(connection, key) for connection in connections]

    def introduce(self, server: int, welcome: messages.Welcome) -> None:
        """Note which process serves, so that a server that is silent from the start can be judged."""
        self._controls[server].recognise(welcome)

    def accept(self, server: int, welcome: messages.Welcome) -> None:
        """Watch another process from now on: it has the server's variables."""
        self._controls[server].accept(welcome)

    def check_all(self, options: ClusterOptions) -> None:
        """Check every server once: it answered the last ping, or its silence is judged.

        Call it again and again. Never waits for a server that is connected.

        Raises:
            ParameterServerLost: a server is gone, or has been silent for too long.
        """
        for control in self._controls:
            control.check(options, every_s=options.heartbeat_s)

    def unlinked(self, session: str) -> dict[int, int]:
        """Return the servers that said, in answer to the last ping, that their backup does not answer; and its view."""
        return {
            shard: view
            for control in self._controls
            for name, shard, view in control.unlinked
            if name == session
        }

    def answers_checks(self, server: int) -> bool:
        """Return whether a server has answered the last check, or still has time to. Never waits."""
        return self._controls[server].answers()

    def await_answers(self, options: ClusterOptions, *, of: Collection[int]) -> None:
        """Wait until each of these servers has answered or counts as lost, which is logged."""
        began = time.monotonic()
        waiting = {self._controls[server] for server in of}
        for control in waiting:
            control.waits_for_network = False
        while waiting:
            for control in list(waiting):
                try:
                    control.check(options, every_s=0.0)
                except ParameterServerLost as error:
                    _log.warning("%s", error)
                    waiting.discard(control)
                else:
                    if control.is_closed() or control.alive_at >= began:
                        waiting.discard(control)
            if waiting:
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Close all connections; later checks do nothing. May be called again."""
        for control in self._controls:
            control.close()

    @override
    def __repr__(self) -> str:
        count = sum(control.is_open for control in self._controls)
        return f"<ControlConnections {count} of {len(self._controls)} open>"


@final
class _Control:
    """The control connection to one server, made again when it breaks."""

    def __init__(self, data: ServerConnection, key: ClusterKey | None) -> None:
        self.alive_at = 0.0
        """When the server certainly lived: the last ping it answered was sent then."""
        self.unlinked: tuple[tuple[str, int, int], ...] = ()
        """Sessions, shards and views whose backup did not answer when it answered the last ping."""
        self.waits_for_network = True
        """False once the session ends: a server that cannot be reached is then lost after the heartbeat limit."""
        self._data = data
        self._key = key
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._liveness = LivenessCheck(data.task, log=_log)
        self._server = ""  # identity of the process that holds the variables
        self._ping: int | None = None  # the call that has not been answered
        # When a ping was sent, or a connection for one was begun. None: the last ping was answered.
        self._waits_since: float | None = None
        # Of pings. That of the handshake may have begun in an outage.
        self._pings = RoundTrip()
        self._answer_limit_s = answer_limit_s()  # until a ping was answered
        self._connector: threading.Thread | None = None  # connects while checks go on
        self._connect_error: WireError | None = None  # of the last attempt of the connector
        self._lost_because = ""
        self._closed = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._channel is not None and self._channel.is_open

    def is_closed(self) -> bool:
        return self._closed.is_set()

    def recognise(self, welcome: messages.Welcome) -> None:
        """Note which process serves; refuse another one later."""
        if self._server not in ("", welcome.life):
            raise _ServerGone(f"{self._data.task} was restarted and has lost its variables")
        if not self._server:
            self._server = welcome.life
            self._liveness = LivenessCheck(self._data.task, welcome.process, log=_log)

    def accept(self, welcome: messages.Welcome) -> None:
        """Watch another process from now on."""
        with self._lock:
            self._disconnect()
            self._server, self.unlinked = "", ()
            self.recognise(welcome)
            self._lost_because, self._waits_since, self._connect_error = "", None, None

    def answers(self) -> bool:
        """Return whether the last ping was answered, or still has time. False while no connection is open."""
        if self._waits_since is None:
            return True
        if self._ping is None:
            return False  # nothing shows that this process reaches the server
        return time.monotonic() - self._waits_since < self._answer_limit_s

    def check(self, options: ClusterOptions, *, every_s: float) -> None:
        """Take in the answer to the last ping, or judge its absence; ping again when it is time."""
        if self.is_closed() or not self._lock.acquire(blocking=False):
            return  # closed, or another thread checks
        try:
            now = time.monotonic()
            if not self._lost_because:
                self._check(options, every_s, now)
            elif (
                now - (self._waits_since or 0.0) >= every_s
            ):  # it stays lost: say so at every heartbeat
                self._waits_since = now
                raise self._data.give_up(self._lost_because)
        except WireError as error:
            self._disconnect()
            if not self.is_closed():  # else the strategy was closed, and no server is lost by that
                raise self._lose(f"is gone: {error}") from error
        finally:
            self._lock.release()

    def _check(self, options: ClusterOptions, every_s: float, now: float) -> None:
        channel = self._channel
        # Without a ping there is no reply, but the end of the connection is noticed at once.
        if channel is not None and channel.is_open and channel.has_reply(self._ping or 0):
            self._take_answer(channel, options, every_s, now)
        if channel is None or not channel.is_open:
            if self._ping is not None or self._waits_since is None:  # the connection has just ended
                self._ping, self._waits_since = None, now  # a running server accepts a new one
            error, self._connect_error = self._connect_error, None
            if error is not None and _is_final(error):
                raise error
            self._connect_in_background(attempt_limit_s(options))
            self._judge(options, now)  # the silence is judged, not one attempt
        elif self._ping is not None:
            self._judge(options, now)
        elif self._waits_since is not None or now - self.alive_at >= every_s:
            try:
                self._ping = channel.begin(messages.Ping(), timeout_s=options.heartbeat_limit_s)
                self._waits_since = now
            except WireError:
                self._disconnect()  # the next check connects again

    def _take_answer(
        self, channel: Channel, options: ClusterOptions, every_s: float, now: float
    ) -> None:
        assert self._ping is not None
        assert self._waits_since is not None
        pong = channel.collect(self._ping, timeout_s=0.0).message
        self.unlinked = pong.unlinked if isinstance(pong, messages.Pong) else ()
        took_s = now - self._waits_since
        channel.round_trip.measured(took_s)
        # The answer came after the last check. One after the limit is an outage, not a round trip.
        least_s = max(0.0, took_s - every_s)
        if least_s <= self._answer_limit_s:
            self._pings.measured(least_s)
        self._answer_limit_s = self._pings.limit_s(2 * options.heartbeat_s)
        self.alive_at, self._ping, self._waits_since = self._waits_since, None, None

    def _connect_in_background(self, limit_s: float) -> None:
        """Start one attempt, unless one is under way: a check never waits."""
        if self._connector is None or not self._connector.is_alive():
            connector = threading.Thread(
                target=self._try_to_connect,
                args=(time.monotonic() + limit_s,),
                name=f"stratagem-connect-{self._data.task}",
                daemon=True,
            )
            connector.start()
            self._connector = connector  # only now: `close` in another thread may join it at once

    def _try_to_connect(self, deadline: float) -> None:
        server = self._server
        try:
            channel = self._connect(deadline)
        except WireError as error:
            if (
                server == self._server
            ):  # else the attempt was compared with a server that was replaced
                self._connect_error = error
            return
        with self._lock:
            if self.is_open or self.is_closed():
                channel.close()
            else:
                self._channel = channel

    def _judge(self, options: ClusterOptions, now: float) -> None:
        channel = self._channel
        silent_s, least_s = now - (self._waits_since or now), options.heartbeat_limit_s
        why = self._liveness.judge(
            silent_s,
            limit_s=least_s if channel is None else channel.round_trip.limit_s(least_s),
            running_limit_s=options.partition_limit_s,
            unreachable_limit_s=options.partition_limit_s if self.waits_for_network else 0.0,
            cut_off_s=lambda: 0.0 if channel is None else channel.cut_off_s(),
        )
        if why is not None:
            self._disconnect()
            raise self._lose(f"has not answered for {silent_s:.1f} s{why}")

    def _lose(self, reason: str) -> Exception:
        self._lost_because = reason
        return self._data.give_up(reason)

    def close(self) -> None:
        self._closed.set()  # ends the connector's attempt, too
        if self._channel is not None:
            self._channel.close()
        connector = self._connector
        if connector is not None and connector is not threading.current_thread():
            connector.join(_CLOSE_S)

    def _disconnect(self) -> None:
        self._ping = None
        if self._channel is not None:
            self._channel.close()

    def _connect(self, deadline: float) -> Channel:
        """Make a connection and check which process answers."""
        self._refuse_if_closed()
        channel = connect(
            self._data.find_address(),
            key=self._key,
            peer=self._data.task,
            timeout_s=_left(deadline),
            stopped=self._closed.is_set,
        )
        try:
            hello = messages.Hello(purpose="control")
            limit_s = channel.round_trip.limit_s(_left(deadline))
            welcome = channel.request(hello, timeout_s=limit_s).message
            if not isinstance(welcome, messages.Welcome):
                raise ProtocolError(f"{self._data.task} answered Hello by {type(welcome).__name__}")
            self.recognise(welcome)
            self._refuse_if_closed()
        except BaseException:
            channel.close()
            raise
        return channel

    def _refuse_if_closed(self) -> None:
        if self.is_closed():
            raise ConnectionLost(f"the connection to {self._data.task} was closed by this process")


def _is_final(error: WireError) -> bool:
    """Return whether a failed attempt means that the server is gone, rather than out of reach."""
    if isinstance(error.__cause__, ConnectionRefusedError):
        return True
    return isinstance(error, _ServerGone) or not isinstance(
        error, ConnectionLost | DeadlineExceeded
    )


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
