"""Interface of the rules that decide when a closure may start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from stratagem._cluster.coordinator.bounded_staleness import BoundedStaleness
from stratagem._cluster.coordinator.closure_actions import Action
from stratagem._cluster.coordinator.synchronous_rounds import SynchronousRounds


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
