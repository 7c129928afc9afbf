"""Metrics of a cluster in the text format of Prometheus.

Names and units follow Prometheus' conventions: base units, ``_total`` for counters, one label ``task``. The buckets of
histograms are powers of two, where our own buckets have edges, so that the counts are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from stratagem._monitor.cluster_view import ClusterView
from stratagem._snapshots import DistributionSnapshot, count_below

# Edges of the buckets. Durations: below 2**-20 s (1 µs) … 2**6 s. A duration of exactly an edge counts in
# the next bucket; clocks do not return such values in practice.
_SECONDS: Final = {repr(2.0**power): 2.0**power for power in range(-20, 7)}
# Whole numbers: below 1, 2, 4 … means at most 0, 1, 3 …
_WHOLE: Final = {f"{2.0**power - 1:.1f}": 2.0**power for power in range(11)}

_TIMERS: Final = {
    "closure.queue": ("closure_queue_seconds", "Time from schedule() until a worker begins."),
    "closure.send": ("closure_send_seconds", "Time for sending a closure and its result."),
    "closure.compute": ("closure_run_seconds", "Run time of closures on the workers."),
    "input.next": ("input_wait_seconds", "Waiting for the next element of a dataset."),
    "ps.read": ("read_seconds", "Reading rows of tables."),
    "ps.refresh": ("refresh_seconds", "Updating copies of whole parameters."),
    "ps.push": ("push_seconds", "Sending gradients and waiting until they are applied."),
    "ps.acknowledge": ("acknowledge_seconds", "Waiting until gradients are applied."),
}

Values = Mapping[str, float | None]


def exposition(view: ClusterView) -> tuple[bytes, str]:
    """Return the metrics of a view, and their content type.

    Example:
        >>> from stratagem._monitor.cluster_view import WorkerView
        >>> worker = WorkerView(name="worker 0", state="running", steps=7)
        >>> text, _ = exposition(ClusterView(time_s=0.0, workers=(worker,)))
        >>> print(next(one for one in text.decode().splitlines() if "steps_total{" in one))
        stratagem_worker_steps_total{task="worker-0"} 7.0
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(view))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Families(Collector):
    """Metric families of one view."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def collect(self) -> Iterator[Any]:
        """Yield every family."""
        yield from _of_workers(self._view)
        yield from _of_servers(self._view)
        yield from _of_processes(self._view)
        yield from _of_the_program(self._view)
        yield from _histograms(self._view)


def _of_workers(view: ClusterView) -> Iterator[Any]:
    workers = {_task(one.name): one for one in view.workers}
    steps = {task: one.steps for task, one in workers.items()}
    yield _counter("worker_steps", "Closures that workers have finished.", steps)
    restarts = {task: one.restarts for task, one in workers.items()}
    yield _counter("worker_restarts", "Incarnations of workers after the first.", restarts)
    slow = {task: one.is_straggler for task, one in workers.items()}
    yield _gauge("worker_straggler", "1 if the worker is much slower than the others.", slow)
    shares = GaugeMetricFamily(
        "stratagem_worker_time_ratio",
        "Share of the last seconds that a worker used for each phase.",
        labels=["task", "phase"],
    )
    for task, one in workers.items():
        for phase, part in one.phases.items():
            shares.add_metric([task, phase.replace(" ", "_")], part)
    yield shares


def _of_servers(view: ClusterView) -> Iterator[Any]:
    for make, name, help_text, field in (
        (_counter, "updates", "Writes that servers have applied.", "updates"),
        (_counter, "duplicate_writes", "Repeated writes that were ignored.", "duplicates"),
        (_counter, "fenced_writes", "Writes of lost workers that were refused.", "fenced"),
        (_gauge, "held_bytes", "Variables and optimizer state in memory.", "held_bytes"),
        (_gauge, "limit_bytes", "Limit of variables and optimizer state.", "limit_bytes"),
        (_gauge, "busy_ratio", "Share of the last seconds that a server worked.", "busy_share"),
        (_gauge, "checkpointing", "1 while a checkpoint is read or written.", "is_checkpointing"),
    ):
        values = {_task(one.name): getattr(one, field) for one in view.servers}
        yield make(f"server_{name}", help_text, values)


def _of_processes(view: ClusterView) -> Iterator[Any]:
    up = {_task(one.name): one.state in ("running", "idle") for one in view.tasks}
    memory = {_task(one.name): one.memory_bytes for one in view.tasks}
    cpu = {_task(one.name): one.cpu_share for one in view.tasks}
    if view.program is not None:
        up["coordinator"] = True
        memory["coordinator"] = view.program.memory_bytes
        cpu["coordinator"] = view.program.cpu_share
    yield _gauge("up", "1 if the task answers.", up)
    yield _gauge("memory_bytes", "Resident memory of the task's process.", memory)
    yield _gauge("cpu_ratio", "Processors that the task used in the last seconds.", cpu)


def _of_the_program(view: ClusterView) -> Iterator[Any]:
    program = view.program
    if program is not None:
        for name, help_text, value in (
            ("queued", "Closures that wait for a worker.", program.queued),
            ("in_flight", "Closures that were sent to a worker.", program.in_flight),
        ):
            yield GaugeMetricFamily(f"stratagem_closures_{name}", help_text, value=value)
        for name in ("scheduled", "completed", "failed", "retried", "closures_repeated"):
            count = program.counters.get(f"coordinator.{name}", 0)
            label = name.removeprefix("closures_")
            yield CounterMetricFamily(
                f"stratagem_closures_{label}", f"Closures {label} so far.", value=count
            )
    rows = {one.name: one.rows for one in view.tables}
    yield _counter("table_rows", "Distinct rows read in lookups.", rows, "table")
    ids = {one.name: one.ids for one in view.tables}
    yield _counter("table_ids", "Ids asked for in lookups.", ids, "table")
    last = {one.name: one.last for one in view.scalars}
    yield _gauge("logged_value", "Latest value of sg.metrics.log(name, value).", last, "name")
    bad = {one.name: one.not_finite for one in view.scalars}
    yield _counter("logged_not_finite", "Logged values that were NaN or infinite.", bad, "name")
    events = Counter(event.name for event in view.events)
    yield _counter("events", "Events still kept, such as worker_lost.", events, "event")


def _histograms(view: ClusterView) -> Iterator[Any]:
    tasks = [(_task(one.name), one.timers, one.staleness) for one in view.workers]
    if view.program is not None:
        tasks.append(("coordinator", view.program.timers, view.program.staleness))
    for timer, (name, help_text) in _TIMERS.items():
        seen = {task: timers.get(timer) for task, timers, _ in tasks}
        yield _histogram(name, help_text, seen, _SECONDS)
    yield _histogram(
        "staleness_updates",
        "Updates by others between a worker's read and its write.",
        {task: staleness for task, _, staleness in tasks if staleness.count},
        _WHOLE,
    )


def _histogram(
    name: str,
    help_text: str,
    seen: Mapping[str, DistributionSnapshot | None],
    edges: Mapping[str, float],
) -> Any:
    family = HistogramMetricFamily(f"stratagem_{name}", help_text, labels=["task"])
    for task, one in seen.items():
        if one is not None:
            buckets = [(text, count_below(one, edge)) for text, edge in edges.items()]
            family.add_metric([task], [*buckets, ("+Inf", one.count)], sum_value=one.total)
    return family


def _counter(name: str, help_text: str, values: Values, label: str = "task") -> Any:
    return _family(CounterMetricFamily, name, help_text, values, label)


def _gauge(name: str, help_text: str, values: Values, label: str = "task") -> Any:
    return _family(GaugeMetricFamily, name, help_text, values, label)


def _family(kind: Any, name: str, help_text: str, values: Values, label: str) -> Any:
    """Return a family with one value for each label; those that are None are not known."""
    family = kind(f"stratagem_{name}", help_text, labels=[label])
    for labelled, value in values.items():
        if value is not None:
            family.add_metric([labelled], float(value))
    return family


def _task(name: str) -> str:
    """Return ``worker-0`` for ``worker 0``."""
    return name.replace(" ", "-")
