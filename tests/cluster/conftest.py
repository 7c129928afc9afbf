"""Clusters for these tests: real processes, shared by a module where a test does not hurt them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from plain_strategy import PlainOnCoordinator, PlainStrategy

from stratagem import ClusterCoordinator, LocalCluster
from stratagem.config import ClusterOptions

# Tasks that end are noticed at once. Silence counts only after long, so that a slow machine loses no worker; a test of
# silence passes a shorter limit.
QUICK = ClusterOptions(heartbeat_s=0.2, heartbeat_limit_s=60.0, restart_pause_s=0.05)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two workers, one server, for the tests of a module, which may kill workers: they are replaced."""
    with LocalCluster(workers=2, ps=1) as made:
        yield made


@pytest.fixture
def views() -> PlainOnCoordinator:
    """Views whose `fences` tell which workers were fenced."""
    return PlainOnCoordinator()


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
