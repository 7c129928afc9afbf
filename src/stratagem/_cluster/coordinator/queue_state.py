"""State that the closure queue keeps about its workers, about inputs of closures, and about failures. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
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
    aside: bool = False  # its session is being ended, see `SetAsideWorker`
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


LOOK: Final = 32
"""Closures from which one is chosen: some rounds over the parts that are read in turn. The first closure waits for no
more than this many others."""

PARTS: Final = 8
"""Parts of a worker that are remembered: as many as a worker keeps open."""


@final
class ClosureChoice:
    """Which of the first closures a worker gets, by their inputs. Pure; `ClosureQueue` asks it.

    A closure goes to no worker whose per-worker dataset has ended, and preferably to one that already reads its part of a
    shared dataset: opening a file or decoding a row group costs more than reading on.

    Args:
        part_of: returns the part of a shared dataset that a closure reads; None if it reads none.
        inputs_of: returns the numbers of the per-worker values that a closure uses.

    Example:
        >>> choice = ClosureChoice({1: "a", 2: "b", 3: "a", 4: "b"}.get)
        >>> choice.choose(0, [1, 2, 3, 4]), choice.choose(0, [2, 3, 4])
        (0, 1)
        >>> choice.choose(1, [2, 4]), choice.choose(0, [4])
        (0, 0)
    """

    def __init__(
        self,
        part_of: Callable[[int], Hashable | None] = lambda _: None,
        inputs_of: Callable[[int], Collection[int]] = lambda _: (),
    ) -> None:
        self._part_of = part_of
        self._inputs_of = inputs_of
        self._ended: dict[int, set[int]] = {}  # datasets that are used up, by worker
        self._parts: dict[int, OrderedDict[Hashable, None]] = {}  # by worker, the latest last
        self._overtaken = 0  # how often the first closure was passed over

    def can_run(self, worker: int, closure: int) -> bool:
        """Return whether the worker may have elements for the closure."""
        ended = self._ended.get(worker)
        return not ended or ended.isdisjoint(self._inputs_of(closure))

    def choose(self, worker: int, queued: Sequence[int]) -> int | None:
        """Return the place of the closure that the worker gets, and note that it reads that closure's part.

        It is the first closure that reads no part, or one that the worker reads; else the first one whose part
        no worker reads; else the first one. None if the worker has no elements for any of them.
        """
        if not self.can_run(worker, queued[0]):
            first = range(1, min(len(queued), LOOK))
            return next((n for n in first if self.can_run(worker, queued[n])), None)
        if self._part_of(queued[0]) is None:
            return 0
        own = self._parts.setdefault(worker, OrderedDict())
        chosen = self._best_part(worker, own, queued) if self._overtaken < LOOK else 0
        self._overtaken = self._overtaken + 1 if chosen else 0
        part = self._part_of(queued[chosen])
        if part is not None:
            own[part] = None
            own.move_to_end(part)
            if len(own) > PARTS:
                own.popitem(last=False)
        return chosen

    def _best_part(self, worker: int, own: Collection[Hashable], queued: Sequence[int]) -> int:
        unread = None
        for place in range(min(len(queued), LOOK)):
            part = self._part_of(queued[place])
            if (part is None or part in own) and self.can_run(worker, queued[place]):
                return place
            if unread is None and not any(part in parts for parts in self._parts.values()):
                unread = place
        return unread or 0

    def note_ended(self, worker: int, dataset: int) -> None:
        """Note that the worker has no more elements of a dataset."""
        self._ended.setdefault(worker, set()).add(dataset)

    def forget_worker(self, worker: int) -> None:
        """Handle a worker that is gone: others may read its parts, and its datasets are built again."""
        self._ended.pop(worker, None)
        self._parts.pop(worker, None)

    def forget_ended(self) -> None:
        """Ask all workers again: one that had elements left the cluster."""
        self._ended.clear()


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
