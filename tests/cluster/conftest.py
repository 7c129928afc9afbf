"""Clusters for these tests: real processes, shared by a module where a test does not hurt them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from stratagem import ClusterCoordinator, LocalCluster
from stratagem._cluster.contract import PlainOnCoordinator
from stratagem.config import ClusterOptions


class PlainStrategy:
    """A strategy that ships nothing but functions: what is tested here is the shipping."""

    def __init__(self, cluster_resolver: Any, views: Any = None) -> None:
        self.cluster_resolver = cluster_resolver
        self.views = views or PlainOnCoordinator()
        self._cluster_coordinator: Any = None

    def _cluster_views(self) -> Any:
        return self.views


class CountingViews(PlainOnCoordinator):
    """Plain views that note what the coordinator asks of the servers."""

    def __init__(self) -> None:
        self.fences: list[tuple[int, int]] = []

    def fence(self, worker_index: int, incarnation: int) -> None:
        self.fences.append((worker_index, incarnation))


# Shorter than the defaults, so that a silent worker is found while a test waits for it.
QUICK = ClusterOptions(heartbeat_s=0.2, heartbeat_limit_s=2.0, restart_pause_s=0.05)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two workers, one server; workers that die are replaced."""
    with LocalCluster(workers=2, ps=1) as made:
        yield made


@pytest.fixture
def views() -> CountingViews:
    """Views whose `fences` tell who was fenced."""
    return CountingViews()


@pytest.fixture
def connect() -> Iterator[Callable[..., ClusterCoordinator]]:
    """Makes coordinators; closes them."""
    with ExitStack() as stack:

        def make(cluster: Any, **changes: Any) -> ClusterCoordinator:
            views = changes.pop("views", None)
            options = ClusterOptions(**{**vars(QUICK), **changes})
            strategy = PlainStrategy(cluster.resolver, views)
            stack.callback(lambda: strategy)  # a coordinator lives no longer than its strategy
            return stack.enter_context(ClusterCoordinator(strategy, options=options))

        yield make


@pytest.fixture
def coordinator(
    cluster: LocalCluster, connect: Callable[..., ClusterCoordinator]
) -> ClusterCoordinator:
    """A fresh coordinator on the module's cluster."""
    return connect(cluster)
