"""Questions that parameter servers answer at any time, on connections of their own.

Pings and statistics go to the servers' door threads, which answer while the work thread is in a long step, and never wait
behind the requests of `client.py`. Whether a server that does not answer is busy or lost is judged by its silence
(`pulse.py`), for all servers side by side: nobody waits for one of them alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import final

from typing_extensions import override

from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.messages import Message
from stratagem._wire.process_probe import LivenessCheck
from stratagem.config import ClusterOptions
from stratagem.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ParameterServerLost,
    ProtocolError,
    WireError,
)

_log = logging.getLogger("stratagem.ps")

_PAUSE_S = 0.01
"""Between two looks at servers whose answers are waited for."""

_ATTEMPT_S = 0.5
"""For one attempt to connect while servers are looked after: the others must not be forgotten over it."""


@final
class ControlConnections:
    """One control connection per server, made when first needed. Safe for several threads.

    Example:
        >>> from stratagem._ps.client.server_liveness import ControlConnections
        >>> from stratagem._ps.server.loop import ParameterServer
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
        self._lines = [_Line(task, address, key) for task, address in servers]
        for line, lost_error in zip(self._lines, lost, strict=False):
            line.lost_error = lost_error

    def introduce(self, server: int, welcome: messages.Welcome) -> None:
        """Tells who serves there, so that a server can be judged that is silent from the start."""
        self._lines[server].know(welcome)

    def ping(self, server: int, *, timeout_s: float) -> messages.Pong:
        """Asks whether a server lives.

        Raises:
            ParameterServerLost: it is gone, or does not answer in time.
        """
        reply = self._lines[server].ask(messages.Ping(), timeout_s)
        assert isinstance(reply, messages.Pong)
        return reply

    def stats(self, server: int, *, timeout_s: float) -> dict[str, object]:
        """Numbers about a server, at most half a second old."""
        reply = self._lines[server].ask(messages.AskStats(), timeout_s)
        assert isinstance(reply, messages.Stats)
        return dict(reply.facts)

    def look_after(self, options: ClusterOptions) -> None:
        """One look at every server, to be repeated: who is pinged has answered since, or is judged.

        Waits for nobody who is connected.

        Raises:
            ParameterServerLost: one is gone, or has been silent for too long.
        """
        for line in self._lines:
            line.look(options, every_s=options.heartbeat_s)

    def await_answers(self, options: ClusterOptions, *, of: Collection[int]) -> None:
        """Returns when each of these servers has answered, or counts as lost, which is logged."""
        began = time.monotonic()
        waiting = {self._lines[server] for server in of}
        while waiting:
            for line in list(waiting):
                try:
                    line.look(options, every_s=0.0)
                except ParameterServerLost as error:
                    _log.warning("%s", error)
                    waiting.discard(line)
                else:
                    if line.is_closed() or line.alive_at >= began:
                        waiting.discard(line)
            if waiting:
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Hangs up; who asks now or later is told so. Repeatable."""
        for line in self._lines:
            line.close()

    @override
    def __repr__(self) -> str:
        count = sum(line.is_open for line in self._lines)
        return f"<ControlConnections {count} of {len(self._lines)} open>"


@final
class _Line:
    """The control connection to one server, taken up again when it breaks."""

    def __init__(self, task: str, address: str, key: ClusterKey | None) -> None:
        self.task = task
        self.alive_at = 0.0
        """When it certainly lived: the last ping it answered was sent then."""
        self.lost_error: Callable[[str], ParameterServerLost] = self._plain_error
        self._address = address
        self._key = key
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._silence = LivenessCheck(task, log=_log)
        self._life = ""
        self._call: int | None = None  # of the ping whose answer has not come
        self._asked_at = 0.0
        self._is_asking = False  # a connection is being made, for a ping
        self._lost = ""  # why
        self._closed = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._channel is not None and self._channel.is_open

    def is_closed(self) -> bool:
        return self._closed.is_set()

    def ask(self, message: Message, timeout_s: float) -> Message:
        """One question and its answer."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            try:
                channel = self._connected(deadline)
                return channel.request(message, timeout_s=_left(deadline)).message
            except WireError as error:  # also of somebody else, who got the address after it
                self._hang_up()
                # Two things that people look for in different places: a process that hangs, or a
                # machine that is cut off; and a process that is not there.
                silent = isinstance(error, DeadlineExceeded)
                what = f"did not answer within {timeout_s:g} s" if silent else "is gone"
                raise self.lost_error(f"{what}: {error}") from error

    def look(self, options: ClusterOptions, *, every_s: float) -> None:
        """Takes in the answer to the last ping, or judges its absence; asks again when it is time."""
        if self.is_closed() or not self._lock.acquire(blocking=False):
            return  # or somebody asks, and will say what comes of it
        try:
            now = time.monotonic()
            if not self._lost:
                self._look(options, every_s, now)
            elif now - self._asked_at >= every_s:  # it stays lost, and is said to be in its time
                self._asked_at = now
                raise self.lost_error(self._lost)
        except WireError as error:
            self._hang_up()
            if self.is_closed():  # its strategy was forgotten: no server is lost by that
                return
            self._lost = f"is gone: {error}"
            raise self.lost_error(self._lost) from error
        finally:
            self._lock.release()

    def _look(self, options: ClusterOptions, every_s: float, now: float) -> None:
        channel = self._channel
        if self._call is not None and channel is not None and channel.is_open:
            if channel.has_reply(self._call):
                channel.collect(self._call, timeout_s=0.0)
                self._call, self.alive_at = None, self._asked_at
            elif self.is_open:  # still: the look may have found it broken
                self._judge(options, now)
                return
        if self._call is None and not self._is_asking and now - self._asked_at < every_s:
            return
        # With a call whose connection has broken: a server that lives lets us in again.
        if not self._is_asking:
            self._is_asking, self._asked_at = True, now
        limit_s = options.heartbeat_limit_s
        try:
            channel = self._connected(now + min(_ATTEMPT_S, limit_s))
        except DeadlineExceeded:  # it is busy, or hangs: that is judged, not the attempt
            self._hang_up()
            self._judge(options, time.monotonic())
            return
        self._call = channel.begin(messages.Ping(), timeout_s=limit_s)
        self._is_asking, self._asked_at = False, time.monotonic()
        self._judge(options, self._asked_at)

    def _judge(self, options: ClusterOptions, now: float) -> None:
        channel = self._channel
        silent_s = now - self._asked_at
        why = self._silence.judge(
            now,
            silent_s=silent_s,
            limit_s=options.heartbeat_limit_s,
            busy_limit_s=options.busy_limit_s,
            cut_off_s=lambda: 0.0 if channel is None else channel.cut_off_s(),
        )
        if why is not None:
            self._hang_up()
            self._lost = f"has not answered for {silent_s:.1f} s{why}"
            raise self.lost_error(self._lost)

    def close(self) -> None:
        self._closed.set()
        if self._channel is not None:
            self._channel.close()

    def _hang_up(self) -> None:
        self._call = None
        if self._channel is not None:
            self._channel.close()

    def _connected(self, deadline: float) -> Channel:
        if self._channel is not None and self._channel.is_open:
            return self._channel
        self._call = None
        self._refuse_if_closed()
        channel = connect(
            self._address,
            key=self._key,
            peer=self.task,
            timeout_s=_left(deadline),
            stopped=self._closed.is_set,
        )
        self._channel = channel
        try:  # by another thread, which may have looked before the channel was there
            self._refuse_if_closed()
        except ConnectionLost:
            channel.close()
            raise
        hello = messages.Hello(purpose="control")
        welcome = channel.request(hello, timeout_s=_left(deadline)).message
        if not isinstance(welcome, messages.Welcome):
            raise ProtocolError(f"{self.task} answered Hello by {type(welcome).__name__}")
        self.know(welcome)
        return channel

    def _refuse_if_closed(self) -> None:
        if self.is_closed():
            raise ConnectionLost(f"the connection to {self.task} was closed by this process")

    def know(self, welcome: messages.Welcome) -> None:
        """Who serves there; nobody else may do so later."""
        if self._life not in ("", welcome.life):
            raise ConnectionLost(f"{self.task} was restarted and has lost its variables")
        if not self._life:
            self._life = welcome.life
            self._silence = LivenessCheck(self.task, welcome.process, log=_log)

    def _plain_error(self, what: str) -> ParameterServerLost:
        return ParameterServerLost(
            f"parameter server {self.task} at {self._address!r} {what}. Start it again, create the "
            f"strategy anew and restore the last checkpoint.",
            task=self.task,
        )


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
