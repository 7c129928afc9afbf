"""Public state of a worker, for `coordinator.workers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final, overload

from typing_extensions import override


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """Present state of one worker.

    Example:
        >>> from stratagem._cluster.coordinator.worker_status import WorkerStatus
        >>> WorkerStatus(index=0, task="/job:worker/task:0", connected=True, incarnation=2).index
        0
    """

    index: int
    task: str
    connected: bool
    """True if it receives closures."""
    incarnation: int
    """Number of its sessions with this coordinator: above 1, it was lost and came back."""
    address: str = ""
    draining: bool = False
    """True if it is leaving: it finishes the closure that it runs and gets no more."""
    last_error: BaseException | None = None
    """Why its last session ended, or why the last attempt to connect failed."""


@final
class WorkersView(Sequence[WorkerStatus]):
    """The workers at present, in the order in which they joined: a live view.

    A view that you keep shows workers that join and leave. A loop over it sees the workers of its beginning.

    Example:
        >>> states = []
        >>> view = WorkersView(lambda: states)
        >>> states.append(WorkerStatus(index=0, task="w", connected=True, incarnation=1))
        >>> len(view), view[0].index
        (1, 0)
    """

    def __init__(self, read: Callable[[], list[WorkerStatus]]) -> None:
        self._read = read

    def __len__(self) -> int:
        return len(self._read())

    @overload
    def __getitem__(self, index: int) -> WorkerStatus: ...
    @overload
    def __getitem__(self, index: slice) -> list[WorkerStatus]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    @override
    def __iter__(self) -> Iterator[WorkerStatus]:
        return iter(self._read())

    @override
    def __repr__(self) -> str:
        return f"<WorkersView {self._read()!r}>"
