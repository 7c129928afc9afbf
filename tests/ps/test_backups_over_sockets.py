"""Backups on servers whose clients use sockets: a step is one request to each server, with or without backups."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import stratagem as sg
from stratagem._ps.client.server_connection import Pending, ServerConnection

STEPS = 12


@pytest.mark.parametrize("backups", [0, 1])
def test_values_come_with_the_answer_to_a_write(
    monkeypatch: pytest.MonkeyPatch, backups: int
) -> None:
    """The answer waits for the backup, and then has the values that the write asked for."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    sent: Counter[str] = Counter()
    send = ServerConnection.send

    def counted(self: ServerConnection, pending: Pending, *, later: bool = False) -> None:
        sent[type(pending.message).__name__] += 1
        send(self, pending, later=later)

    torch.manual_seed(0)
    x = torch.randn(8, 6)
    plain = torch.nn.Linear(6, 3)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(1 + STEPS):
        plain_optimizer.zero_grad()
        plain(x).square().mean().backward()
        plain_optimizer.step()
    with (
        sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=backups) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            model = torch.nn.Linear(6, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.load_state_dict(start)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

        coordinator.schedule(steps, args=(1,))
        coordinator.join(timeout_s=60)
        with monkeypatch.context() as patched:
            patched.setattr(ServerConnection, "send", counted)
            coordinator.schedule(steps, args=(STEPS,))
            coordinator.join(timeout_s=60)
        trained = {name: value.clone() for name, value in model.state_dict().items()}
    torch.testing.assert_close(trained, dict(plain.state_dict()))
    assert sent["Write"] == 2 * STEPS  # weight and bias are on different servers
    assert sent["Read"] <= 2  # before the first step
