"""Tables of a `ClusterView` as texts, for the page and the terminal.

A row is a dictionary from heading to text; each view shows the columns that it has room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stratagem._monitor.cluster_view import ClusterView, WorkerView
from stratagem._snapshots import Event

Rows = list[dict[str, str]]

GOOD_STATES: Final = ("running", "idle", "checkpoint")
"""Texts in the column "state" that need no attention."""

_UNITS: Final = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def worker_rows(view: ClusterView) -> Rows:
    """Return one row for each worker; stragglers are marked."""
    return [
        {
            "worker": one.name,
            "state": "straggler" if one.is_straggler else one.state,
            "steps": f"{one.steps:,}",
            "steps/s": number(one.steps_per_s),
            "CPU": share(one.cpu_share),
            "memory": size(one.memory_bytes),
            "restarts": str(one.restarts),
            "time": time_use(one),
        }
        for one in view.workers
    ]


def server_rows(view: ClusterView) -> Rows:
    """Return one row for each parameter server."""
    return [
        {
            "server": one.name,
            "state": "checkpoint" if one.is_checkpointing else one.state,
            "variables": size(one.variable_bytes),
            "updates": f"{one.updates:,}",
            "updates/s": number(one.updates_per_s),
            "busy": share(one.busy_share),
            "duplicates": f"{one.duplicates:,}",
            "fenced": f"{one.fenced:,}",
            "CPU": share(one.cpu_share),
            "memory": size(one.memory_bytes),
            "restarts": str(one.restarts),
        }
        for one in view.servers
    ]


def table_rows(view: ClusterView) -> Rows:
    """Return one row for each embedding table, the one with the most reads first."""
    return [
        {
            "table": one.name,
            "rows/s": number(one.rows_per_s),
            "rows read": f"{one.rows:,}",
            "ids asked": f"{one.ids:,}",
            "distinct": share(one.distinct_share),
        }
        for one in view.tables
    ]


def event_text(event: Event) -> str:
    """Return an event as one line."""
    facts = ", ".join(f"{name}={value}" for name, value in event.facts.items())
    source = f"{event.source}: " if event.source else ""
    name = event.name.replace("_", " ")
    return f"{source}{name} ({facts})" if facts else f"{source}{name}"


def time_use(worker: WorkerView) -> str:
    """Return the two phases that take most of a worker's time."""
    phases: Mapping[str, float] = worker.phases
    longest = sorted(phases.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{phase} {share(part)}" for phase, part in longest if part >= 0.05)


def number(value: float | None) -> str:
    """Return a rate with three digits; a dash if it is not known."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a share in percent; a dash if it is not known."""
    return "–" if value is None else f"{100 * value:.0f} %"


def size(value: int | None) -> str:
    """Return a number of bytes with three digits; a dash if it is not known.

    Example:
        >>> size(2_500_000), size(12), size(None)
        ('2.5 MB', '12 B', '–')
    """
    if value is None:
        return "–"
    unit, scale = next((one for one in _UNITS if value >= one[1]), ("B", 1.0))
    return f"{value / scale:.3g} {unit}"
