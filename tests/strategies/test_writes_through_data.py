"""Writes through ``.data`` on the coordinator reach the workers (issue 20, point 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg

pytestmark = pytest.mark.process

WAIT_S = 150.0


def run(coordinator: sg.ClusterCoordinator, function: Callable[..., Any]) -> Any:
    return coordinator.schedule(function).fetch(timeout_s=WAIT_S)


def by_copy(model: nn.Module) -> None:
    model.weight.data.copy_(torch.full((2, 2), 3.0))


def by_assignment(model: nn.Module) -> None:
    model.weight.data = torch.full((2, 2), 3.0)


def by_soft_update(model: nn.Module) -> None:
    """As the target network of every DQN: half of the old value, half of another."""
    model.weight.data.fill_(1.0)
    for parameter in model.parameters():
        parameter.data.mul_(0.5).add_(torch.tensor(5.0), alpha=0.5)


def by_index(model: nn.Module) -> None:
    model.weight.data[:] = 3.0


@pytest.mark.parametrize("write", [by_copy, by_assignment, by_soft_update, by_index])
def test_a_write_through_data_reaches_the_workers(
    coordinator: sg.ClusterCoordinator, write: Callable[[nn.Module], None]
) -> None:
    with coordinator.strategy.scope():
        model = nn.Linear(2, 2, bias=False)

    def read() -> Tensor:
        return model.weight.detach().clone()

    run(coordinator, read)
    write(model)
    assert run(coordinator, read).tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert model.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_data_and_parameters_taken_before_the_first_function_are_watched(
    coordinator: sg.ClusterCoordinator,
) -> None:
    with coordinator.strategy.scope():
        model = nn.Linear(2, 1)
    taken, (weight, _) = model.bias.data, list(model.parameters())

    def read() -> tuple[float, float]:
        return float(model.bias), float(model.weight[0, 0])

    run(coordinator, read)
    taken.fill_(7.0)
    weight.data.fill_(8.0)
    assert run(coordinator, read) == (7.0, 8.0)


def test_a_write_through_data_of_a_buffer_reaches_the_workers(
    coordinator: sg.ClusterCoordinator,
) -> None:
    with coordinator.strategy.scope():
        model = nn.BatchNorm1d(3)

    def read() -> list[float]:
        found: list[float] = model.running_mean.tolist()
        return found

    run(coordinator, read)
    model.running_mean.data.copy_(torch.arange(3.0))
    assert run(coordinator, read) == [0.0, 1.0, 2.0]
    model.running_mean.numpy()[0] = 5.0
    assert run(coordinator, read) == [5.0, 1.0, 2.0]


def test_reading_data_overwrites_nothing(alone: sg.ClusterCoordinator) -> None:
    with alone.strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.data.fill_(0.0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for number in range(1, 4):
        run(alone, step)
        assert model.weight.data.tolist() == [[-number, -number]]
        assert float(model.weight.data.norm()) > 0.0
