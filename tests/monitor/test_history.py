"""Samples over time become rates, shares, curves and events; pure functions of plain data."""

from __future__ import annotations

import math

import pytest

from stratagem import metrics
from stratagem._monitor import history as module
from stratagem._monitor.history import ClusterHistory
from stratagem._monitor.samples import ClusterSample, TaskSample


def worker(
    index: int = 0,
    *,
    steps: float = 0,
    at: float = 0.0,
    identity: str = "1",
    state: str = "running",
    seen: metrics.Snapshot | None = None,
    **numbers: float,
) -> TaskSample:
    counts = {"worker.steps": steps, "worker.session_s": at}
    counts |= {f"worker.{name}": value for name, value in numbers.items()}
    return TaskSample(
        name=f"worker {index}",
        state=state,
        identity=identity,
        restarts=int(identity) - 1,
        numbers=counts if state == "running" else {},
        metrics=seen or metrics.Snapshot(),
    )


def test_rates_use_the_clock_of_the_task() -> None:
    """A late heartbeat does not distort the rate: the worker counts its own seconds."""
    history = ClusterHistory()
    history.add(ClusterSample(time_s=100.0, workers=(worker(at=10.0, steps=100),)))
    view = history.add(ClusterSample(time_s=104.0, workers=(worker(at=12.0, steps=140),)))
    assert view.workers[0].steps_per_s == 20.0
    assert view.steps == 140
    assert view.elapsed_s == 4.0


def test_a_restarted_worker_keeps_its_steps_and_has_no_negative_rate() -> None:
    """A new incarnation counts from zero; the total goes on."""
    history = ClusterHistory()
    history.add(ClusterSample(time_s=0.0, workers=(worker(at=5.0, steps=100),)))
    lost = history.add(ClusterSample(time_s=1.0, workers=(worker(state="lost"),)))
    assert lost.lost == ("worker 0",)
    assert lost.steps == 100
    assert lost.workers[0].steps_per_s is None
    again = worker(at=0.5, steps=3, identity="2")
    view = history.add(ClusterSample(time_s=2.0, workers=(again,)))
    assert view.steps == 103
    assert view.workers[0].steps_per_s is None
    again = worker(at=1.5, steps=13, identity="2")
    view = history.add(ClusterSample(time_s=3.0, workers=(again,)))
    assert view.workers[0].steps_per_s == 10.0
    assert view.health == "healthy"


def registry(**timers: float) -> metrics.Snapshot:
    found = metrics.Registry()
    for name, seconds in timers.items():
        found.timer(name.replace("_", ".", 1)).record(seconds)
    return found.snapshot()


def test_the_phases_of_a_worker_add_up_to_one() -> None:
    """Every second of the worker is in one phase; waiting inside a push is not pushing."""
    history = ClusterHistory()
    history.add(
        ClusterSample(time_s=0.0, workers=(worker(at=0.0, run_s=0.0, idle_s=0.0, ack_s=0.0),))
    )
    seen = registry(input_next=1.0, ps_read=0.5, ps_push=2.0, ps_acknowledge=1.5)
    now = worker(at=10.0, steps=1, run_s=6.0, idle_s=2.0, ack_s=1.0, seen=seen)
    phases = history.add(ClusterSample(time_s=2.0, workers=(now,))).workers[0].phases
    assert phases == pytest.approx(
        {
            "waiting for work": 0.2,
            "waiting for input": 0.1,
            "reading": 0.05,
            "computing": 0.25,
            "pushing": 0.05,
            "waiting for acknowledgement": 0.25,
            "other": 0.1,
        }
    )
    assert sum(phases.values()) == pytest.approx(1.0)


def test_staleness_is_that_of_the_last_seconds() -> None:
    """Values before the window do not count, although the distribution is cumulative."""
    counted = metrics.Registry()
    spread = counted.distribution("ps.staleness")
    for _ in range(100):
        spread.record(50)
    history = ClusterHistory()
    history.add(ClusterSample(time_s=0.0, workers=(worker(at=0.0, seen=counted.snapshot()),)))
    for _ in range(10):
        spread.record(2)
    view = history.add(
        ClusterSample(time_s=1.0, workers=(worker(at=1.0, seen=counted.snapshot()),))
    )
    assert view.staleness_mean == 2.0
    assert view.staleness_p99 is not None
    assert view.staleness_p99 < 3


def test_logged_values_become_one_curve_of_all_workers() -> None:
    """A point is the mean of what workers and program logged since the point before; NaN is counted."""
    first, second = metrics.Registry(), metrics.Registry()
    history = ClusterHistory()
    first.log("loss", 4.0)
    second.log("loss", 2.0)
    tasks = (worker(0, seen=first.snapshot()), worker(1, seen=second.snapshot()))
    history.add(ClusterSample(time_s=0.0, workers=tasks))
    first.log("loss", 1.0)
    second.log("loss", math.nan)
    tasks = (worker(0, seen=first.snapshot()), worker(1, seen=second.snapshot()))
    (scalar,) = history.add(ClusterSample(time_s=1.0, workers=tasks)).scalars
    assert scalar.points == ((0.0, 3.0), (1.0, 1.0))
    assert scalar.not_finite == 1
    (scalar,) = history.add(ClusterSample(time_s=2.0, workers=tasks)).scalars
    assert len(scalar.points) == 2, "nothing was logged since"


def test_tables_show_rows_and_the_share_of_distinct_rows() -> None:
    """Counts of all workers, the hottest table first."""
    counts = {"table.ids:a": 100, "table.rows:a": 10, "table.ids:b": 10, "table.rows:b": 9}
    seen = metrics.Snapshot(counters=counts)
    history = ClusterHistory()
    history.add(ClusterSample(time_s=0.0, workers=(worker(), worker(1))))
    view = history.add(
        ClusterSample(time_s=2.0, workers=(worker(at=2.0, seen=seen), worker(1, at=2.0, seen=seen)))
    )
    assert [(one.name, one.rows, one.distinct_share) for one in view.tables] == [
        ("a", 20, 0.1),
        ("b", 18, 0.9),
    ]
    assert view.tables[0].rows_per_s == 10.0


def test_a_slow_worker_is_marked_unless_it_waits_for_work() -> None:
    """A straggler is slower than the others although it has work."""

    def look(idle_s: float) -> list[bool]:
        history = ClusterHistory()
        tasks = [worker(index, at=0.0, idle_s=0.0, run_s=0.0, ack_s=0.0) for index in range(3)]
        history.add(ClusterSample(time_s=0.0, workers=tuple(tasks)))
        steps = (40, 40, 10)
        tasks = [
            worker(index, at=4.0, steps=steps[index], run_s=4.0 - idle_s, idle_s=idle_s, ack_s=0.0)
            for index in range(3)
        ]
        view = history.add(ClusterSample(time_s=4.0, workers=tuple(tasks)))
        return [one.is_straggler for one in view.workers]

    assert look(idle_s=0.1) == [False, False, True]
    assert look(idle_s=3.9) == [False, False, False]


def test_events_are_kept_once_and_named_after_their_task() -> None:
    """A snapshot repeats its events; a process does not know its own name."""
    here = metrics.Registry()
    here.event("checkpoint_committed", step=3)
    history = ClusterHistory()
    for time_s in (0.0, 1.0, 2.0):
        sample = ClusterSample(time_s=time_s, workers=(worker(at=time_s, seen=here.snapshot()),))
        view = history.add(sample)
    (event,) = view.events
    assert (event.source, event.name, dict(event.facts)) == (
        "worker 0",
        "checkpoint_committed",
        {"step": 3},
    )


def test_a_monitor_detects_lost_and_restarted_tasks_by_itself() -> None:
    """Without the program's own events, changes of state become events."""
    history = ClusterHistory()
    history.add(ClusterSample(time_s=0.0, workers=(worker(at=1.0),)))
    history.add(ClusterSample(time_s=1.0, workers=(worker(state="no answer"),)))
    view = history.add(ClusterSample(time_s=2.0, workers=(worker(at=0.1, identity="2"),)))
    assert [event.name for event in view.events] == [
        "does not answer",
        "answers again",
        "restarted",
    ]


def test_long_runs_keep_a_bounded_number_of_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are averaged when a curve is full, so that it always covers the whole run."""
    monkeypatch.setattr(module, "POINTS", 8)
    history = ClusterHistory()
    for number in range(20):
        seconds = float(number)
        view = history.add(
            ClusterSample(time_s=seconds, workers=(worker(at=seconds, steps=10 * seconds),))
        )
    assert len(view.series.times) <= 8
    assert view.series.times[0] < 4.0
    assert view.series.times[-1] == 19.0
    assert view.series.generation > 0
    known = [rate for rate in view.series.columns["steps/total"] if not math.isnan(rate)]
    assert known == pytest.approx([10.0] * len(known))
