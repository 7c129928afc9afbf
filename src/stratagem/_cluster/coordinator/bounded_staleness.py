"""Start closures so that none misses the updates of more than a given number of others.

A closure reads the parameters when it starts, and writes them before it ends. The updates between its read and its
write are made by closures that run beside it, and by closures that ended since it started. So the rule keeps, for
every running closure::

    closures ended since its start + other closures running now  <=  limit

An end moves one closure from the second term to the first, so that only starts must be checked. The oldest running closure
has the largest first term: checking that one is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from typing_extensions import override

from stratagem._cluster.coordinator.closure_actions import Action, DeliverResults, SendClosures


@final
class BoundedStaleness:
    """A `StartRule`: each closure misses at most `limit` closures of others.

    Example:
        >>> rule = BoundedStaleness(1)
        >>> rule.started(1, 0)
        >>> rule.started(2, 1)
        >>> rule.ended(2)
        >>> rule.choices(1, [3])  # closure 1 would miss the updates of 2 and of 3
        ()
        >>> rule.ended(1)
        >>> rule.choices(1, [3])
        [3]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ended = 0
        self._running: dict[int, int] = {}  # oldest first; closures that had ended at its start

    @property
    def may_start(self) -> int:
        """Number of closures that may start now."""
        oldest = next(iter(self._running.values()), self._ended)
        return max(0, self._limit + 1 - (self._ended - oldest) - len(self._running))

    def choices(self, worker: int, queued: Sequence[int]) -> Sequence[int]:
        """Return all queued closures if one may start."""
        del worker
        return queued if self.may_start else ()

    def next(self, queued: Sequence[int], free: Sequence[int]) -> list[Action]:
        """Send to as many workers as may start a closure."""
        return [SendClosures(worker) for worker in free[: min(self.may_start, len(queued))]]

    def started(self, closure: int, worker: int) -> None:
        """Count the ends from here on."""
        del worker
        self._running[closure] = self._ended

    def returned(self, closures: Iterable[int]) -> None:
        """Forget closures that did not write."""
        for closure in closures:
            self._running.pop(closure, None)

    def ended(self, closure: int) -> None:
        """Count an update."""
        if self._running.pop(closure, None) is not None:
            self._ended += 1

    def lost(self, closures: Iterable[int]) -> None:
        """Count updates that were perhaps made."""
        for closure in closures:
            self.ended(closure)

    def resolved(self, closures: Iterable[int]) -> None:
        """Count updates that were perhaps made; queued closures made none."""
        self.lost(closures)

    def requeued(self, closures: Sequence[int]) -> bool:
        """Return False: they run after the others."""
        del closures
        return False

    def deliver(self, closures: tuple[int, ...]) -> list[Action]:
        """Deliver results at once."""
        return [DeliverResults(closures)]

    @property
    def is_open(self) -> bool:
        """False: nothing waits."""
        return False

    @override
    def __repr__(self) -> str:
        return f"<BoundedStaleness {self._limit}: {len(self._running)} running, {self.may_start} may start>"
