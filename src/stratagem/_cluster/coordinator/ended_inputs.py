"""Record of workers whose per-worker datasets have ended, so that other workers run the closures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import final

from typing_extensions import override


@final
class EndedInputs:
    """Per-worker datasets that are used up, by worker.

    Args:
        inputs_of: returns the numbers of the per-worker values that a closure uses.

    Example:
        >>> ended = EndedInputs({1: [7], 2: []}.get)
        >>> ended.note(0, 7)
        >>> ended.can_run(0, 1), ended.can_run(0, 2), ended.can_run(5, 1)
        (False, True, True)
    """

    def __init__(self, inputs_of: Callable[[int], Collection[int]]) -> None:
        self._inputs_of = inputs_of
        self._by_worker: dict[int, set[int]] = {}

    def note(self, worker: int, resource: int) -> None:
        """Note that the worker has no more elements of a dataset."""
        self._by_worker.setdefault(worker, set()).add(resource)

    def can_run(self, worker: int, closure: int) -> bool:
        """Return whether the worker may have elements for the closure."""
        ended = self._by_worker.get(worker)
        return not ended or ended.isdisjoint(self._inputs_of(closure))

    def forget_worker(self, worker: int) -> None:
        """Handle a worker that is gone: if it returns, its datasets are built again."""
        self._by_worker.pop(worker, None)

    def forget_all(self) -> None:
        """Ask all workers again: one that had elements left the cluster."""
        self._by_worker.clear()

    @override
    def __repr__(self) -> str:
        return f"<EndedInputs {self._by_worker}>"
