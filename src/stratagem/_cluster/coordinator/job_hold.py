"""The engine's part in a named job (docs/design/0009): continued closure numbers, and replacement by a new coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from stratagem._cluster.coordinator.closure_table import Cause, ClosureTable
from stratagem.errors import CoordinatorReplaced

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine


@final
class JobHold:
    """The named job of one engine, if it has one.

    Attributes:
        job: the job, or None.
        before_first: incarnations of workers have larger numbers.
        replaced: the error, once a newer coordinator has the job.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.job = engine.views.job
        self.before_first = 0 if self.job is None else self.job.first_incarnation
        self.replaced: CoordinatorReplaced | None = None

    def closure_table(self) -> ClosureTable:
        """Return the table of the closures, numbered after those of earlier coordinators."""
        limit_s = self._engine.options.heartbeat_limit_s
        if self.job is None:
            return ClosureTable(limit_s)
        return ClosureTable(limit_s, self.job.first_closure, may_repeat=True)

    def sessions(self, incarnation: int) -> int:
        """Return how many sessions a worker has had with this coordinator, given its incarnation."""
        return max(0, incarnation - self.before_first)

    def watch(self) -> None:
        """Stop the engine when a newer coordinator has the job."""
        if self.job is not None:
            self.job.on_replaced(self.note)

    def note(self, error: Exception) -> None:
        """Stop everything, for good, if the error says that a newer coordinator has the job."""
        if isinstance(error, CoordinatorReplaced) and self.replaced is None:
            self.replaced = error
            self._engine.handle(self._engine.queue.server_lost, Cause(error))

    def check(self) -> None:
        """Raise if this coordinator may not schedule."""
        if self.replaced is not None:
            raise self.replaced
        if self.job is not None:
            self.job.check_resumed()
