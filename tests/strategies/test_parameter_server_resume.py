"""Training resumed from a checkpoint that is loaded before anything was scheduled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg

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
