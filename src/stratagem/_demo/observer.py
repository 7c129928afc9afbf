"""Picture for the terminal, made from a view of the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem._demo.view import Curve, Picture, ServerRow, WorkerRow
from stratagem._monitor.advice import advise
from stratagem._monitor.cluster_view import ClusterView, WorkerView
from stratagem._monitor.markup import event_text

__all__ = ["picture_of", "server_rows", "worker_rows"]

_EVENTS = 4
_CURVES = 3


def picture_of(view: ClusterView, *, title: str) -> Picture:
    """Return the picture of a cluster that another program uses.

    Example:
        >>> picture_of(ClusterView(time_s=0.0, steps=7), title="top").done_steps
        7
    """
    curves: list[Curve] = [
        Curve(label=scalar.name, values=[value for _, value in scalar.points])
        for scalar in view.scalars[:_CURVES]
    ]
    return Picture(
        title=title,
        done_steps=view.steps,
        total_steps=0,
        elapsed_s=view.elapsed_s,
        examples_per_s=None,
        steps_per_s=view.steps_per_s,
        curves=curves,
        workers=worker_rows(view),
        servers=server_rows(view),
        staleness_mean=view.staleness_mean,
        staleness_p99=view.staleness_p99,
        advice=[str(one) for one in advise(view)],
        notes=[event_text(event) for event in view.events[-_EVENTS:]],
    )


def worker_rows(view: ClusterView) -> Sequence[WorkerRow]:
    """Return one row per worker."""
    return [
        WorkerRow(
            name=worker.name,
            state=worker.state,
            steps=worker.steps,
            restarts=worker.restarts,
            steps_per_s=worker.steps_per_s,
            time_use=_time_use(worker),
            is_straggler=worker.is_straggler,
        )
        for worker in view.workers
    ]


def server_rows(view: ClusterView) -> Sequence[ServerRow]:
    """Return one row per parameter server."""
    return [
        ServerRow(
            name=server.name,
            state="checkpoint" if server.is_checkpointing else server.state,
            held_bytes=server.variable_bytes,
            updates=server.updates,
            updates_per_s=server.updates_per_s,
            busy_share=server.busy_share,
            refused=server.duplicates + server.fenced,
        )
        for server in view.servers
    ]


def _time_use(worker: WorkerView) -> str:
    """Return the two phases that take most of a worker's time."""
    longest = sorted(worker.phases.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{phase} {100 * share:.0f} %" for phase, share in longest if share >= 0.05)
