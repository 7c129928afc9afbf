"""State of one worker, as `coordinator.workers` returns it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """Present state of one worker.

    Example:
        >>> from stratagem._cluster.coordinator.worker_status import WorkerStatus
        >>> WorkerStatus(index=0, task="/job:worker/task:0", connected=True, incarnation=2).index
        0
    """

    index: int
    task: str
    connected: bool
    """True if it receives closures."""
    incarnation: int
    """How many sessions it has had with this coordinator: above 1, it was lost and came back."""
    address: str = ""
    draining: bool = False
    """True if it is leaving: it finishes the closure that it runs and gets no more."""
    last_error: BaseException | None = None
    """Why its last session ended, or why the last attempt to connect failed."""
