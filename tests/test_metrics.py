"""Metrics: exact counts, bounded memory, merging across processes."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem import metrics
from stratagem._wire import messages

positive = st.floats(min_value=1e-11, max_value=1e17, allow_nan=False)


def test_counts_of_many_threads_are_exact() -> None:
    """No addition is lost when several threads count at once."""
    registry = metrics.Registry()
    together = threading.Barrier(4)

    def work() -> None:
        counter, spread = registry.counter("steps"), registry.distribution("size")
        together.wait(timeout=120)
        for i in range(5_000):
            counter.add()
            spread.record(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    seen = registry.snapshot()
    assert seen.counters == {"steps": 20_000}
    assert seen.distributions["size"].count == 20_000
    assert sum(seen.distributions["size"].buckets.values()) == 20_000
    assert seen.distributions["size"].total == 4 * sum(range(5_000))


def test_counter_refuses_to_go_down() -> None:
    """A negative amount is an error that names the counter, and changes nothing."""
    counter = metrics.Registry().counter("rows")
    with pytest.raises(ValueError, match=r"'rows'.*amount=-1.*distribution"):
        counter.add(-1)
    assert counter.value == 0


@given(st.lists(positive, min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_within_one_bucket(values: list[float], fraction: float) -> None:
    """A quantile is off by at most an eighth of the value of that rank."""
    recorder = metrics.Registry().distribution("x")
    for value in values:
        recorder.record(value)
    ranked = sorted(values)
    exact = ranked[max(0, math.ceil(fraction * len(values)) - 1)]
    guess = recorder.snapshot().quantile(fraction)
    assert exact * (1 - 1 / 8) <= guess <= exact * (1 + 1 / 8) + 1e-300
    assert ranked[0] <= guess <= ranked[-1]


@given(st.lists(st.lists(positive, max_size=20), max_size=5))
def test_merging_equals_recording_in_one_place(parts: list[list[float]]) -> None:
    """Snapshots of several processes merge to what one process would have recorded."""
    whole = metrics.Registry()
    pieces = []
    for number, values in enumerate(parts):
        piece = metrics.Registry()
        for value in values:
            for registry in (piece, whole):
                registry.counter("n").add()
                registry.timer("t").record(value)
        pieces.append(piece.snapshot())
    merged = metrics.merge(pieces)
    expected = whole.snapshot()
    assert merged.counters == expected.counters
    for name, seen in expected.timers.items():
        got = merged.timers[name]
        assert (got.count, got.minimum, got.maximum) == (seen.count, seen.minimum, seen.maximum)
        assert got.buckets == seen.buckets
        assert got.total == pytest.approx(seen.total)


def test_memory_is_bounded_whatever_is_recorded() -> None:
    """A distribution has at most 801 buckets, from denormals to infinity."""
    recorder = metrics.Registry().distribution("wide")
    value = 5e-324
    while not math.isinf(value):
        recorder.record(value)
        value *= 1.01 if value > 1e-300 else 2
    recorder.record(math.inf)
    recorder.record(-3)
    recorder.record(0)
    seen = recorder.snapshot()
    assert len(seen.buckets) <= 801
    assert seen.minimum == -3
    assert seen.maximum == math.inf
    assert seen.buckets[0] == 2


def test_nan_is_refused() -> None:
    """NaN would poison the sum for ever."""
    recorder = metrics.Registry().timer("t")
    with pytest.raises(ValueError, match=r"'t' got nan"):
        recorder.record(math.nan)
    assert recorder.snapshot().count == 0


def test_timer_records_also_when_the_block_raises() -> None:
    """A failing step took its time too."""
    timer = metrics.Registry().timer("step")
    with pytest.raises(KeyError), timer.measure() as measurement:
        raise KeyError("x")
    assert timer.snapshot().count == 1
    assert timer.snapshot().total == measurement.seconds > 0


def test_the_oldest_events_are_dropped() -> None:
    registry = metrics.Registry()
    for number in range(metrics.EVENT_LIMIT + 7):
        registry.event("tick", number=number)
    seen = registry.snapshot()
    assert len(seen.events) == metrics.EVENT_LIMIT
    assert seen.events[0].facts == {"number": 7}


def test_merged_events_are_in_order_of_time() -> None:
    """Events of several processes interleave by their clocks."""
    first, second = metrics.Registry(), metrics.Registry()
    first.event("one")
    second.event("two")
    first.event("three")
    merged = metrics.merge([first.snapshot(), second.snapshot()])
    assert [e.name for e in merged.events] == ["one", "two", "three"]


def sent(seen: metrics.Snapshot) -> metrics.Snapshot:
    beat = messages.decode(messages.encode(messages.Beat(metrics=seen)))
    assert isinstance(beat, messages.Beat)
    assert beat.metrics is not None
    return beat.metrics


def test_messages_carry_snapshots() -> None:
    """Heartbeats do, with empty recorders, too."""
    registry = metrics.Registry()
    registry.counter("steps").add(2)
    registry.timer("idle")
    registry.distribution("rows").record(17)
    registry.event("lost", worker=2, why=None)
    seen = registry.snapshot()
    assert sent(seen) == seen


def test_quantile_of_nothing_is_nan_and_bad_fraction_is_refused() -> None:
    """An empty distribution has no quantile; a fraction is from 0 to 1."""
    empty = metrics.DistributionSnapshot()
    assert math.isnan(empty.quantile(0.5))
    assert math.isnan(empty.mean)
    with pytest.raises(ValueError, match=r"fraction=2"):
        empty.quantile(2)


def test_logged_values_are_counted_and_not_finite_ones_apart() -> None:
    """A NaN does not spoil the mean; numbers, tensors with gradients and numpy scalars are values."""
    import numpy as np
    import torch

    registry = metrics.Registry()
    for value in (1, torch.tensor(2.0, requires_grad=True), np.float32(3.0), math.nan, math.inf):
        registry.log("loss", value)
    seen = registry.snapshot().scalars["loss"]
    assert (seen.count, seen.mean, seen.last, seen.not_finite) == (3, 2.0, 3.0, 2)
    assert sent(registry.snapshot()).scalars["loss"] == seen


def test_names_of_logged_values_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A program that logs under ever new names loses those names, not its memory; one warning says so."""
    registry = metrics.Registry()
    for number in range(metrics.SCALAR_LIMIT + 5):
        registry.log(f"loss at step {number}", 1.0)
    seen = registry.snapshot()
    assert len(seen.scalars) == metrics.SCALAR_LIMIT
    assert seen.counters["metrics.names_dropped"] == 5
    assert len([one for one in caplog.records if "fixed names" in one.getMessage()]) == 1
    with pytest.raises(TypeError, match="expected a name"):
        registry.log(3, 1.0)  # type: ignore[arg-type]
