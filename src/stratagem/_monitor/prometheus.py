"""Metrics of a cluster in the text format of Prometheus.

Names and units follow Prometheus' conventions: base units, ``_total`` for counters, one label ``task``. The buckets of
histograms are powers of two, where our own buckets have edges, so that the counts are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from stratagem._monitor.cluster_view import ClusterView, ServerView, WorkerView
from stratagem._snapshots import DistributionSnapshot, count_below

# Edges of the buckets. Durations: below 2**-20 s (1 µs) … 2**6 s. A duration of exactly an edge counts in
# the next bucket; clocks do not return such values in practice.
_SECONDS: Final = tuple(2.0**power for power in range(-20, 7))
# Whole numbers: below 1, 2, 4 … means at most 0, 1, 3 …
_WHOLE: Final = tuple(2.0**power for power in range(11))

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
        view = self._view
        yield from _of_workers(view.workers)
        yield from _of_servers(view.servers)
        yield from _of_program(view)
        yield from _histograms(view)
        rows = _counter("table_rows", "Distinct rows read in lookups.", "table")
        ids = _counter("table_ids", "Ids asked for in lookups.", "table")
        for table in view.tables:
            rows.add_metric([table.name], table.rows)
            ids.add_metric([table.name], table.ids)
        yield rows
        yield ids
        logged = _gauge("logged_value", "Latest value of sg.metrics.log(name, value).", "name")
        bad = _counter("logged_not_finite", "Logged values that were NaN or infinite.", "name")
        for scalar in view.scalars:
            logged.add_metric([scalar.name], scalar.last)
            bad.add_metric([scalar.name], scalar.not_finite)
        yield logged
        yield bad
        events = _counter("events", "Events that are still kept, such as worker_lost.", "event")
        counts: dict[str, int] = {}
        for event in view.events:
            counts[event.name] = counts.get(event.name, 0) + 1
        for name, count in sorted(counts.items()):
            events.add_metric([name], count)
        yield events


def _of_workers(workers: Sequence[WorkerView]) -> Iterator[Any]:
    steps = _counter("worker_steps", "Closures that workers have finished.")
    restarts = _counter("worker_restarts", "Incarnations of workers after the first.")
    shares = GaugeMetricFamily(
        "stratagem_worker_time_ratio",
        "Share of the last seconds that a worker used for each phase.",
        labels=["task", "phase"],
    )
    straggles = _gauge("worker_straggler", "1 if the worker is much slower than the others.")
    for worker in workers:
        task = _task(worker.name)
        steps.add_metric([task], worker.steps)
        restarts.add_metric([task], worker.restarts)
        straggles.add_metric([task], int(worker.is_straggler))
        for phase, share in worker.phases.items():
            shares.add_metric([task, phase.replace(" ", "_")], share)
    yield from (steps, restarts, shares, straggles)


def _of_servers(servers: Sequence[ServerView]) -> Iterator[Any]:
    counters = {
        "updates": _counter("server_updates", "Writes that servers have applied."),
        "duplicates": _counter("server_duplicate_writes", "Repeated writes that were ignored."),
        "fenced": _counter("server_fenced_writes", "Writes of lost workers that were refused."),
    }
    held = _gauge("server_held_bytes", "Variables and optimizer state in memory.")
    limit = _gauge("server_limit_bytes", "Limit of variables and optimizer state.")
    busy = _gauge("server_busy_ratio", "Share of the last seconds that a server worked.")
    saves = _gauge("server_checkpointing", "1 while rows go to or come from a checkpoint.")
    for server in servers:
        task = _task(server.name)
        for name, family in counters.items():
            family.add_metric([task], getattr(server, name))
        held.add_metric([task], server.held_bytes)
        limit.add_metric([task], server.limit_bytes)
        saves.add_metric([task], int(server.is_checkpointing))
        if server.busy_share is not None:
            busy.add_metric([task], server.busy_share)
    yield from (*counters.values(), held, limit, busy, saves)


def _of_program(view: ClusterView) -> Iterator[Any]:
    up = _gauge("up", "1 if the task answers.")
    memory = _gauge("memory_bytes", "Resident memory of the task's process.")
    cpu = _gauge("cpu_ratio", "Processors that the task used in the last seconds.")
    for name, state, size, share in [
        *((one.name, one.state, one.memory_bytes, one.cpu_share) for one in view.workers),
        *((one.name, one.state, one.memory_bytes, one.cpu_share) for one in view.servers),
        *(
            [("coordinator", "running", view.program.memory_bytes, view.program.cpu_share)]
            if view.program is not None
            else []
        ),
    ]:
        task = _task(name)
        up.add_metric([task], int(state in ("running", "idle")))
        if size is not None:
            memory.add_metric([task], size)
        if share is not None:
            cpu.add_metric([task], share)
    yield from (up, memory, cpu)
    if view.program is None:
        return
    for name, help_text in (
        ("queued", "Closures that wait for a worker."),
        ("in_flight", "Closures that were sent to a worker."),
    ):
        yield GaugeMetricFamily(
            f"stratagem_closures_{name}", help_text, value=getattr(view.program, name)
        )
    for name in ("scheduled", "completed", "failed", "retried", "closures_repeated"):
        value = view.program.counters.get(f"coordinator.{name}", 0)
        label = name.removeprefix("closures_")
        yield CounterMetricFamily(
            f"stratagem_closures_{label}", f"Closures {label} so far.", value=value
        )


def _histograms(view: ClusterView) -> Iterator[Any]:
    tasks: list[tuple[str, Mapping[str, DistributionSnapshot], DistributionSnapshot]] = [
        (one.name, one.timers, one.staleness) for one in view.workers
    ]
    if view.program is not None:
        tasks.append(("coordinator", view.program.timers, view.program.staleness))
    for timer, (name, help_text) in _TIMERS.items():
        family = HistogramMetricFamily(f"stratagem_{name}", help_text, labels=["task"])
        for task, timers, _ in tasks:
            if timer in timers:
                _add(family, task, timers[timer], _SECONDS, whole=False)
        yield family
    family = HistogramMetricFamily(
        "stratagem_staleness_updates",
        "Updates by others between a worker's read and its write.",
        labels=["task"],
    )
    for task, _, staleness in tasks:
        if staleness.count:
            _add(family, task, staleness, _WHOLE, whole=True)
    yield family


def _add(
    family: Any, task: str, seen: DistributionSnapshot, edges: Sequence[float], *, whole: bool
) -> None:
    buckets = [
        (f"{edge - 1:.1f}" if whole else repr(edge), count_below(seen, edge)) for edge in edges
    ]
    family.add_metric([_task(task)], [*buckets, ("+Inf", seen.count)], sum_value=seen.total)


def _counter(name: str, help_text: str, label: str = "task") -> Any:
    return CounterMetricFamily(f"stratagem_{name}", help_text, labels=[label])


def _gauge(name: str, help_text: str, label: str = "task") -> Any:
    return GaugeMetricFamily(f"stratagem_{name}", help_text, labels=[label])


def _task(name: str) -> str:
    """Return ``worker-0`` for ``worker 0``."""
    return name.replace(" ", "-")
