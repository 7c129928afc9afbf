"""Record of closures that were lost with their workers, to stop one that repeatedly ends its worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final


@final
class LostClosures:
    """Losses in a row of each closure. Pure; `ClosureQueue` asks it.

    Example:
        >>> lost = LostClosures(limit=2)
        >>> lost.note([7, 8], worker=0), lost.note([7], worker=3)
        ([], [7])
        >>> 8 in lost, lost.forget(7), lost.forget(7)
        (True, (0, 3), ())
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._workers: dict[int, list[int]] = {}  # by closure, in order

    def __contains__(self, closure: int) -> bool:
        return closure in self._workers

    def note(self, closures: Iterable[int], *, worker: int) -> list[int]:
        """Note a loss of these closures; return those that are not to be tried again."""
        closures = list(closures)
        for closure in closures:
            self._workers.setdefault(closure, []).append(worker)
        return [one for one in closures if len(self._workers[one]) >= self._limit]

    def forget(self, closure: int) -> tuple[int, ...]:
        """Forget a closure; return the workers that it was lost with."""
        return tuple(self._workers.pop(closure, ())) if self._workers else ()
