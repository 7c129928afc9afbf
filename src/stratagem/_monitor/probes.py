"""Query all tasks of a cluster at once, with a time limit.

A parameter server keeps the connection; a worker closes it after its answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, final

from typing_extensions import override

from stratagem._owner import Owner
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClusterKey
from stratagem.errors import AuthenticationError, ProtocolError, WireError

_AT_ONCE: Final = 16  # tasks that are asked at the same time


@final
class Probe(Owner):
    """Asks one task for its figures, again and again.

    Args:
        find_address: returns the task's address; called at every attempt to connect.
        key: of the cluster.
        is_server: whether the task is a parameter server, which expects a first message.
        limit_s: of one question; longer if the measured round trip demands it.
    """

    def __init__(
        self,
        find_address: Callable[[], str],
        *,
        key: ClusterKey | None,
        is_server: bool,
        limit_s: float,
    ) -> None:
        self._find_address = find_address
        self._key = key
        self._is_server = is_server
        self._limit_s = limit_s
        self._channel: Channel | None = None
        self.failure = "no answer"
        """Why the last question failed: ``wrong key``, ``refused`` (another release, or TLS on one side only) or
        ``no answer``."""

    def ask(self) -> dict[str, Any] | None:
        """Return the figures that the task reports, or None if it does not answer."""
        try:
            channel = self._channel or self._connect()
            limit_s = channel.round_trip.limit_s(self._limit_s)
            reply = channel.request(messages.AskStats(), timeout_s=limit_s).message
        except Exception as error:  # noqa: BLE001 - also those of resolvers, which are users' classes
            self.close()
            self.failure = _failure(error)
            return None
        if not self._is_server:
            self.close()
        return dict(reply.facts) if isinstance(reply, messages.Stats) else None

    def _connect(self) -> Channel:
        channel = connect(self._find_address(), key=self._key, timeout_s=self._limit_s)
        if self._is_server:
            try:
                limit_s = channel.round_trip.limit_s(self._limit_s)
                channel.request(messages.Hello(purpose="control"), timeout_s=limit_s)
            except BaseException:
                channel.close()
                raise
        self._channel = channel
        return channel

    @override
    def close(self) -> None:
        """Close the connection; the next question opens another one. May be called again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(WireError):
                channel.close()


def _failure(error: Exception) -> str:
    if isinstance(error, AuthenticationError):
        return "wrong key"
    return "refused" if isinstance(error, ProtocolError) else "no answer"


def ask_all(probes: Sequence[Probe]) -> list[dict[str, Any] | None]:
    """Return the answers of all tasks, in order."""
    if len(probes) < 2:
        return [probe.ask() for probe in probes]
    with ThreadPoolExecutor(min(len(probes), _AT_ONCE), "stratagem-monitor-ask") as threads:
        return list(threads.map(Probe.ask, probes))
