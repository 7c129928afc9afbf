"""Coordinators for tests of what workers see; a test module that wants another one has its own fixture of that name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import stratagem as sg


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    """One worker, two servers, in processes of their own."""
    with sg.LocalCluster(workers=1, ps=2) as made:
        yield made


@pytest.fixture
def partitioner() -> Any:
    """How the coordinator's strategy cuts variables: not at all."""
    return None


@pytest.fixture(params=["one replica", "two replicas"])
def coordinator(
    request: pytest.FixtureRequest, cluster: sg.LocalCluster, partitioner: Any
) -> Iterator[sg.ClusterCoordinator]:
    """Its workers have one replica, or two."""
    devices = ["cpu:0", "cpu:1"] if request.param == "two replicas" else None
    strategy = sg.ParameterServerStrategy(cluster.resolver, partitioner, worker_devices=devices)
    with sg.ClusterCoordinator(strategy) as made:
        yield made


@pytest.fixture
def alone(cluster: sg.LocalCluster, partitioner: Any) -> Iterator[sg.ClusterCoordinator]:
    """One replica: for what is not one device's numbers with several."""
    strategy = sg.ParameterServerStrategy(cluster.resolver, partitioner)
    with sg.ClusterCoordinator(strategy) as made:
        yield made


@pytest.fixture(params=["1", "0"], ids=["shared", "bytes"])
def either_way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sg.ClusterCoordinator]:
    """A coordinator whose worker shares the server's memory, or has bytes over a connection."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", request.param)
    yield from _coordinator_of(workers=1)


@pytest.fixture(params=["1", "0"], ids=["shared", "bytes"])
def pair_either_way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sg.ClusterCoordinator]:
    """The same with two workers."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", request.param)
    yield from _coordinator_of(workers=2)


def _coordinator_of(workers: int) -> Iterator[sg.ClusterCoordinator]:
    with sg.LocalCluster(workers=workers, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with sg.ClusterCoordinator(strategy) as made:
            yield made
