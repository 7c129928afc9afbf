"""Count workers' reports about parameter servers and deadlines, and decide when to raise an error (FLT-10, FLT-11)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import final


@final
class ReportedFailures:
    """Failures of servers, missed deadlines, and workers without a path to a server. Pure; `ClosureQueue` asks it.

    Args:
        server_failures: reports about one parameter server at which its failure is raised (FLT-10).
        deadlines: missed deadlines at which one is raised (FLT-11); -1 means a tenth of the workers.

    Example:
        >>> failures = ReportedFailures(server_failures=2, deadlines=-1)
        >>> [failures.is_transient("server", "ps0", (0, 1, 2)) for _ in range(2)]
        [True, False]
        >>> failures.no_path(0, "ps1")
        >>> failures.out_of_reach(workers=(0,)), failures.out_of_reach(workers=(0, 1))
        (['ps1'], [])
    """

    def __init__(self, *, server_failures: int, deadlines: int) -> None:
        self._server_limit = server_failures
        self._deadline_limit = deadlines
        self._by_server: dict[str, int] = {}
        self._deadlines = 0
        self._without_path: dict[str, set[int]] = {}  # workers, by server

    def is_transient(self, blame: str, task: str, workers: Collection[int]) -> bool:
        """Count a failure of a server or a deadline; return whether to ignore it."""
        if blame == "server":
            self._by_server[task] = self._by_server.get(task, 0) + 1
            return self._by_server[task] < self._server_limit
        if blame == "deadline":
            self._deadlines += 1
            limit = self._deadline_limit
            return self._deadlines < (limit if limit >= 0 else len(workers) // 10)
        return False

    def no_path(self, worker: int, task: str) -> None:
        """Note that a worker does not reach a server."""
        self._without_path.setdefault(task, set()).add(worker)

    def forget(self, worker: int) -> None:
        """Handle a worker that reaches all servers, or is gone."""
        for workers in self._without_path.values():
            workers.discard(worker)

    def out_of_reach(self, workers: Collection[int]) -> list[str]:
        """Return the servers that a majority of the workers does not reach."""
        half = len(workers) / 2
        return [task for task, without in self._without_path.items() if len(without) > half]


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
