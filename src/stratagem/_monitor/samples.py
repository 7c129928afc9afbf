"""State of a cluster at one moment, as its tasks report it: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stratagem._snapshots import Snapshot


@dataclass(frozen=True, kw_only=True)
class TaskSample:
    """Report of one worker or server.

    Example:
        >>> TaskSample(name="worker 0", state="running", numbers={"worker.steps": 3}).steps
        3
    """

    name: str
    """``worker 0`` or ``ps 0``."""

    state: str
    """``running``, ``idle``, ``lost``, ``no answer``, ``wrong key`` or ``refused`` (by another release)."""

    identity: str = ""
    """Changes when the task starts again and counts from zero."""

    restarts: int = 0

    numbers: Mapping[str, float] = field(default_factory=dict)
    """Cumulative counts and present values by name."""

    metrics: Snapshot = Snapshot()  # noqa: RUF009 - immutable
    """Timers, distributions, scalars and events of the task."""

    @property
    def answers(self) -> bool:
        """True if the task reported anything."""
        return self.state in ("running", "idle")

    @property
    def steps(self) -> int:
        """Closures that the worker has finished since it started."""
        return int(self.numbers.get("worker.steps", 0))


@dataclass(frozen=True, kw_only=True)
class ClusterSample:
    """Reports of all tasks.

    Example:
        >>> ClusterSample(time_s=0.0).program is None
        True
    """

    time_s: float
    """Seconds since 1970."""

    workers: tuple[TaskSample, ...] = ()
    servers: tuple[TaskSample, ...] = ()

    program: Snapshot | None = None
    """Metrics of the process that schedules; None if another process watches the cluster."""

    queued: int | None = None
    """Closures that wait for a worker."""

    in_flight: int | None = None
    """Closures that were sent to a worker."""
