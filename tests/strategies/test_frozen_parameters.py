"""Frozen parameters that functions write: running statistics and moving averages arrive on the servers like buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.errors import ForeignParameterError

Write = Callable[[nn.Parameter, Tensor], None]


def in_place(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.9).add_(value, alpha=0.1)


def through_data(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data.mul_(0.9).add_(value, alpha=0.1)


def by_copy(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(0.9 * parameter + 0.1 * value)


def other_data(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data = 0.9 * parameter.data + 0.1 * value


WRITES: list[Write] = [in_place, through_data, by_copy, other_data]
writes = pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)


class Normalised(nn.Module):
    """A layer whose running mean is a frozen parameter, and a moving average of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.teacher = nn.Parameter(torch.zeros(width, width), requires_grad=False)

    def forward(self, x: Tensor, write: Write) -> Tensor:
        y: Tensor = self.layer(x)
        write(self.mean, y.detach().mean(0))
        write(self.teacher, self.layer.weight.detach())
        return (y - self.mean).square().mean() + (y - x @ self.teacher).square().mean()


def train(model: Any, optimizer: torch.optim.Optimizer, write: Write, width: int) -> list[float]:
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        loss = model(torch.arange(2.0 * width).view(2, width) / width + step, write)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model(torch.ones(1, width), write)  # after the last step: sent at the function's end
    return losses


@writes
@pytest.mark.parametrize("width", [3, 300], ids=["small", "large"])
def test_writes_of_functions_equal_plain_pytorch(
    either_way: sg.ClusterCoordinator, write: Write, width: int
) -> None:
    torch.manual_seed(0)
    plain = Normalised(width)
    with either_way.strategy.scope():
        model = Normalised(width)
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        args = (model, optimizer, write, width)
        found = either_way.schedule(train, args=args).fetch(timeout_s=60)
        assert found == pytest.approx(train(plain, local, write, width), rel=1e-4)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_writes_of_a_failed_function_are_not_sent(either_way: sg.ClusterCoordinator) -> None:
    with either_way.strategy.scope():
        model = Normalised(3)

    def fail() -> None:
        through_data(model.mean, torch.ones(3))
        raise KeyError("on purpose")

    def mean() -> list[float]:
        return model.mean.tolist()

    either_way.schedule(fail)
    with pytest.raises(KeyError, match="on purpose"):
        either_way.join(timeout_s=60)
    assert either_way.schedule(mean).fetch(timeout_s=60) == [0.0, 0.0, 0.0]
    assert model.mean.tolist() == [0.0, 0.0, 0.0]


def test_a_value_of_another_shape_is_refused(either_way: sg.ClusterCoordinator) -> None:
    with either_way.strategy.scope():
        model = Normalised(3)

    def grow() -> None:
        model.mean.data = torch.zeros(4)

    either_way.schedule(grow)
    with pytest.raises(ForeignParameterError, match=r"'mean' was given \(4,\)"):
        either_way.join(timeout_s=60)


@writes
@pytest.mark.parametrize("width", [3, 300], ids=["small", "large"])
def test_trained_parameters_are_not_written_by_functions(
    pair_either_way: sg.ClusterCoordinator, write: Write, width: int
) -> None:
    """Not by several workers' functions, nor beside a step of the optimizer; afterwards functions see the servers' value again."""
    with pair_either_way.strategy.scope():
        model = nn.Linear(width, width, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        write(model.weight, torch.ones(width, width))
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()

    def total() -> float:
        return float(model.weight.detach().sum())

    pair_either_way.schedule(step)
    with pytest.raises(ForeignParameterError, match="'weight' was written in place"):
        pair_either_way.join(timeout_s=60)
    assert pair_either_way.schedule(total).fetch(timeout_s=60) == 0.0


def test_numbers_that_are_not_numbers_count_as_unwritten(either_way: sg.ClusterCoordinator) -> None:
    with either_way.strategy.scope():
        model = nn.Linear(2, 2, bias=False)
        nn.init.constant_(model.weight, float("nan"))

    def read() -> bool:
        return bool(model.weight.isnan().all())

    assert either_way.schedule(read).fetch(timeout_s=60)


def test_tables_are_not_written_through_data(pair_either_way: sg.ClusterCoordinator) -> None:
    with pair_either_way.strategy.scope():
        model = nn.Embedding(4, 2)
        nn.init.ones_(model.weight)

    def read() -> float:
        return float(model.weight.data.sum())

    def write() -> None:
        model.weight.data.mul_(2)

    def assign() -> None:
        model.weight.data = torch.zeros(4, 2)

    assert pair_either_way.schedule(read).fetch(timeout_s=60) == 8.0
    for function in (write, assign):
        pair_either_way.schedule(function)
        with pytest.raises(ForeignParameterError, match="'weight'"):
            pair_either_way.join(timeout_s=60)
