"""Rules that decide when a closure may start: their interface, and bounded staleness.

Under bounded staleness no closure misses the updates of more than a given number of others. A closure reads the
parameters when it starts, and writes them before it ends. The updates between its read and its write are made by closures
that run beside it, and by closures that ended since it started. So the rule keeps, for every running closure::

    closures ended since its start + other closures running now  <=  limit

An end moves one closure from the second term to the first, so that only starts must be checked. The oldest running closure
has the largest first term: checking that one is enough. The other rule is in `synchronous_rounds.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, final

from typing_extensions import override

from stratagem._cluster.coordinator.closure_actions import Action, DeliverResults, SendClosures
from stratagem._cluster.coordinator.synchronous_rounds import SynchronousRounds


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


class StartRule(Protocol):
    """A rule about which queued closures may start. Pure: the queue reports events, and asks.

    Under a rule a worker has one closure at a time. A closure has *ended* when it has written everything that it
    will ever write in this run.
    """

    def choices(self, worker: int, queued: Sequence[int]) -> Sequence[int]:
        """Return the first queued closures among which this worker may choose one now."""

    def next(self, queued: Sequence[int], free: Sequence[int]) -> list[Action]:
        """Return what to do now. `free`: workers that may get a closure, the longest idle one first."""

    def started(self, closure: int, worker: int) -> None:
        """Note a closure that is sent to a worker."""

    def returned(self, closures: Iterable[int]) -> None:
        """Note closures that a worker gives back unstarted."""

    def ended(self, closure: int) -> None:
        """Note a closure that returned a result or raised an error."""

    def lost(self, closures: Iterable[int]) -> None:
        """Note closures whose worker was lost and is fenced."""

    def resolved(self, closures: Iterable[int]) -> None:
        """Note closures that do not run again, and have no result."""

    def requeued(self, closures: Sequence[int]) -> bool:
        """Note closures that run again; return whether they run before all others."""

    def deliver(self, closures: tuple[int, ...]) -> list[Action]:
        """Return what to do with these results. Some may be those of resources, which the rule does not know."""

    @property
    def is_open(self) -> bool:
        """True if ended closures wait for something before their results are delivered."""


def start_rule(staleness: int | None) -> StartRule | None:
    """Return the rule of a strategy's `staleness`; None for asynchronous training."""
    if staleness is None:
        return None
    return BoundedStaleness(staleness) if staleness else SynchronousRounds()
