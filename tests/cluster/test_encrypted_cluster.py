"""A cluster whose connections are encrypted trains, loses a worker, and has the numbers of any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conserved import STEP_LIMIT_S, ConservedRun
from torch import nn
from waiting import wait_until

import stratagem as sg
from stratagem.cli import main
from stratagem.errors import ProtocolError

pytestmark = pytest.mark.process


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()


def encrypt(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Make certificates, and set the environment of all tasks."""
    assert main(["certificates", str(directory)]) == 0
    for line in capsys.readouterr().out.splitlines():
        if "export " in line:
            name, _, value = line.strip().removeprefix("export ").partition("=")
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_cluster_trains_over_tls(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shared: str,
) -> None:
    """The files come from the command; all tasks use them through the environment."""
    encrypt(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 1))
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    inputs = [torch.randn(8, 300) for _ in range(6)]
    plain_optimizer = torch.optim.Adam(plain.parameters())
    for x in inputs:
        train(plain, plain_optimizer, x)

    with (
        sg.LocalCluster(workers=1, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 1))
            optimizer = torch.optim.Adam(model.parameters())
        model.load_state_dict(start)
        coordinator = sg.ClusterCoordinator(strategy)
        for number, x in enumerate(inputs):
            coordinator.schedule(train, args=(model, optimizer, x))
            coordinator.join(timeout_s=100)
            if number == 2:
                cluster.kill_worker(0)
        trained = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


def test_servers_with_and_without_tls_refuse_each_other(tmp_path: Path) -> None:
    """The error names the variables to set."""
    assert main(["certificates", str(tmp_path), "--name", "ps-0"]) == 0
    files = sg.TlsFiles(
        cert=str(tmp_path / "ps-0.pem"),
        key=str(tmp_path / "ps-0-key.pem"),
        ca=str(tmp_path / "ca.pem"),
    )
    key = "a key for this test only"
    with (
        sg.Server({"ps": ["127.0.0.1:0"]}, key=key, tls=files) as server,
        sg.Server({"worker": ["127.0.0.1:0"]}, key=key) as worker,
    ):
        resolver = sg.cluster_resolver.SimpleClusterResolver(
            sg.ClusterSpec({"ps": [server.address], "worker": [worker.address]}), cluster_key=key
        )
        with pytest.raises(ProtocolError, match="STRATAGEM_TLS_CERT"):
            sg.ParameterServerStrategy(resolver)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shared", ["0", "1"])
def test_backups_over_tls(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shared: str,
) -> None:
    """The links between servers are encrypted, too; two servers are lost, and every step counts once."""
    encrypt(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    with (
        sg.LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=1) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        mine = ConservedRun(strategy, "Adam")
        for turn, killed in enumerate((1, 0)):
            for _ in range(8):
                mine.schedule(coordinator)
            coordinator.join(timeout_s=STEP_LIMIT_S)
            wait_until(
                lambda: not strategy._cluster_views().servers.lack_backups(),
                timeout_s=120.0,
            )
            cluster.kill_ps(killed)
            mine.check(8 * (turn + 1))
        assert len(coordinator.recoveries) >= 2
        assert all(one.backup for one in coordinator.recoveries)
