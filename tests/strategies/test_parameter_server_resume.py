"""Training resumed from a checkpoint that is loaded before anything was scheduled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from warm_start import Program

import stratagem as sg

pytestmark = pytest.mark.process

KINDS: list[Any] = [
    pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), id="SGD"),
    pytest.param(lambda p: torch.optim.Adagrad(p, lr=0.1), id="Adagrad"),
    pytest.param(lambda p: torch.optim.Adam(p, lr=0.1), id="Adam"),
]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", KINDS)
def test_optimizer_state_loaded_before_the_first_schedule_counts(make: Any) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 3)
    plain = nn.Linear(3, 2)
    plain_optimizer = make(plain.parameters())
    for _ in range(3):
        step(plain, plain_optimizer, x)
    saved = (
        {key: value.clone() for key, value in plain.state_dict().items()},
        plain_optimizer.state_dict(),
    )
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                model = nn.Linear(3, 2)
                optimizer = make(model.parameters())
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            for _ in range(2):
                coordinator.schedule(step, args=(model, optimizer, x))
            coordinator.join(timeout_s=60)
            trained = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(2):
        step(plain, plain_optimizer, x)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(trained[key], value)


KILLED = """
import sys, torch, stratagem as sg
worker, ps, path = sys.argv[1:]
spec = sg.ClusterSpec({"worker": [worker], "ps": [ps]})
strategy = sg.ParameterServerStrategy(sg.cluster_resolver.SimpleClusterResolver(spec))
with strategy.scope():
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
coordinator = sg.ClusterCoordinator(strategy)
x = torch.linspace(-1, 1, 12).reshape(4, 3)

def step():
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()

for number in range(1, 1_000_000):
    coordinator.schedule(step)
    coordinator.join(timeout_s=60)
    if number == 3:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    if number == 5:
        print("beyond the checkpoint", flush=True)
"""


def test_a_killed_coordinators_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """FLT-13: nothing of it survives; the next one connects to the same tasks and loads."""
    path = tmp_path / "checkpoint.pt"
    with (
        sg.Server({"worker": ["127.0.0.1:0"]}) as worker,
        sg.Server({"ps": ["127.0.0.1:0"]}) as ps,
    ):
        arguments = [worker.address, ps.address, str(path)]
        process = Program(
            [sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "beyond the checkpoint\n"
        finally:
            process.kill()
            process.communicate(timeout=120)
        spec = sg.ClusterSpec({"worker": [worker.address], "ps": [ps.address]})
        resolver = sg.cluster_resolver.SimpleClusterResolver(spec)
        with sg.ParameterServerStrategy(resolver) as strategy:
            with strategy.scope():
                model = nn.Linear(3, 2)
                optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            coordinator = sg.ClusterCoordinator(strategy)
            x = torch.linspace(-1, 1, 12).reshape(4, 3)
            for _ in range(2):
                coordinator.schedule(step, args=(model, optimizer, x))
                coordinator.join(timeout_s=60)
            trained = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(5)
    plain = nn.Linear(3, 2)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(5):
        step(plain, plain_optimizer, x)
    torch.testing.assert_close(trained, dict(plain.state_dict()))
