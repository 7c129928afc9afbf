"""A strategy without servers: nothing is special, everything is sent by value. For tests of the sending."""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from stratagem._wire.codec import ship_by_value

ship_by_value(sys.modules[__name__])  # workers cannot import it


@dataclass(frozen=True)
class PlainSetup:
    """Connects a worker to nothing."""

    def connect(self, *, worker_index: int, incarnation: int, key: object) -> PlainOnWorker:
        return PlainOnWorker()


class PlainOnWorker:
    """The worker's side."""

    def define(self, token: Hashable, definition: object, *, last: bool) -> None:
        raise LookupError(f"{token!r} was defined for a worker that has no strategy.")

    def rebuild(self, token: Hashable) -> object:
        raise LookupError(f"{token!r} is unknown: this worker has no strategy.")

    def apply(self, updates: Sequence[object]) -> tuple[dict[Hashable, Exception], tuple[()]]:
        return {}, ()

    def closure(
        self, number: int, *, exactly_once: bool, quick: bool, arrived: float
    ) -> AbstractContextManager[object]:
        return nullcontext()

    def written(self) -> int:
        return 0

    def acknowledged(self, *, wait: bool) -> int:
        return 0

    def reaches(self, task: str) -> bool:
        return True

    def late_failure(self, number: int) -> Exception | None:
        return None

    def advances(self) -> None:
        return None

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


class PlainOnCoordinator:
    """The coordinator's side; notes what it asks of the servers."""

    def __init__(self) -> None:
        self.fences: list[tuple[int, int]] = []
        self.finished: list[int] = []
        self.rounds: list[tuple[int, ...]] = []
        self.job = None
        self.staleness: int | None = None

    @property
    def servers(self) -> PlainOnCoordinator:
        return self

    def describe(self, obj: object) -> Hashable | None:
        return None

    def definitions(self, token: Hashable) -> Sequence[object]:
        raise LookupError(f"{token!r} has no definition: nothing is special here.")

    def check_definition(self, token: Hashable, named: Collection[Hashable]) -> None:
        pass

    def changes(self) -> tuple[Sequence[object], Sequence[Hashable]]:
        return (), ()

    def accept(self) -> None:
        pass

    def current(self) -> Sequence[object]:
        return ()

    def explain(self, update: object) -> str:
        return repr(update)

    def worker_setup(self) -> PlainSetup:
        return PlainSetup()

    def fence(self, worker_index: int, incarnation: int) -> None:
        self.fences.append((worker_index, incarnation))

    def check_servers(self, options: Any) -> None:
        pass

    def reaches(self, task: str) -> bool:
        return True

    def server_index(self, task: str) -> int | None:
        return None

    def is_outdated(self, error: Any) -> bool:
        raise NotImplementedError

    def promote_backup(self, server: int) -> Any:
        raise NotImplementedError

    def lack_backups(self) -> bool:
        return False

    def repair_backups(self) -> None:
        raise NotImplementedError

    def restore_server(self, server: int, **options: Any) -> Any:
        raise NotImplementedError

    def recover_with(self, recovery: Any) -> None:
        pass

    def counted(self, function: Any, owners: Sequence[Any]) -> Any:
        return function

    def advance(self, worker: int, incarnation: int, report: int, advances: Sequence[Any]) -> None:
        raise AssertionError("a plain worker reports no advances")

    def snapshot(self, worker: int, incarnation: int, known: object) -> None:
        return None

    def apply_round(self, closures: Sequence[int]) -> None:
        self.rounds.append(tuple(closures))

    def finish_closures(self, closures: Sequence[int]) -> None:
        self.finished += closures

    def close(self, options: Any = None) -> None:
        pass


class PlainStrategy:
    """The smallest strategy that `ClusterCoordinator` accepts."""

    def __init__(self, cluster_resolver: Any, views: Any = None) -> None:
        self.cluster_resolver = cluster_resolver
        self.views = views or PlainOnCoordinator()
        self._cluster_coordinator: Any = None

    def _cluster_views(self) -> Any:
        return self.views
