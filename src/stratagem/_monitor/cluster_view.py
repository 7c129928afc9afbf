"""`ClusterView`: the activity of a cluster in rates and shares, as plain data.

The terminal, the page, the report, Prometheus and the advice all read a `ClusterView`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stratagem._snapshots import DistributionSnapshot, Event

PHASES = (
    "waiting for work",
    "waiting for input",
    "reading",
    "computing",
    "pushing",
    "waiting for acknowledgement",
    "other",
)
"""Uses of a worker's time. ``other``: receiving closures and sending results."""


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker. Rates and shares concern the last seconds; None: not known yet."""

    name: str
    state: str
    steps: int = 0
    restarts: int = 0
    steps_per_s: float | None = None
    is_straggler: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)
    """Share of each of `PHASES`; empty if not known."""
    cpu_share: float | None = None
    """Processors in use, on average."""
    starved_share: float | None = None
    """Threads that wait for a processor, on average."""
    memory_bytes: int | None = None
    timers: Mapping[str, DistributionSnapshot] = field(default_factory=dict)
    """Since the worker's start."""
    staleness: DistributionSnapshot = DistributionSnapshot()  # noqa: RUF009 - immutable
    """Since the worker's start."""


@dataclass(frozen=True, kw_only=True)
class ServerView:
    """One parameter server. Rates and shares concern the last seconds; None: not known yet."""

    name: str
    state: str
    restarts: int = 0
    variable_bytes: int = 0
    held_bytes: int = 0
    """Variables and optimizer state."""
    limit_bytes: int = 0
    updates: int = 0
    updates_per_s: float | None = None
    duplicates: int = 0
    fenced: int = 0
    is_checkpointing: bool = False
    busy_share: float | None = None
    cpu_share: float | None = None
    starved_share: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class TableView:
    """One table of rows; the rates concern the last seconds."""

    name: str
    ids: int = 0
    """Ids asked for in lookups."""
    rows: int = 0
    """Distinct rows in those lookups, which is what servers deliver."""
    rows_per_s: float = 0.0
    distinct_share: float | None = None
    """Distinct rows among the ids of a lookup."""


@dataclass(frozen=True, kw_only=True)
class ScalarView:
    """Values that the program logged under one name."""

    name: str
    last: float
    not_finite: int = 0
    points: tuple[tuple[float, float], ...] = ()
    """(seconds since 1970, mean since the point before)."""


@dataclass(frozen=True, kw_only=True)
class ProgramView:
    """The process that schedules closures."""

    queued: int = 0
    in_flight: int = 0
    cpu_share: float | None = None
    starved_share: float | None = None
    memory_bytes: int | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    timers: Mapping[str, DistributionSnapshot] = field(default_factory=dict)
    staleness: DistributionSnapshot = DistributionSnapshot()  # noqa: RUF009 - immutable


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values over time, all at the same times. NaN: not known."""

    times: tuple[float, ...] = ()
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By name, such as ``steps/total`` or ``busy/ps 0``."""
    generation: int = 0
    """Changes when earlier points are replaced, and not when one is added."""


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """A cluster at one moment, and its history."""

    time_s: float
    """Seconds since 1970."""
    elapsed_s: float = 0.0
    """Since the first sample."""
    steps: int = 0
    steps_per_s: float | None = None
    staleness_mean: float | None = None
    staleness_p99: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Mean over the running workers; empty if not known."""
    workers: tuple[WorkerView, ...] = ()
    servers: tuple[ServerView, ...] = ()
    tables: tuple[TableView, ...] = ()
    """The table with the most rows per second first."""
    scalars: tuple[ScalarView, ...] = ()
    events: tuple[Event, ...] = ()
    """Oldest first."""
    program: ProgramView | None = None
    series: Series = Series()

    @property
    def tasks(self) -> tuple[WorkerView | ServerView, ...]:
        """All workers and servers."""
        return (*self.workers, *self.servers)

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the tasks that do not answer."""
        return tuple(one.name for one in self.tasks if one.state not in ("running", "idle"))

    @property
    def health(self) -> str:
        """One phrase: ``healthy``, or which tasks are missing."""
        if not self.lost:
            return "healthy"
        return f"{', '.join(self.lost)} {'does' if len(self.lost) == 1 else 'do'} not answer"
