"""A parameter server that keeps Python's lock is busy, not lost; one that is stopped is, and `close` is not held up by it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from own_optimizer import LockKeeper
from torch import nn
from waiting import wait_until

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem.config import ClusterOptions
from stratagem.errors import ConnectionLost, ParameterServerLost

pytestmark = pytest.mark.process

LIMIT_S = 2.0
KEEPS_S = 3 * LIMIT_S  # on a busy machine, measured round trips make the limit longer
OPTIONS = ClusterOptions(heartbeat_s=0.1, heartbeat_limit_s=LIMIT_S, partition_limit_s=600.0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("STRATAGEM_OPTIMIZER_MODULES", "own_optimizer")
    with LocalCluster(workers=1, ps=1, restart=False) as made:  # which would kill a stopped server
        yield made


def train_one_step(cluster: LocalCluster, options: ClusterOptions) -> float:
    """Make a step of an optimizer that keeps the server's lock for `KEEPS_S`; return the weight afterwards."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            weight = nn.Linear(1, 1, bias=False)
            optimizer = LockKeeper(
                weight.parameters(), lr=1.0, seconds=KEEPS_S, process=cluster.pid("ps", 0)
            )
        with torch.no_grad():
            weight.weight.fill_(3.0)

        def step() -> None:
            optimizer.zero_grad()
            weight(torch.ones(1, 1)).sum().backward()
            optimizer.step()

        with ClusterCoordinator(strategy, options=options) as coordinator:
            coordinator.schedule(step)
            coordinator.join(timeout_s=120.0)
            return weight.weight.item()


@pytest.mark.slow
def test_an_optimizer_that_keeps_pythons_lock_is_waited_for(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """FLT-10: a server's trouble is not believed too soon; many times the limit without an answer."""
    assert train_one_step(cluster, OPTIONS) == 2.0
    assert "/job:ps/task:0 has sent nothing for" in caplog.text
    assert "holds Python's lock (GIL)" in caplog.text


def test_a_busy_server_is_lost_after_the_limit(cluster: LocalCluster) -> None:
    """partition_limit_s=0: nothing is waited for longer than the heartbeat limit."""
    options = ClusterOptions(heartbeat_s=0.1, heartbeat_limit_s=LIMIT_S, partition_limit_s=0.0)
    with pytest.raises(ParameterServerLost, match="though its process runs"):
        train_one_step(cluster, options)


def test_a_stopped_server_still_counts_as_lost(cluster: LocalCluster) -> None:
    """Its process does nothing, and that is what the error says."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            sg.Variable(1.0, name="alone")
        with ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
            coordinator.join(timeout_s=120.0)
            cluster.kill_ps(0, signal.SIGSTOP)
            wait_until(lambda: coordinator.errors)
            with pytest.raises(ParameterServerLost, match="process on this host does nothing"):
                coordinator.done()


def is_stopped(pid: int) -> bool:
    return all(
        (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
        for task in Path(f"/proc/{pid}/task").iterdir()
    )


@pytest.mark.slow
def test_closing_waits_once_for_all_servers_that_hang(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` is bounded in total; what living servers hold comes home, the others are named.

    Each of 3 servers would take the whole minute of a request, and 5 seconds for the end of the session;
    the test has one minute.
    """
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")  # every value must be asked for
    with LocalCluster(workers=1, ps=4, restart=False) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            weights = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(4)])
            optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)

        def step() -> None:
            optimizer.zero_grad()
            torch.stack(list(weights)).sum().backward()
            optimizer.step()

        coordinator = ClusterCoordinator(strategy, options=OPTIONS)
        coordinator.schedule(step)
        coordinator.join(timeout_s=120.0)
        for server in (0, 1, 3):
            cluster.kill_ps(server, signal.SIGSTOP)
        while not all(is_stopped(cluster.pid("ps", server)) for server in (0, 1, 3)):
            os.sched_yield()
        caplog.clear()
        coordinator.close()
        strategy.close()
        for server in (0, 1, 3):
            assert f"/job:ps/task:{server} at" in caplog.text
        assert "/job:ps/task:2 at" not in caplog.text
        assert "its process on this host does nothing" in caplog.text
    assert weights[2].tolist() == [-1.0, -1.0]
    with pytest.raises(ConnectionLost, match="was not fetched"):
        weights[0].tolist()
