"""State of one worker in the closure queue, and the number of closures to send ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, final

AHEAD_S: Final = (
    0.04  # work sent ahead to a worker: several wake-ups, and little to repeat after a loss
)
MIN_WINDOW: Final = 2  # closures at one worker, the running one included
MAX_WINDOW: Final = 64


@final
@dataclass(slots=True)
class QueueWorker:
    """State of one worker in the queue."""

    incarnation: int = 0
    up: bool = False
    draining: bool = False
    window: int = MIN_WINDOW
    mean_run_s: float = 0.0
    in_flight: dict[int, None] = field(default_factory=dict)  # an ordered set, oldest first
    resources: dict[int, None] = field(default_factory=dict)  # resource closures in flight
    waiting_resources: deque[int] = field(default_factory=deque)
    fencing: list[int] | None = None  # closures that wait for the fence
    recalling: bool = False
    aside: bool = False  # its session is being ended, because it does not reach a server
    blameless: bool = False  # its last session was ended so: its closures did not cause the loss
    solo: bool = False  # runs a closure that was lost before, and nothing beside it
    sends_ahead: bool = True  # else the worker gets its next closure when the last one has ended
    started_at: int = 0  # under a `StartRule`: number of its last closure, in order of starts

    def __post_init__(self) -> None:
        if not self.sends_ahead:
            self.window = 1

    @property
    def least(self) -> int:
        """The smallest window of a worker that runs no long closure."""
        return MIN_WINDOW if self.sends_ahead else 1

    @property
    def has_room(self) -> bool:
        """True if the worker may get another closure."""
        blocked = not self.up or self.draining or self.recalling or self.solo or self.aside
        return not blocked and len(self.in_flight) < self.window

    def measured(self, run_s: float) -> None:
        """Adapt the window to how long the worker's closures take."""
        mean = self.mean_run_s
        self.mean_run_s = run_s if mean == 0.0 else 0.75 * mean + 0.25 * run_s
        window = int(AHEAD_S / max(self.mean_run_s, 1e-6))
        self.window = min(MAX_WINDOW, max(MIN_WINDOW, window)) if self.sends_ahead else 1

    def lost(self) -> QueueWorker:
        """Return the state after a loss: its closures wait for the fence."""
        return QueueWorker(
            incarnation=self.incarnation,
            draining=self.draining,
            window=self.window,
            sends_ahead=self.sends_ahead,
            started_at=self.started_at,
            fencing=list(self.in_flight),
            blameless=self.aside,
        )
