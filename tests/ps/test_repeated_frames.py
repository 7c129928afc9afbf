"""Steps over sockets whose messages have the same bytes: servers use the received memory again, with the new values.

Large gradients are sent from the tensors themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.session import Session

BATCHES = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(2))


def build() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


@pytest.mark.parametrize("narrow", ["", "bfloat16"])
@pytest.mark.parametrize("staleness", [None, 0])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    ],
    ids=["sgd", "nesterov", "adagrad", "adam"],
)
def test_every_step_uses_its_own_gradients(
    monkeypatch: pytest.MonkeyPatch, make: Any, staleness: int | None, narrow: str
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    monkeypatch.setenv("STRATAGEM_WIRE_DTYPE", narrow)
    plain = build()
    expected = make(plain.parameters())
    for batch in BATCHES:
        expected.zero_grad()
        plain(batch).square().sum().backward()
        for parameter in plain.parameters():
            if narrow:
                parameter.grad = parameter.grad.bfloat16().float()
        expected.step()
    with (
        sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, staleness=staleness) as strategy,
    ):
        with strategy.scope():
            model = build()
            optimizer = make(model.parameters())
        coordinator = sg.ClusterCoordinator(strategy)

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()

        for batch in BATCHES:
            coordinator.schedule(step, args=(batch,))
        coordinator.join(timeout_s=120)
        trained = {key: value.clone() for key, value in model.state_dict().items()}
    torch.testing.assert_close(trained, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strange", ["", "transposed", "kept", "doubled"])
def test_large_gradients_are_sent_as_they_are_at_each_step(
    monkeypatch: pytest.MonkeyPatch, strange: str
) -> None:
    """Also one in another order of dimensions, one that the function keeps, and one of two backward passes."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    batches = torch.randn(4, 3, 256, generator=torch.Generator().manual_seed(2))
    kept: list[torch.Tensor] = []

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Any:
        optimizer.zero_grad()
        for _ in range(2 if strange == "doubled" else 1):
            model(batch).square().sum().backward()
        if strange == "transposed":
            model.weight.grad = model.weight.grad.t().contiguous().t()
        gradient = model.weight.grad
        optimizer.step()
        if strange == "kept":
            kept.append(gradient)
            return [float(one.sum()) for one in kept]
        return float(gradient.sum())

    def build_large() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Linear(256, 160)

    plain = build_large()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    expected = [train(plain, optimizer, batch) for batch in batches]
    kept.clear()
    with (
        sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            model = build_large()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        coordinator = sg.ClusterCoordinator(strategy)

        def step(batch: torch.Tensor) -> Any:
            return train(model, optimizer, batch)

        found = [coordinator.schedule(step, args=(batch,)).fetch() for batch in batches]
        trained = model.weight.detach().clone()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(trained, plain.weight.detach())


def test_writes_that_alternate_in_the_same_memory_are_decoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[Any] = []
    prepare = Session._prepare

    def noted(self: Session, operation: Any, *others: Any) -> Any:
        decoded.append(operation.variable)
        return prepare(self, operation, *others)

    monkeypatch.setattr(Session, "_prepare", noted)
    who = Membership(session="s", task="/job:chief/task:0", is_owner=True)
    with (
        ParameterServer("127.0.0.1:0").start() as server,
        PsClient([("/job:ps/task:0", server.address)], who, shared_memory=False) as client,
    ):
        places = [ShardLocation(0, number, (1000,), torch.float32) for number in (1, 2, 3)]
        for place in places:
            client.create(place, f"w{place.variable}", value=torch.zeros(1000))
        decoded.clear()
        for step in range(4):
            if step == 2:  # of another size: received into other memory
                client.create(ShardLocation(0, 4, (7,), torch.float32), "b", value=torch.ones(7))
                decoded.clear()
            for place in places:
                batch = client.batch()
                batch.assign(0, place.variable, "add", torch.full((1000,), 10.0**step))
                client.send(batch)
                client.wait_for_writes()
            if step in (1, 3):
                assert decoded == [1, 2, 3]
        assert [value.unique().tolist() for value, _ in client.read(places)] == [[1111.0]] * 3
