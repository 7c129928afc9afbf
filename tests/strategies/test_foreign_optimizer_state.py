"""Optimizer state of another model, loaded through the public API, is refused instead of ending a server."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stratagem as sg


def trained(rows: int) -> dict[str, object]:
    """The state of Adam over a matrix of so many rows, after one step."""
    weight = nn.Parameter(torch.ones(rows, 8))
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer.state_dict()


def test_state_of_another_model_is_refused_and_training_goes_on() -> None:
    """A fused step on the server would write beyond the smaller state."""
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = nn.Linear(8, 64, bias=False)
            optimizer = torch.optim.Adam(model.parameters(), fused=True)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()

        with sg.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(step)
            coordinator.join()
            with pytest.raises(
                ValueError, match=r"state 'exp_avg' .*\(2, 8\).*expected shape \(64, 8\)"
            ):
                optimizer.load_state_dict(trained(rows=2))
            optimizer.load_state_dict(trained(rows=64))
            coordinator.schedule(step)
            coordinator.join()
            assert float(optimizer.state_dict()["state"][0]["step"]) == 2.0
