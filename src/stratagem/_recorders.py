"""Recorders of single values: counters, gauges, logged scalars, distributions and timers.

`metrics` names the recorders and offers these classes under its own name.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Self, final

from stratagem._snapshots import DistributionSnapshot, Number, ScalarSnapshot, bucket_of


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
                "Use a gauge or a distribution for values that rise and fall."
            )
        with self._lock:
            self._value += amount

    @property
    def value(self) -> Number:
        """Current count."""
        return self._value

    def __repr__(self) -> str:
        return f"<Counter {self.name}: {self._value}>"


@final
class Gauge:
    """A number that rises and falls, such as memory in use.

    Example:
        >>> from stratagem import metrics
        >>> memory = metrics.Registry().gauge("memory_bytes")
        >>> memory.set(4096)
        >>> memory
        <Gauge memory_bytes: 4096>
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: Number = 0

    def set(self, value: Number) -> None:
        """Replace the value."""
        self.value = value

    def __repr__(self) -> str:
        return f"<Gauge {self.name}: {self.value}>"


@final
class ScalarRecorder:
    """Values that a program logs under one name."""

    __slots__ = ("_count", "_last", "_lock", "_not_finite", "_time_s", "_total")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._not_finite = 0
        self._total = self._time_s = 0.0
        self._last = math.nan

    def record(self, value: float) -> None:
        """Record one value."""
        with self._lock:
            if math.isfinite(value):
                self._count += 1
                self._total += value
                self._last = value
            else:
                self._not_finite += 1
            self._time_s = time.time()

    def snapshot(self) -> ScalarSnapshot:
        """Return the values as plain data."""
        with self._lock:
            return ScalarSnapshot(
                count=self._count,
                total=self._total,
                last=self._last,
                not_finite=self._not_finite,
                time_s=self._time_s,
            )


class Recorder:
    """Common part of `Distribution` and `Timer`: exact count, sum and extremes, and buckets."""

    __slots__ = ("_buckets", "_count", "_lock", "_maximum", "_minimum", "_total", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._count = 0
        self._total = 0.0
        self._minimum = math.inf
        self._maximum = -math.inf
        self._buckets: dict[int, int] = {}

    def record(self, value: Number) -> None:
        """Record one value. Raise for NaN, which would make the sum NaN."""
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


@final
class Distribution(Recorder):
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
class Timer(Recorder):
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
