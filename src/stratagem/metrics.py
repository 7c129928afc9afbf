"""Counters, timers, distributions and events: what the package counts about itself.

Here live the recording objects, the registry that names them, and snapshots, which are plain data:
they cross processes, merge, and feed progress bars, heartbeats and the live view. Nothing here
draws, sends or logs. Every room may record; the module-level functions use one registry for the
process, and a role that shares its process with others (an in-process worker) makes its own
`Registry`.

Recording costs well under a microsecond and memory is bounded whatever is recorded: a distribution
keeps counts in fixed logarithmic buckets, events are a ring.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, final

__all__ = [
    "Counter",
    "Distribution",
    "DistributionSnapshot",
    "Event",
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

# Layout of a distribution. A positive value v = m * 2**e (0.5 <= m < 1) falls into the octave e,
# which is cut into eight equal parts, so a bucket is at most 1/8 of its lower edge wide:
#
#     bucket number = 1 + (e - LOWEST) * 8 + floor((m - 0.5) * 16)
#
# Bucket 0 holds everything <= 0. Octaves are clamped to 2**-40 (a picosecond, in seconds) and
# 2**60 (an exabyte, in bytes), so there are at most 801 buckets, made when first hit.
_PARTS: Final = 8
_LOWEST_OCTAVE: Final = -40
_HIGHEST_OCTAVE: Final = 60
_LAST_BUCKET: Final = (_HIGHEST_OCTAVE - _LOWEST_OCTAVE) * _PARTS
_ABOVE_ALL: Final = 2.0**_HIGHEST_OCTAVE

# Enough for a day of worker losses at one a minute; at some 200 bytes each, a third of a megabyte.
EVENT_LIMIT: Final = 1500

Number: TypeAlias = int | float
Plain: TypeAlias = str | int | float | bool | None


def _bucket_of(value: float) -> int:
    if not value > 0:
        return 0
    if value >= _ABOVE_ALL:
        return _LAST_BUCKET
    mantissa, octave = math.frexp(value)
    if octave <= _LOWEST_OCTAVE:
        return 1
    return 1 + (octave - 1 - _LOWEST_OCTAVE) * _PARTS + int((mantissa - 0.5) * 2 * _PARTS)


def _edges_of(bucket: int) -> tuple[float, float]:
    """Lower and upper edge of a bucket's values."""
    if bucket == 0:
        return 0.0, 0.0
    octave, part = divmod(bucket - 1, _PARTS)
    base = math.ldexp(0.5, octave + 1 + _LOWEST_OCTAVE)
    return base * (1 + part / _PARTS), base * (1 + (part + 1) / _PARTS)


@final
class Counter:
    """A number that only grows: things done, bytes sent.

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
        """Count `amount` more; refuses a negative amount."""
        if amount < 0:
            raise ValueError(
                f"counter {self.name!r} cannot go down: got amount={amount!r}, expected >= 0. "
                "Use a distribution for values that rise and fall."
            )
        with self._lock:
            self._value += amount

    @property
    def value(self) -> Number:
        """The count so far."""
        return self._value

    def reset(self) -> None:
        """Start again from 0."""
        with self._lock:
            self._value = 0

    def __repr__(self) -> str:
        return f"<Counter {self.name}: {self._value}>"


@dataclass(frozen=True, kw_only=True)
class DistributionSnapshot:
    """What a distribution or timer held at one moment; plain data.

    Example:
        >>> from stratagem import metrics
        >>> sizes = metrics.Registry().distribution("sizes")
        >>> for value in (1, 2, 3, 100):
        ...     sizes.record(value)
        >>> seen = sizes.snapshot()
        >>> seen.count, seen.mean, seen.minimum, seen.maximum
        (4, 26.5, 1.0, 100.0)
        >>> 2 <= seen.quantile(0.5) <= 3
        True
    """

    count: int = 0
    """How many values were recorded."""

    total: float = 0.0
    """Their sum."""

    minimum: float = math.inf
    """The smallest, exact; infinity when empty."""

    maximum: float = -math.inf
    """The largest, exact; minus infinity when empty."""

    buckets: Mapping[int, int] = field(default_factory=dict)
    """Bucket number -> values in it (see the layout at the top of the module)."""

    @property
    def mean(self) -> float:
        """Exact mean of the values; NaN when there are none."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, fraction: float) -> float:
        """Value below which `fraction` of the values lie, within 1/8 of its size; NaN when empty."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"got fraction={fraction!r}, expected a number from 0 to 1")
        if self.count == 0:
            return math.nan
        rank = fraction * self.count
        seen = 0
        for bucket in sorted(self.buckets):
            inside = self.buckets[bucket]
            if seen + inside >= rank:
                low, high = _edges_of(bucket)
                guess = low + (high - low) * max(0.0, rank - seen) / inside
                return min(max(guess, self.minimum), self.maximum)
            seen += inside
        return self.maximum

    def merged(self, other: DistributionSnapshot) -> DistributionSnapshot:
        """One snapshot standing for the values of both."""
        buckets = dict(self.buckets)
        for bucket, inside in other.buckets.items():
            buckets[bucket] = buckets.get(bucket, 0) + inside
        return DistributionSnapshot(
            count=self.count + other.count,
            total=self.total + other.total,
            minimum=min(self.minimum, other.minimum),
            maximum=max(self.maximum, other.maximum),
            buckets=buckets,
        )


class _Recorder:
    """What `Distribution` and `Timer` share: one lock, exact moments, counts in buckets."""

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
        """Record one value; NaN is refused, for it would poison the sum."""
        value = float(value)
        if math.isnan(value):
            raise ValueError(f"{self.name!r} got nan, expected a number: nothing was recorded")
        bucket = _bucket_of(value)
        with self._lock:
            self._count += 1
            self._total += value
            # Comparisons, not min() and max(): they cost twice as much here.
            if value < self._minimum:  # noqa: PLR1730
                self._minimum = value
            if value > self._maximum:  # noqa: PLR1730
                self._maximum = value
            self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def snapshot(self) -> DistributionSnapshot:
        """The values so far, as plain data."""
        with self._lock:
            return DistributionSnapshot(
                count=self._count,
                total=self._total,
                minimum=self._minimum,
                maximum=self._maximum,
                buckets=dict(self._buckets),
            )

    def reset(self) -> None:
        """Forget every value."""
        with self._lock:
            self._clear()


@final
class Distribution(_Recorder):
    """How values are spread: batch sizes, staleness in updates, bytes per message.

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
    """One running measurement; recorded when the block ends, also by an exception."""

    __slots__ = ("_started", "_timer", "seconds")

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self.seconds = math.nan

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds = time.perf_counter() - self._started
        self._timer.record(self.seconds)


@final
class Timer(_Recorder):
    """How long something takes, in seconds; any number of threads may measure at once.

    A hot path that has its own clock readings calls `record(seconds)` directly.

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
        """A context manager that records how long its block took."""
        return _Measurement(self)

    def __repr__(self) -> str:
        seen = self.snapshot()
        mean = f", mean {seen.mean * 1e6:.4g} µs" if seen.count else ""
        return f"<Timer {self.name}: {seen.count} measured{mean}>"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened once and is worth a line: a worker lost, a checkpoint written.

    Example:
        >>> from stratagem import metrics
        >>> registry = metrics.Registry(source="worker 0")
        >>> registry.event("worker lost", worker=1, reason="no heartbeat")
        >>> [(e.source, e.name, e.facts) for e in registry.snapshot().events]
        [('worker 0', 'worker lost', {'worker': 1, 'reason': 'no heartbeat'})]
    """

    time_s: float
    """When, in seconds since 1970, by the clock of the process that recorded it."""

    source: str
    """Who recorded it, such as ``worker 0``."""

    name: str
    """What happened."""

    facts: Mapping[str, Plain] = field(default_factory=dict)
    """With which values."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything a registry held at one moment; plain data that can be sent and merged.

    Example:
        >>> from stratagem import metrics
        >>> here = metrics.Registry(source="worker 0")
        >>> here.counter("steps").add(3)
        >>> again = metrics.Snapshot.from_plain(here.snapshot().to_plain())
        >>> again.counters
        {'steps': 3}
    """

    sources: tuple[str, ...] = ()
    """Whose numbers these are."""

    counters: Mapping[str, Number] = field(default_factory=dict)
    timers: Mapping[str, DistributionSnapshot] = field(default_factory=dict)
    distributions: Mapping[str, DistributionSnapshot] = field(default_factory=dict)

    events: tuple[Event, ...] = ()
    """The latest events, oldest first."""

    events_dropped: int = 0
    """Older events that no longer fitted."""

    def to_plain(self) -> dict[str, Any]:
        """Lists, dicts, numbers and strings only, for any codec; `from_plain` reads it back."""
        return {
            "sources": list(self.sources),
            "counters": dict(self.counters),
            "timers": {name: _to_plain(seen) for name, seen in self.timers.items()},
            "distributions": {name: _to_plain(seen) for name, seen in self.distributions.items()},
            "events": [[e.time_s, e.source, e.name, dict(e.facts)] for e in self.events],
            "events_dropped": self.events_dropped,
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Snapshot:
        """The snapshot that `to_plain` described."""
        return Snapshot(
            sources=tuple(plain["sources"]),
            counters=dict(plain["counters"]),
            timers={name: _from_plain(row) for name, row in plain["timers"].items()},
            distributions={name: _from_plain(row) for name, row in plain["distributions"].items()},
            events=tuple(
                Event(time_s=at, source=source, name=name, facts=dict(facts))
                for at, source, name, facts in plain["events"]
            ),
            events_dropped=plain["events_dropped"],
        )


def _to_plain(seen: DistributionSnapshot) -> list[Any]:
    # Infinities of an empty distribution are not JSON; an empty row says the same.
    if not seen.count:
        return []
    # Keys as pairs, for JSON turns dict keys into strings.
    pairs = [[bucket, inside] for bucket, inside in sorted(seen.buckets.items())]
    return [seen.count, seen.total, seen.minimum, seen.maximum, pairs]


def _from_plain(row: list[Any]) -> DistributionSnapshot:
    if not row:
        return DistributionSnapshot()
    count, total, minimum, maximum, pairs = row
    return DistributionSnapshot(
        count=count,
        total=total,
        minimum=minimum,
        maximum=maximum,
        buckets=dict(pairs),
    )


@final
class Registry:
    """Named recorders of one role. Asking twice for a name gives the same recorder.

    Ask once and keep the recorder: the lookup takes a lock, recording does not look up.

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
        """The counter of this name, made when first asked for."""
        with self._lock:
            found = self._counters.get(name)
            if found is None:
                found = self._counters[name] = Counter(name)
            return found

    def timer(self, name: str) -> Timer:
        """The timer of this name, made when first asked for."""
        with self._lock:
            found = self._timers.get(name)
            if found is None:
                found = self._timers[name] = Timer(name)
            return found

    def distribution(self, name: str) -> Distribution:
        """The distribution of this name, made when first asked for."""
        with self._lock:
            found = self._distributions.get(name)
            if found is None:
                found = self._distributions[name] = Distribution(name)
            return found

    def event(self, name: str, /, **facts: Plain) -> None:
        """Record that something happened now; the latest `EVENT_LIMIT` are kept."""
        happened = Event(time_s=time.time(), source=self.source, name=name, facts=facts)
        with self._lock:
            self._events.append(happened)
            self._events_seen += 1

    def snapshot(self) -> Snapshot:
        """Everything so far, as plain data. Each recorder is consistent in itself."""
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
        """Zero every recorder and forget the events; recorders that others hold stay valid."""
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


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """One snapshot standing for all: counts add up, events are ordered by time.

    Give the latest snapshot of each process: snapshots count from the start of their process.

    Example:
        >>> from stratagem import metrics
        >>> workers = [metrics.Registry(source=f"worker {i}") for i in range(2)]
        >>> for worker in workers:
        ...     worker.counter("steps").add(10)
        >>> metrics.merge(worker.snapshot() for worker in workers).counters
        {'steps': 20}
    """
    sources: list[str] = []
    counters: dict[str, Number] = {}
    timers: dict[str, DistributionSnapshot] = {}
    distributions: dict[str, DistributionSnapshot] = {}
    events: list[Event] = []
    dropped = 0
    for one in snapshots:
        sources.extend(one.sources)
        for name, value in one.counters.items():
            counters[name] = counters.get(name, 0) + value
        for into, found in ((timers, one.timers), (distributions, one.distributions)):
            for name, seen in found.items():
                into[name] = into[name].merged(seen) if name in into else seen
        events.extend(one.events)
        dropped += one.events_dropped
    return Snapshot(
        sources=tuple(sources),
        counters=counters,
        timers=timers,
        distributions=distributions,
        events=tuple(sorted(events, key=lambda e: e.time_s)),
        events_dropped=dropped,
    )


# One registry for the process: what is counted is the process's own doing, whoever asks.
_of_this_process: Final = Registry()


def counter(name: str) -> Counter:
    """The process's counter of this name.

    Example:
        >>> from stratagem import metrics
        >>> metrics.counter("doc.rows").add(3)
        >>> metrics.counter("doc.rows").value >= 3
        True
    """
    return _of_this_process.counter(name)


def timer(name: str) -> Timer:
    """The process's timer of this name.

    Example:
        >>> from stratagem import metrics
        >>> with metrics.timer("doc.read").measure():
        ...     pass
    """
    return _of_this_process.timer(name)


def distribution(name: str) -> Distribution:
    """The process's distribution of this name.

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
    """Everything this process recorded so far.

    Example:
        >>> from stratagem import metrics
        >>> metrics.counter("doc.seen").add()
        >>> metrics.snapshot().counters["doc.seen"] >= 1
        True
    """
    return _of_this_process.snapshot()


def reset() -> None:
    """Zero everything this process recorded.

    Example:
        >>> from stratagem import metrics
        >>> metrics.counter("doc.zeroed").add()
        >>> metrics.reset()
        >>> metrics.counter("doc.zeroed").value
        0
    """
    _of_this_process.reset()
