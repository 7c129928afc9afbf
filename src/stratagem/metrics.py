"""Counters, timers, distributions, gauges, logged values and events of a program.

A `Registry` names the recorders. The module-level functions use one registry per process. `snapshot()` returns
plain data, which can be sent to another process and merged with other snapshots. `log` records your own value,
such as the loss, in a scheduled function or in the program.

Recording costs well under a microsecond. Memory is bounded: a distribution counts values in fixed
logarithmic buckets, and only the latest events are kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, SupportsFloat, final

from stratagem._recorders import Counter, Distribution, Gauge, ScalarRecorder, Timer
from stratagem._snapshots import (
    DistributionSnapshot,
    Event,
    Plain,
    ScalarSnapshot,
    Snapshot,
    merge,
)

if TYPE_CHECKING:
    from stratagem._streaming_metrics import AUC, Accuracy, Mean

__all__ = [
    "AUC",
    "Accuracy",
    "Counter",
    "Distribution",
    "DistributionSnapshot",
    "Event",
    "Gauge",
    "Mean",
    "Registry",
    "ScalarSnapshot",
    "Snapshot",
    "Timer",
    "counter",
    "distribution",
    "event",
    "gauge",
    "log",
    "merge",
    "snapshot",
    "timer",
]

# Enough for a day of worker losses at one a minute; at some 200 bytes each, a third of a megabyte.
EVENT_LIMIT: Final = 1500

SCALAR_LIMIT: Final = 500  # names of logged values per process; a heartbeat carries all of them

_log = logging.getLogger("stratagem.metrics")


def __getattr__(name: str) -> Any:
    """Import the metrics that compute with torch when they are used: the owner of a cluster imports no torch."""
    if name not in ("AUC", "Accuracy", "Mean"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stratagem import _streaming_metrics

    return getattr(_streaming_metrics, name)


@final
class Registry:
    """Named recorders of one task. The same name always returns the same recorder.

    Keep the recorder that you get: looking it up takes a lock.

    Example:
        >>> from stratagem import metrics
        >>> registry = metrics.Registry()
        >>> registry.counter("steps") is registry.counter("steps")
        True
        >>> registry
        <Registry: 1 counters, 0 timers, 0 distributions, 0 events>
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}
        self._timers: dict[str, Timer] = {}
        self._distributions: dict[str, Distribution] = {}
        self._gauges: dict[str, Gauge] = {}
        self._scalars: dict[str, ScalarRecorder] = {}
        self._events: deque[Event] = deque(maxlen=EVENT_LIMIT)

    def counter(self, name: str) -> Counter:
        """Return the counter of this name; create it on first use."""
        with self._lock:
            return self._counters.get(name) or self._counters.setdefault(name, Counter(name))

    def timer(self, name: str) -> Timer:
        """Return the timer of this name; create it on first use."""
        with self._lock:
            return self._timers.get(name) or self._timers.setdefault(name, Timer(name))

    def distribution(self, name: str) -> Distribution:
        """Return the distribution of this name; create it on first use."""
        with self._lock:
            found = self._distributions.get(name)
            return found or self._distributions.setdefault(name, Distribution(name))

    def gauge(self, name: str) -> Gauge:
        """Return the gauge of this name; create it on first use."""
        with self._lock:
            return self._gauges.get(name) or self._gauges.setdefault(name, Gauge(name))

    def log(self, name: str, value: SupportsFloat) -> None:
        """Record a value of the program; see `metrics.log`."""
        scalar = self._scalars.get(name) or self._new_scalar(name)
        if scalar is not None:
            item = getattr(value, "item", None)  # of tensors, which may require gradients
            scalar.record(float(value if item is None else item()))

    def _new_scalar(self, name: str) -> ScalarRecorder | None:
        if not isinstance(name, str):
            raise TypeError(f"log({name!r}, …): expected a name, such as log('loss', loss)")
        with self._lock:
            if len(self._scalars) < SCALAR_LIMIT:
                return self._scalars.setdefault(name, ScalarRecorder())
            first = self._counters.get("metrics.names_dropped") is None
        self.counter("metrics.names_dropped").add()
        if first:
            _log.warning(
                "log(%r, …): %d names are in use, which is the limit. Values under new names are dropped; "
                "log under fixed names, without step numbers in them.",
                name,
                SCALAR_LIMIT,
            )
        return None

    def event(self, name: str, /, **facts: Plain) -> None:
        """Record an event; the latest `EVENT_LIMIT` events are kept."""
        happened = Event(time_s=time.time(), name=name, facts=facts)
        with self._lock:
            self._events.append(happened)

    def snapshot(self) -> Snapshot:
        """Return everything recorded so far. Each recorder is consistent in itself."""
        with self._lock:
            counters = dict(self._counters)
            timers = dict(self._timers)
            distributions = dict(self._distributions)
            gauges = dict(self._gauges)
            scalars = dict(self._scalars)
            events = tuple(self._events)
        return Snapshot(
            counters={name: found.value for name, found in counters.items()},
            timers={name: found.snapshot() for name, found in timers.items()},
            distributions={name: found.snapshot() for name, found in distributions.items()},
            gauges={name: float(found.value) for name, found in gauges.items()},
            scalars={name: found.snapshot() for name, found in scalars.items()},
            events=events,
        )

    def __repr__(self) -> str:
        return (
            f"<Registry: {len(self._counters)} counters, "
            f"{len(self._timers)} timers, {len(self._distributions)} distributions, "
            f"{len(self._events)} events>"
        )


_of_this_process: Final = Registry()


def counter(name: str) -> Counter:
    """Return this process's counter of a name.

    Example:
        >>> from stratagem import metrics
        >>> metrics.counter("doc.rows").add(3)
        >>> metrics.counter("doc.rows").value >= 3
        True
    """
    return _of_this_process.counter(name)


def timer(name: str) -> Timer:
    """Return this process's timer of a name.

    Example:
        >>> from stratagem import metrics
        >>> with metrics.timer("doc.read").measure():
        ...     pass
    """
    return _of_this_process.timer(name)


def distribution(name: str) -> Distribution:
    """Return this process's distribution of a name.

    Example:
        >>> from stratagem import metrics
        >>> metrics.distribution("doc.batch").record(64)
    """
    return _of_this_process.distribution(name)


def gauge(name: str) -> Gauge:
    """Return this process's gauge of a name.

    Example:
        >>> from stratagem import metrics
        >>> metrics.gauge("doc.memory").set(1024)
        >>> metrics.gauge("doc.memory").value
        1024
    """
    return _of_this_process.gauge(name)


def log(name: str, value: SupportsFloat) -> None:
    """Log a value of your own, such as the loss; the live page and the report draw it as a curve.

    Call it in a scheduled function or in the program. Workers send their values with the heartbeats, so
    that a call costs less than a microsecond. The curve has the mean of each second. NaN and infinity are
    counted apart.

    Args:
        name: name of the curve. Use few, fixed names.
        value: a number, or a tensor with one element.

    Example:
        >>> from stratagem import metrics
        >>> metrics.log("doc.loss", 0.25)
        >>> metrics.snapshot().scalars["doc.loss"].last
        0.25
    """
    _of_this_process.log(name, value)


def event(name: str, /, **facts: Plain) -> None:
    """Record an event of this process.

    Example:
        >>> from stratagem import metrics
        >>> metrics.event("checkpoint written", path="/tmp/model.pt", step=100)
    """
    _of_this_process.event(name, **facts)


def snapshot() -> Snapshot:
    """Return everything this process has recorded.

    Example:
        >>> from stratagem import metrics
        >>> metrics.counter("doc.seen").add()
        >>> metrics.snapshot().counters["doc.seen"] >= 1
        True
    """
    return _of_this_process.snapshot()
