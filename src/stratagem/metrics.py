"""Counters, timers, distributions and events that the package records about itself.

A `Registry` names the recorders. The module-level functions use one registry per process; a task
that shares its process with others (an in-process worker) creates its own. `snapshot()` returns
plain data that crosses processes, merges, and feeds progress bars, heartbeats and the live view.

Recording costs well under a microsecond. Memory is bounded: a distribution counts values in fixed
logarithmic buckets, and only the latest events are kept.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import Final, Self, final

from stratagem._snapshots import (
    DistributionSnapshot,
    Event,
    Number,
    Plain,
    Snapshot,
    bucket_of,
    merge,
)
from stratagem._streaming_metrics import AUC, Accuracy, Mean

__all__ = [
    "AUC",
    "Accuracy",
    "Counter",
    "Distribution",
    "DistributionSnapshot",
    "Event",
    "Mean",
    "Registry",
    "Snapshot",
    "Timer",
    "counter",
    "distribution",
    "event",
    "merge",
    "reset",
    "snapshot",
    "timer",
]

# Enough for a day of worker losses at one a minute; at some 200 bytes each, a third of a megabyte.
EVENT_LIMIT: Final = 1500


@final
class Counter:
    """A number that only grows, such as steps done or bytes sent.

    Example:
        >>> from stratagem import metrics
        >>> steps = metrics.Registry().counter("steps")
        >>> steps.add()
        >>> steps.add(4)
        >>> steps
        <Counter steps: 5>
    """

    __slots__ = ("_lock", "_value", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._value: Number = 0

    def add(self, amount: Number = 1) -> None:
        """Add `amount`, which must not be negative."""
        if amount < 0:
            raise ValueError(
                f"counter {self.name!r} cannot go down: got amount={amount!r}, expected >= 0. "
                "Use a distribution for values that rise and fall."
            )
        with self._lock:
            self._value += amount

    @property
    def value(self) -> Number:
        """Current count."""
        return self._value

    def reset(self) -> None:
        """Set the count to 0."""
        with self._lock:
            self._value = 0

    def __repr__(self) -> str:
        return f"<Counter {self.name}: {self._value}>"


class _Recorder:
    """Common part of `Distribution` and `Timer`: exact count, sum and extremes, and buckets."""

    __slots__ = ("_buckets", "_count", "_lock", "_maximum", "_minimum", "_total", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._total = 0.0
        self._minimum = math.inf
        self._maximum = -math.inf
        self._buckets: dict[int, int] = {}

    def record(self, value: Number) -> None:
        """Record one value. Refuse NaN, which would make the sum NaN."""
        value = float(value)
        if math.isnan(value):
            raise ValueError(f"{self.name!r} got nan, expected a number: nothing was recorded")
        bucket = bucket_of(value)
        with self._lock:
            self._count += 1
            self._total += value
            # Comparisons, because min() and max() take twice as long here.
            if value < self._minimum:  # noqa: PLR1730
                self._minimum = value
            if value > self._maximum:  # noqa: PLR1730
                self._maximum = value
            self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def snapshot(self) -> DistributionSnapshot:
        """Return the recorded values as plain data."""
        with self._lock:
            return DistributionSnapshot(
                count=self._count,
                total=self._total,
                minimum=self._minimum,
                maximum=self._maximum,
                buckets=dict(self._buckets),
            )

    def reset(self) -> None:
        """Discard every value."""
        with self._lock:
            self._clear()


@final
class Distribution(_Recorder):
    """Spread of values, such as batch sizes, staleness or bytes per message.

    Example:
        >>> from stratagem import metrics
        >>> staleness = metrics.Registry().distribution("staleness")
        >>> staleness.record(2)
        >>> staleness
        <Distribution staleness: 1 values, mean 2>
    """

    __slots__ = ()

    def __repr__(self) -> str:
        seen = self.snapshot()
        mean = f", mean {seen.mean:.4g}" if seen.count else ""
        return f"<Distribution {self.name}: {seen.count} values{mean}>"


class _Measurement:
    """One running measurement; recorded when its block ends, also by an exception."""

    __slots__ = ("_started", "_timer", "seconds")

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self.seconds = math.nan

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *failure: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self._timer.record(self.seconds)


@final
class Timer(_Recorder):
    """Durations in seconds. Any number of threads may measure at once.

    Code that already has two clock readings calls `record(seconds)` directly.

    Example:
        >>> from stratagem import metrics
        >>> read = metrics.Registry().timer("read")
        >>> with read.measure() as measurement:
        ...     _ = sum(range(100))
        >>> measurement.seconds > 0
        True
        >>> read.snapshot().count
        1
    """

    __slots__ = ()

    def measure(self) -> _Measurement:
        """Return a context manager that records the duration of its block."""
        return _Measurement(self)

    def __repr__(self) -> str:
        seen = self.snapshot()
        mean = f", mean {seen.mean * 1e6:.4g} µs" if seen.count else ""
        return f"<Timer {self.name}: {seen.count} measured{mean}>"


@final
class Registry:
    """Named recorders of one task. The same name always returns the same recorder.

    Keep the recorder that you get: looking it up takes a lock.

    Example:
        >>> from stratagem import metrics
        >>> registry = metrics.Registry(source="worker 0")
        >>> registry.counter("steps") is registry.counter("steps")
        True
        >>> registry
        <Registry worker 0: 1 counters, 0 timers, 0 distributions, 0 events>
    """

    def __init__(self, source: str = "") -> None:
        self.source = source
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}
        self._timers: dict[str, Timer] = {}
        self._distributions: dict[str, Distribution] = {}
        self._events: deque[Event] = deque(maxlen=EVENT_LIMIT)
        self._events_seen = 0

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

    def event(self, name: str, /, **facts: Plain) -> None:
        """Record an event; the latest `EVENT_LIMIT` events are kept."""
        happened = Event(time_s=time.time(), source=self.source, name=name, facts=facts)
        with self._lock:
            self._events.append(happened)
            self._events_seen += 1

    def snapshot(self) -> Snapshot:
        """Return everything recorded so far. Each recorder is consistent in itself."""
        with self._lock:
            counters = dict(self._counters)
            timers = dict(self._timers)
            distributions = dict(self._distributions)
            events = tuple(self._events)
            dropped = self._events_seen - len(events)
        return Snapshot(
            sources=(self.source,),
            counters={name: found.value for name, found in counters.items()},
            timers={name: found.snapshot() for name, found in timers.items()},
            distributions={name: found.snapshot() for name, found in distributions.items()},
            events=events,
            events_dropped=dropped,
        )

    def reset(self) -> None:
        """Set every recorder to zero and discard the events. Recorders in use stay valid."""
        with self._lock:
            recorders: list[Counter | _Recorder] = [
                *self._counters.values(),
                *self._timers.values(),
                *self._distributions.values(),
            ]
            self._events.clear()
            self._events_seen = 0
        for recorder in recorders:
            recorder.reset()

    def __repr__(self) -> str:
        return (
            f"<Registry {self.source or 'of this process'}: {len(self._counters)} counters, "
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


def reset() -> None:
    """Set everything this process has recorded to zero.

    Example:
        >>> from stratagem import metrics
        >>> metrics.counter("doc.zeroed").add()
        >>> metrics.reset()
        >>> metrics.counter("doc.zeroed").value
        0
    """
    _of_this_process.reset()
