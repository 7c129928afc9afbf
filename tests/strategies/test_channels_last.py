"""Tensors in the channels-last format keep it on workers (issue 20, point 14)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg

pytestmark = pytest.mark.process


def make() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))


def is_kept(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def test_parameters_and_arguments_keep_their_format_and_train_alike(
    alone: sg.ClusterCoordinator,
) -> None:
    torch.manual_seed(0)
    plain = make()
    with alone.strategy.scope():
        model = make()
        model.load_state_dict(plain.state_dict())
        model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last) for _ in range(3)]
    kept = batches[0]

    def step(x: Tensor) -> tuple[bool, bool, bool, bool]:
        optimizer.zero_grad()
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        return is_kept(x), is_kept(kept), is_kept(model[0].weight), is_kept(y)

    for x in batches:
        assert alone.schedule(step, args=(x,)).fetch(timeout_s=60) == (True, True, True, True)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for x in batches:
        other.zero_grad()
        plain(x).square().mean().backward()
        other.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach())
    assert is_kept(model[0].weight)


def test_results_keep_their_format(alone: sg.ClusterCoordinator) -> None:
    x = torch.rand(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    found = alone.schedule(lambda: x * 2).get(timeout_s=60)
    assert found.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(found, x * 2)
