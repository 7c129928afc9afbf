"""Table of the per-worker values of a coordinator, and of the calls that build them."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable
from typing import final

from stratagem._cluster.coordinator.closure_table import aborted
from stratagem._cluster.coordinator.remote_values import (
    PerWorkerValues,
    RemoteValue,
    ResultCondition,
)
from stratagem._cluster.coordinator.sender import Call
from stratagem.errors import WorkerLost


@final
class ResourceTable:
    """Per-worker values by number, as long as the program refers to them. The engine's lock guards it."""

    def __init__(self, condition: ResultCondition) -> None:
        self._condition = condition
        self._resources: dict[int, tuple[weakref.ref[PerWorkerValues], Call]] = {}
        self._numbers = itertools.count(1)
        self._collected: deque[int] = deque()  # resources that nothing refers to any more

    def add(self, call: Call, workers: Iterable[int]) -> tuple[int, PerWorkerValues]:
        """Make a value for these workers, which the call builds."""
        number, collected = next(self._numbers), self._collected
        values = PerWorkerValues._make(f"resource {call.function.name}", number)
        # The callback may run in any thread at any time, so it only notes the number (CCO-32).
        reference = weakref.ref(values, lambda _: collected.append(number))
        self._resources[number] = (reference, call)
        for worker in workers:
            values._by_worker[worker] = RemoteValue(self._condition, values._name)
        return number, values

    def call(self, number: int) -> Call:
        """Return the call that builds a value."""
        return self._resources[number][1]

    def live(self) -> list[tuple[int, PerWorkerValues]]:
        """Return the values that are still referenced, by number."""
        found = [(number, reference()) for number, (reference, _) in self._resources.items()]
        return [(number, values) for number, values in found if values is not None]

    def take_collected(self) -> list[int]:
        """Forget the values that are not referenced any more; return their numbers."""
        released = [self._collected.popleft() for _ in range(len(self._collected))]
        for number in released:
            del self._resources[number]
        return released

    def worker_joined(self, worker: int, reason: WorkerLost) -> None:
        """Add a worker to every value; it has none until it is up."""
        for _, values in self.live():
            values._by_worker[worker] = RemoteValue(self._condition, values._name)
        self.worker_lost(worker, reason)

    def worker_lost(self, worker: int, reason: WorkerLost) -> None:
        """Abort the values of a worker."""
        for _, values in self.live():
            if worker in values._by_worker:
                values._by_worker[worker]._abort(aborted(reason))

    def worker_left(self, worker: int, reason: WorkerLost) -> None:
        """Abort the values of a worker and forget it."""
        self.worker_lost(worker, reason)
        for _, values in self.live():
            values._by_worker.pop(worker, None)
