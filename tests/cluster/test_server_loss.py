"""A parameter server dies or hangs: noticed, named, never a hang (FLT-10, issue 4 section 4)."""

from __future__ import annotations

import signal

import pytest
import torch
from waiting import wait_until

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem.config import ClusterOptions
from stratagem.errors import ClosureCancelled, ParameterServerLost, UnavailableError

pytestmark = pytest.mark.process

OPTIONS = ClusterOptions(heartbeat_s=0.2, heartbeat_limit_s=4.0, restart_pause_s=0.05)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_lost_server_is_raised_with_its_variables(number: signal.Signals) -> None:
    """FLT-12: while closures run, ParameterServerLost names server and variables and says how to restore."""
    with LocalCluster(workers=2, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            first = sg.Variable(torch.zeros(3), name="first")
            second = sg.Variable(torch.zeros(3), name="second")
        with ClusterCoordinator(strategy, options=OPTIONS) as coordinator:

            def step() -> None:
                first.assign_add(torch.ones(3))
                second.assign_add(torch.ones(3))

            for _ in range(50):
                coordinator.schedule(step)
            coordinator.join(timeout_s=120)
            cluster.kill_ps(1, number)
            with pytest.raises(ParameterServerLost) as caught:
                for _ in range(100_000):
                    coordinator.schedule(step)
                    coordinator.join(timeout_s=120)
            assert caught.value.task == "/job:ps/task:1"
            assert any("second" in name for name in caught.value.variables)
            assert not any("first" in name for name in caught.value.variables)
            assert "checkpoint" in str(caught.value)
            assert any(isinstance(r.error, ParameterServerLost) for r in coordinator.errors)


def test_lost_server_is_noticed_when_nothing_runs() -> None:
    """FLT-12: the watch finds it by its heartbeat; the next call raises, and workers are not blamed."""
    with LocalCluster(workers=1, ps=1) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            sg.Variable(torch.zeros(3), name="alone")
        with ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
            coordinator.join()
            cluster.kill_ps(0)
            wait_until(lambda: coordinator.errors)
            with pytest.raises(ParameterServerLost) as caught:
                coordinator.done()
            assert isinstance(caught.value, UnavailableError)
            assert caught.value.task == "/job:ps/task:0"
            assert [(one.worker, type(one.error)) for one in coordinator.errors] == [
                ("/job:ps/task:0", ParameterServerLost)
            ]


def test_a_loss_that_a_result_has_raised_is_not_reported_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(workers=1, ps=1) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            total = sg.Variable(torch.zeros(()), name="total")
        with ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
            coordinator.join()
            cluster.kill_ps(0)
            value = coordinator.schedule(lambda: total.assign_add(torch.ones(())))
            with pytest.raises((ParameterServerLost, ClosureCancelled)) as caught:
                value.get(timeout_s=120)
            if caught.type is ClosureCancelled:  # the watch was faster
                with pytest.raises(ParameterServerLost):
                    coordinator.join()
    assert "no call has raised this error" not in caplog.text


def test_a_lost_server_is_reported_with_the_paths_of_its_parameters() -> None:
    """The error has the names of the state dict (`tower.2.bias`), and so has the live page's list of tables."""
    with LocalCluster(workers=1, ps=1) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = torch.nn.ModuleDict(
                {
                    "users": torch.nn.Embedding(8, 2, sparse=True),
                    "goods": torch.nn.Embedding(8, 2, sparse=True),
                    "tower": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
                }
            )
        names = set(model.state_dict())
        with ClusterCoordinator(strategy, options=OPTIONS) as coordinator:

            def look(ids: torch.Tensor) -> list[str]:
                model["tower"](model["users"](ids) + model["goods"](ids))
                return sorted(
                    name for name in sg.metrics.snapshot().counters if "table.ids" in name
                )

            value = coordinator.schedule(look, args=(torch.tensor([1, 2]),))
            assert value.fetch(timeout_s=120) == [
                "table.ids:goods.weight",
                "table.ids:users.weight",
            ]
            cluster.kill_ps(0)
            wait_until(lambda: coordinator.errors)
            with pytest.raises(ParameterServerLost) as caught:
                coordinator.join()
    assert set(caught.value.variables) == names
