"""A parameter server that is stopped for longer than a request may take, and then goes on."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn
from waiting import wait_until

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem.config import ClusterOptions

pytestmark = pytest.mark.process

# The servers' silence is borne, and every report of a worker is taken for passing trouble: what is left
# is the workers' own limit for one request.
OPTIONS = ClusterOptions(heartbeat_limit_s=120.0, transient_ps_failures=10_000)


def retries() -> int:
    return int(sg.metrics.snapshot().counters.get("coordinator.retried", 0))


def served(worker: sg.metrics.Snapshot) -> bool:
    return worker.counters.get("worker.session_s", 0) >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_go_on_when_a_stopped_server_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their connections time out and are made again: nothing is lost, nothing counts twice."""
    monkeypatch.setenv("STRATAGEM_WIRE_TIMEOUT_S", "4")
    with LocalCluster(
        workers=2, ps=2, restart=False
    ) as cluster:  # which would kill a stopped server
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            totals = tuple(sg.Variable(torch.zeros((), dtype=torch.float64)) for _ in range(2))
            model = nn.Linear(256, 256, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with ClusterCoordinator(strategy, options=OPTIONS) as coordinator:

            def step() -> None:
                totals[0].assign_add(1.0)
                optimizer.zero_grad()
                model.weight.sum().backward()  # each step takes 1 from every weight
                optimizer.step()
                totals[1].assign_add(1.0)

            for _ in range(20):
                coordinator.schedule(step)
            coordinator.join(timeout_s=120)
            # Two seconds have several heartbeats: servers have answered pings, and the coordinator's limit for an answer is
            # shorter than the workers' limit for a reply. So it knows of the stopped server before they do.
            wait_until(
                lambda: any(map(served, coordinator.metrics_by_worker.values())), timeout_s=120.0
            )
            for round_, server in enumerate((0, 1, 0), 1):
                before = retries()
                cluster.kill_ps(server, signal.SIGSTOP)
                for _ in range(20):
                    coordinator.schedule(step)
                wait_until(lambda before=before: retries() > before + 1, timeout_s=120.0)  # type: ignore[misc]
                cluster.kill_ps(server, signal.SIGCONT)
                coordinator.join(timeout_s=120)
                expected = 20.0 * (round_ + 1)
                assert [float(total) for total in totals] == [expected, expected]
                weight = model.weight.detach()
                assert torch.equal(weight, torch.full((256, 256), -expected))
            assert [worker.incarnation for worker in coordinator.workers] == [1, 1]
