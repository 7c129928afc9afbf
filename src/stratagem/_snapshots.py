"""Snapshots of metrics: plain data that processes send, merge and show.

`metrics` records the values and offers these classes under its own name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

# Layout of a distribution. A positive value v = m * 2**e (0.5 <= m < 1) falls into the octave e,
# which is divided into eight equal parts, so a bucket is at most 1/8 of its lower edge wide:
#
#     bucket number = 1 + (e - LOWEST) * 8 + floor((m - 0.5) * 16)
#
# Bucket 0 holds everything <= 0. Octaves are clamped to 2**-40 (a picosecond, in seconds) and
# 2**60 (an exabyte, in bytes), so there are at most 801 buckets, created on first use.
_PARTS: Final = 8
_LOWEST_OCTAVE: Final = -40
_HIGHEST_OCTAVE: Final = 60
_LAST_BUCKET: Final = (_HIGHEST_OCTAVE - _LOWEST_OCTAVE) * _PARTS
_ABOVE_ALL: Final = 2.0**_HIGHEST_OCTAVE

Number: TypeAlias = int | float
Plain: TypeAlias = str | int | float | bool | None


def bucket_of(value: float) -> int:
    """Return the number of the bucket that counts a value.

    Example:
        >>> bucket_of(-1.0), bucket_of(1.0) == bucket_of(1.1), bucket_of(1.0) == bucket_of(1.2)
        (0, True, False)
    """
    if not value > 0:
        return 0
    if value >= _ABOVE_ALL:
        return _LAST_BUCKET
    mantissa, octave = math.frexp(value)
    if octave <= _LOWEST_OCTAVE:
        return 1
    return 1 + (octave - 1 - _LOWEST_OCTAVE) * _PARTS + int((mantissa - 0.5) * 2 * _PARTS)


def _edges_of(bucket: int) -> tuple[float, float]:
    """Return the lower and upper edge of a bucket."""
    if bucket == 0:
        return 0.0, 0.0
    octave, part = divmod(bucket - 1, _PARTS)
    base = math.ldexp(0.5, octave + 1 + _LOWEST_OCTAVE)
    return base * (1 + part / _PARTS), base * (1 + (part + 1) / _PARTS)


@dataclass(frozen=True, kw_only=True)
class DistributionSnapshot:
    """Values of a distribution or timer at one moment.

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
    """Number of recorded values."""

    total: float = 0.0
    """Sum of the values."""

    minimum: float = math.inf
    """Smallest value, exact; infinity when empty."""

    maximum: float = -math.inf
    """Largest value, exact; minus infinity when empty."""

    buckets: Mapping[int, int] = field(default_factory=dict)
    """Number of values in each bucket."""

    @property
    def mean(self) -> float:
        """Exact mean of the values; NaN when there are none."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, fraction: float) -> float:
        """Return the value below which `fraction` of the values lie, within 1/8 of its size.

        NaN when there are no values.
        """
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
        """Return one snapshot of the values of both."""
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

    def since(self, before: DistributionSnapshot | None) -> DistributionSnapshot:
        """Return the values recorded after `before`, an earlier snapshot of the same recorder.

        The extremes are those of the whole recording. A recorder that counts less than before
        belongs to a task that was started again, so that all its values are new.
        """
        if before is None or before.count > self.count:
            return self
        buckets = {
            bucket: inside - before.buckets.get(bucket, 0)
            for bucket, inside in self.buckets.items()
            if inside > before.buckets.get(bucket, 0)
        }
        return DistributionSnapshot(
            count=self.count - before.count,
            total=self.total - before.total,
            minimum=self.minimum,
            maximum=self.maximum,
            buckets=buckets,
        )


def count_below(seen: DistributionSnapshot, edge: float) -> int:
    """Return how many values are below `edge`, exactly if `edge` is 0 or a power of two.

    Example:
        >>> from stratagem import metrics
        >>> sizes = metrics.Registry().distribution("sizes")
        >>> for value in (0, 1, 2, 3, 4):
        ...     sizes.record(value)
        >>> count_below(sizes.snapshot(), 2.0)
        2
    """
    return sum(inside for bucket, inside in seen.buckets.items() if _edges_of(bucket)[0] < edge)


@dataclass(frozen=True, kw_only=True)
class ScalarSnapshot:
    """Values that a program logged under one name with `metrics.log`, at one moment.

    Example:
        >>> from stratagem import metrics
        >>> registry = metrics.Registry()
        >>> registry.log("loss", 2.0)
        >>> registry.log("loss", 1.0)
        >>> seen = registry.snapshot().scalars["loss"]
        >>> seen.count, seen.mean, seen.last
        (2, 1.5, 1.0)
    """

    count: int = 0
    """Number of finite values."""

    total: float = 0.0
    """Sum of the finite values."""

    last: float = math.nan
    """Latest finite value; NaN when there is none."""

    not_finite: int = 0
    """Number of values that were NaN or infinite."""

    time_s: float = 0.0
    """When the latest value was logged, in seconds since 1970."""

    @property
    def mean(self) -> float:
        """Mean of the finite values; NaN when there are none."""
        return self.total / self.count if self.count else math.nan

    def since(self, before: ScalarSnapshot | None) -> ScalarSnapshot:
        """Return the values logged after `before`, an earlier snapshot of the same name."""
        if before is None or before.count > self.count or before.not_finite > self.not_finite:
            return self
        return ScalarSnapshot(
            count=self.count - before.count,
            total=self.total - before.total,
            last=self.last,
            not_finite=self.not_finite - before.not_finite,
            time_s=self.time_s,
        )

    def merged(self, other: ScalarSnapshot) -> ScalarSnapshot:
        """Return one snapshot of the values of both; the later one gives `last`."""
        later = other if other.time_s > self.time_s else self
        return ScalarSnapshot(
            count=self.count + other.count,
            total=self.total + other.total,
            last=later.last,
            not_finite=self.not_finite + other.not_finite,
            time_s=later.time_s,
        )


@dataclass(frozen=True, kw_only=True)
class Event:
    """One occurrence worth a log line, such as a lost worker or a written checkpoint.

    Example:
        >>> from stratagem import metrics
        >>> registry = metrics.Registry()
        >>> registry.event("worker lost", worker=1, reason="no heartbeat")
        >>> [(e.name, e.facts) for e in registry.snapshot().events]
        [('worker lost', {'worker': 1, 'reason': 'no heartbeat'})]
    """

    time_s: float
    """Seconds since 1970, by the clock of the process that recorded the event."""

    name: str
    """Description of the occurrence."""

    facts: Mapping[str, Plain] = field(default_factory=dict)
    """Values that belong to the occurrence."""

    source: str = ""
    """Task that recorded the event, such as ``worker 0``; empty in the task itself."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Contents of a registry at one moment.

    Example:
        >>> from stratagem import metrics
        >>> here = metrics.Registry()
        >>> here.counter("steps").add(3)
        >>> here.snapshot().counters
        {'steps': 3}
    """

    counters: Mapping[str, Number] = field(default_factory=dict)
    timers: Mapping[str, DistributionSnapshot] = field(default_factory=dict)
    distributions: Mapping[str, DistributionSnapshot] = field(default_factory=dict)

    gauges: Mapping[str, float] = field(default_factory=dict)
    """Values that rise and fall; merging adds them up."""

    scalars: Mapping[str, ScalarSnapshot] = field(default_factory=dict)
    """Values that the program logged with `metrics.log`."""

    events: tuple[Event, ...] = ()
    """Latest events, oldest first."""


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Return one snapshot of all: counts are added, events are ordered by time.

    Give the latest snapshot of each process, since a snapshot counts from its process's start.

    Example:
        >>> from stratagem import metrics
        >>> workers = [metrics.Registry() for _ in range(2)]
        >>> for worker in workers:
        ...     worker.counter("steps").add(10)
        >>> metrics.merge(worker.snapshot() for worker in workers).counters
        {'steps': 20}
    """
    counters: dict[str, Number] = {}
    timers: dict[str, DistributionSnapshot] = {}
    distributions: dict[str, DistributionSnapshot] = {}
    gauges: dict[str, float] = {}
    scalars: dict[str, ScalarSnapshot] = {}
    events: list[Event] = []
    for one in snapshots:
        for name, value in one.counters.items():
            counters[name] = counters.get(name, 0) + value
        for into, found in ((timers, one.timers), (distributions, one.distributions)):
            for name, seen in found.items():
                into[name] = into[name].merged(seen) if name in into else seen
        for name, value in one.gauges.items():
            gauges[name] = gauges.get(name, 0.0) + value
        for name, logged in one.scalars.items():
            scalars[name] = scalars[name].merged(logged) if name in scalars else logged
        events.extend(one.events)
    return Snapshot(
        counters=counters,
        timers=timers,
        distributions=distributions,
        gauges=gauges,
        scalars=scalars,
        events=tuple(sorted(events, key=lambda e: e.time_s)),
    )
