"""After a session: everything was fetched, and what could not be fetched raises when it is read."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConnectionLost, ParameterServerLost


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).view(3, 4)).square().sum().backward()
    optimizer.step()


def trained(strategy: sg.ParameterServerStrategy) -> tuple[Any, Any, sg.ClusterCoordinator]:
    """Return a model and its optimizer after 20 steps, and the coordinator that ran them."""
    torch.manual_seed(0)
    with strategy.scope():
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    coordinator = sg.ClusterCoordinator(strategy)
    for _ in range(20):
        coordinator.schedule(train, args=(model, optimizer))
    coordinator.join(timeout_s=60)
    return model, optimizer, coordinator


@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.parametrize("shards", [None, 2])
def test_model_and_optimizer_are_complete_after_close(
    monkeypatch: pytest.MonkeyPatch, shared: str, shards: int | None
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    partitioner = None if shards is None else sg.partitioners.FixedShardsPartitioner(shards)
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver, partitioner)
        model, optimizer, coordinator = trained(strategy)
        coordinator.close()
        strategy.close()
    torch.manual_seed(0)
    plain = build()
    local = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(20):
        train(plain, local)
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), **close)
    found, expected = optimizer.state_dict()["state"], local.state_dict()["state"]
    assert len(found) == 6
    torch.testing.assert_close(found, expected, **close)
    assert float(copy.deepcopy(optimizer).state_dict()["state"][0]["step"]) == 20.0
    train(model, optimizer)  # goes on from there, as a plain model
    train(plain, local)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), **close)


@pytest.mark.process
def test_values_of_a_lost_server_raise_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """``finally: torch.save(model.state_dict())`` must not replace a good checkpoint by initial weights."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        model, optimizer, coordinator = trained(strategy)
        parameters = dict(model.named_parameters())
        cluster.kill_ps(0)
        with pytest.raises(ParameterServerLost):
            model.state_dict()
        coordinator.close()
        strategy.close()
    with pytest.raises(ConnectionLost, match=r"last value of '.*' was not fetched") as caught:
        model.state_dict()
    assert "is gone: is gone" not in str(caught.value)
    with pytest.raises(ConnectionLost, match="last state of Adam was not fetched"):
        optimizer.state_dict()
    with pytest.raises(ConnectionLost, match="last state of Adam was not fetched"):
        copy.deepcopy(optimizer)
    with pytest.raises(ConnectionLost, match="last state of Adam was not fetched"):
        optimizer.step()
    readable, unreadable = [], []
    for name in parameters:
        module, _, member = name.rpartition(".")
        try:
            readable.append(getattr(model.get_submodule(module), member))
        except ConnectionLost:
            unreadable.append(name)
    assert readable  # of the other server
    assert unreadable
    with torch.no_grad():
        for name in unreadable:
            parameters[name].zero_()  # a value of the user's is current
    assert not getattr(model[int(unreadable[0][0])], unreadable[0][2:]).any()


def test_values_of_a_strategy_that_was_deleted_raise_when_they_are_read() -> None:
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        model, _, coordinator = trained(strategy)
        del strategy, coordinator
        gc.collect()
        with pytest.raises(ConnectionLost, match="deleted without close"):
            model.state_dict()
