"""Rules that decide when a closure may start: their interface, bounded staleness, and synchronous rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Protocol, final

from typing_extensions import override

from stratagem._cluster.coordinator.closure_actions import (
    Action,
    DeliverResults,
    EndRound,
    SendClosures,
)


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


@final
class BoundedStaleness:
    """A `StartRule`: each closure misses the updates of at most `limit` others.

    A closure reads the parameters when it starts, and writes them before it ends. The updates between its read and its write
    are made by closures that run beside it, and by closures that ended since it started. So the rule keeps, for every running
    closure::

        closures ended since its start + other closures running now  <=  limit

    An end moves one closure from the second term to the first, so that only starts must be checked. The oldest running closure
    has the largest first term: checking that one is enough.

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


@final
class SynchronousRounds:
    """A `StartRule`: one closure for each worker, and one optimizer step for all of them together.

    States of a round::

        closed ──enough closures, or one is waited for──▶ running ──all ended──▶ applying ──applied──▶ closed
                                                            ▲                       (the servers make the steps)
                                                            └── the closures of a lost worker run again

    A round has as many closures as there are workers that can take one. A smaller round begins only if the program waits for one of
    its closures, so the grouping does not depend on how fast the program schedules. Results are delivered when
    the servers have made the steps: a result shows that the closure's step is visible.

    Attributes:
        wanted: the highest number of a closure that the program waits for.
        paused: whether no round may begin.

    Example:
        >>> rounds = SynchronousRounds()
        >>> rounds.next([1], free=[0, 1])  # one closure for two workers
        []
        >>> rounds.next([1, 2], free=[0, 1])
        [SendClosures(worker=0), SendClosures(worker=1)]
        >>> for closure, worker in ((1, 0), (2, 1)):
        ...     rounds.started(closure, worker)
        ...     rounds.ended(closure)
        >>> rounds.deliver((1, 2)), rounds.next([], free=[0, 1])
        ([], [EndRound(closures=(1, 2))])
        >>> rounds.applied()
        [DeliverResults(closures=(1, 2))]
    """

    def __init__(self) -> None:
        self.wanted = 0
        self.paused = False
        self._members: set[int] = set()  # closures of the round that have not ended
        self._ended: set[int] = set()  # those that have, also by an error
        self._results: list[int] = []  # those with a result, which is not delivered yet
        self._is_applying = False
        self._served: set[int] = set()  # workers that got a closure of the round
        self._offers: set[int] = set()  # workers that may take one now

    def choices(self, worker: int, queued: Sequence[int]) -> Sequence[int]:
        """Return the queued closures of the round if the worker may take one."""
        return self._waiting(queued) if worker in self._offers else ()

    def next(self, queued: Sequence[int], free: Sequence[int]) -> list[Action]:
        """Begin a round, offer its closures to workers, or let the servers make its steps."""
        if self._members:
            return self._offer(queued, free)
        if self._is_applying:
            return []
        if self._results:
            self._is_applying = True
            return [EndRound(tuple(sorted(self._results)))]
        self._clear()
        if not queued or not free or self.paused:
            return []
        if len(queued) < len(free) and queued[0] > self.wanted:
            return []
        self._members.update(islice(queued, len(free)))
        return self._offer(queued, free)

    def _offer(self, queued: Sequence[int], free: Sequence[int]) -> list[Action]:
        """Offer the waiting closures to workers that had none in this round, then to others."""
        order = sorted(free, key=self._served.__contains__)
        chosen = order[: len(self._waiting(queued))]
        self._offers = set(chosen)
        return [SendClosures(worker) for worker in chosen]

    def _waiting(self, queued: Sequence[int]) -> list[int]:
        return list(takewhile(self._members.__contains__, queued))

    def started(self, closure: int, worker: int) -> None:
        """Note which worker had a closure of the round."""
        del closure
        self._offers.discard(worker)
        self._served.add(worker)

    def returned(self, closures: Iterable[int]) -> None:
        """Do nothing: they stay in the round."""

    def ended(self, closure: int) -> None:
        """Take a closure from those that run."""
        if closure in self._members:
            self._members.discard(closure)
            self._ended.add(closure)

    def lost(self, closures: Iterable[int]) -> None:
        """Do nothing: they stay in the round."""

    def resolved(self, closures: Iterable[int]) -> None:
        """Take closures from the round: their steps do not count."""
        self._members.difference_update(closures)

    def requeued(self, closures: Sequence[int]) -> bool:
        """Put closures back into the round."""
        again = self._ended.intersection(closures)
        self._ended -= again
        self._members |= again
        return True

    def deliver(self, closures: tuple[int, ...]) -> list[Action]:
        """Hold the results of the round; deliver those of resources."""
        self._results += [one for one in closures if one in self._ended]
        others = tuple(one for one in closures if one not in self._ended)
        return [DeliverResults(others)] if others else []

    @property
    def is_open(self) -> bool:
        """True if results wait for the servers."""
        return bool(self._results)

    @property
    def is_between(self) -> bool:
        """True if no closure of a round runs, waits for a worker or for the servers."""
        return not self._members and not self._results

    def holds(self, closure: int) -> bool:
        """Return whether a closure's result waits for the servers."""
        return closure in self._results

    def applied(self) -> list[Action]:
        """Deliver the results of the round: the servers have made its steps."""
        results = self.give_up()
        return [DeliverResults(tuple(sorted(results)))] if results else []

    def give_up(self) -> list[int]:
        """End the round; return the closures whose results were held."""
        results = self._results
        self._clear()
        return results

    def restart(self) -> list[int]:
        """Return the closures of the round that are to run again, because a server has lost their steps."""
        if self._is_applying:
            return []
        again, self._results = sorted(self._results), []
        self._ended.difference_update(again)
        self._members.update(again)
        return again

    def _clear(self) -> None:
        self._results = []
        self._is_applying = False
        for some in (self._members, self._ended, self._served, self._offers):
            some.clear()

    @override
    def __repr__(self) -> str:
        return (
            f"<SynchronousRounds: {len(self._members)} closures to end, {len(self._results)} have>"
        )


def start_rule(staleness: int | None) -> StartRule | None:
    """Return the rule of a strategy's `staleness`; None for asynchronous training."""
    if staleness is None:
        return None
    return BoundedStaleness(staleness) if staleness else SynchronousRounds()
