"""Measured round-trip time of one connection, and the limits that depend on it.

`connecting.py` measures both exchanges of the handshake; pings refresh the figure. A limit is never shorter than the
configured one: a measured round trip only makes it longer, so that a slow network is not mistaken for a failure.
"""

from __future__ import annotations

from typing import final

from typing_extensions import override

from stratagem.config import ClusterOptions


@final
class RoundTrip:
    """Smoothed round-trip time and its deviation, as TCP computes its retransmission timer (RFC 6298).

    Example:
        >>> slow = RoundTrip()
        >>> slow.limit_s(4.0)
        4.0
        >>> slow.measured(2.0)
        >>> slow.limit_s(4.0)
        6.0
    """

    __slots__ = ("_deviation_s", "mean_s")

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._deviation_s = 0.0

    def measured(self, seconds: float) -> None:
        """Take in the time between a message and its answer."""
        if self.mean_s == 0.0:
            self.mean_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += (abs(seconds - self.mean_s) - self._deviation_s) / 4
        self.mean_s += (seconds - self.mean_s) / 8

    def limit_s(self, least_s: float) -> float:
        """Return how long to wait for an answer: three equal round trips, more if they vary; at least `least_s`."""
        return max(least_s, self.mean_s + 4 * self._deviation_s, 3 * self.mean_s)

    @override
    def __repr__(self) -> str:
        return f"<RoundTrip {self.mean_s * 1000:.1f} ms>"


def attempt_limit_s(options: ClusterOptions | None = None) -> float:
    """Return how long one attempt to connect waits for the first answer; `connect` adds measured round trips.

    A third of the partition limit: several attempts fit into it, since a task may come back at another address.
    """
    options = ClusterOptions.from_environment() if options is None else options
    return max(options.heartbeat_limit_s, options.partition_limit_s / 3)


def answer_limit_s() -> float:
    """Return the limit of a small question to a task that should answer at once: the heartbeat limit."""
    return ClusterOptions.from_environment().heartbeat_limit_s
