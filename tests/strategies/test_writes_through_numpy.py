"""Arrays over parameters in functions: torch counts no writes through them, so the worker watches ``Tensor.numpy``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ForeignParameterError

WAIT_S = 60.0


def by_numpy(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.numpy()[0] = 5.0


def by_detached_view(p: nn.Parameter) -> None:
    p.detach().view(-1)[:1].numpy()[:] = 5.0


def by_asarray(p: nn.Parameter) -> None:
    np.asarray(p.detach())[0] = 5.0


WRITES = [by_numpy, by_detached_view, by_asarray]


def model_of(coordinator: sg.ClusterCoordinator) -> nn.ModuleDict:
    """Small parameters that share a page, and one of many pages."""
    with coordinator.strategy.scope():
        model = nn.ModuleDict({"small": nn.Linear(2, 2), "tail": nn.Linear(2, 1)})
        model["large"] = nn.Linear(300, 1000)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    return model


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["small.bias", "tail.bias", "large.weight"])
def test_a_write_of_one_of_two_workers_is_refused_at_once(
    pair_either_way: sg.ClusterCoordinator, write: Callable[[nn.Parameter], None], name: str
) -> None:
    model = model_of(pair_either_way)

    def function() -> None:
        write(model.get_parameter(name))

    with pytest.raises(ForeignParameterError, match=f"parameter '{name}' was written in place"):
        pair_either_way.schedule(function).get(timeout_s=WAIT_S)
    assert bool((model.get_parameter(name) == 1.0).all())


@pytest.mark.parametrize("write", WRITES)
def test_a_write_of_a_sole_worker_is_sent(
    either_way: sg.ClusterCoordinator, write: Callable[[nn.Parameter], None]
) -> None:
    model = model_of(either_way)

    def function() -> None:
        write(model["large"].weight)

    either_way.schedule(function).get(timeout_s=WAIT_S)
    written = model["large"].weight.detach()
    assert written[0, 0] == 5.0
    assert bool((written[1:] == 1.0).all())
    assert model["tail"].bias.item() == 1.0


def test_reading_an_array_is_no_write(pair_either_way: sg.ClusterCoordinator) -> None:
    model = model_of(pair_either_way)

    def read() -> float:
        return sum(float(p.detach().numpy().sum()) for p in model.parameters())

    assert pair_either_way.schedule(read).get(timeout_s=WAIT_S) == 301_009.0
