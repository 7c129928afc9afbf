"""Whose learning rate a step has: what functions and the coordinator change, and for whom it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg

P = sg.partitioners


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    """Two workers and two parameter servers, as threads of this process."""
    with sg.LocalCluster(workers=2, ps=2, in_process=True) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> Iterator[sg.LocalCluster]:
    """One worker and two parameter servers."""
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as made:
        yield made


def warm_up(optimizer: torch.optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * min(1.0, (number + 1) / 4)


def decay(optimizer: torch.optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.7
        group["weight_decay"] = 0.01 if number % 2 else 0.0


def noam(optimizer: torch.optim.Optimizer, number: int) -> None:
    """A rule with NumPy's numbers, as programs copy it from the annotated Transformer."""
    rate = np.power(16, -0.5) * np.min([np.power(number + 1, -0.5), (number + 1) * 3**-1.5])
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = np.float32(0.25)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1}),
]


@pytest.mark.parametrize("change", [warm_up, decay, noam])
@pytest.mark.parametrize("partitioner", [None, P.FixedShardsPartitioner(2)], ids=["whole", "cut"])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_a_step_that_sets_its_own_rate_gives_plain_numbers(
    alone: sg.LocalCluster,
    kind: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    partitioner: Any,
    change: Callable[[torch.optim.Optimizer, int], None],
) -> None:
    torch.manual_seed(1)
    plain = small_model()
    batches = [(torch.randint(0, 9, (5, 2)), torch.randn(5, 3)) for _ in range(7)]

    def step(model: nn.Module, optimizer: Any, number: int, x: Tensor, y: Tensor) -> float:
        change(optimizer, number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    with sg.ParameterServerStrategy(alone.resolver, partitioner) as strategy:
        with strategy.scope():
            model = small_model()
            model.load_state_dict(plain.state_dict())
            optimizer = kind(model.parameters(), **options)
        coordinator = sg.ClusterCoordinator(strategy)
        plain_optimizer = kind(plain.parameters(), **options)
        for number, (x, y) in enumerate(batches):
            ours = coordinator.schedule(step, args=(model, optimizer, number, x, y))
            assert ours.fetch(timeout_s=60) == pytest.approx(
                step(plain, plain_optimizer, number, x, y), rel=1e-4
            )
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class OwnParts(nn.Module):
    """One parameter per worker, which only this worker's steps move."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(2))


def own_step(model: OwnParts, optimizer: torch.optim.Optimizer, rate: float | None = None) -> int:
    """Moves this worker's parameter by its learning rate; `rate` is set on worker 0 only."""
    worker = sg.get_current_worker_index()
    if rate is not None and worker == 0:
        optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    (-model.parts[worker]).backward()
    optimizer.step()
    return worker


def on_both(coordinator: sg.ClusterCoordinator, *args: Any) -> list[int]:
    """Steps until both workers made some; how many each made."""
    done = [0, 0]
    deadline = time.monotonic() + 200.0
    while not all(done):
        assert time.monotonic() < deadline
        for worker in coordinator.fetch([coordinator.schedule(own_step, args) for _ in range(8)]):
            done[worker] += 1
    return done


def moved(model: OwnParts, before: list[float], made: list[int]) -> list[float]:
    """How far each worker's parameter went in one step, on average."""
    now = [part.item() for part in model.parts]
    return [(a - b) / n for a, b, n in zip(now, before, made, strict=True)]


def test_learning_rates_set_anywhere_apply_everywhere(
    cluster: sg.LocalCluster,
) -> None:
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = OwnParts()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        coordinator = sg.ClusterCoordinator(strategy)

        def rates(*extra: Any) -> list[float]:
            before = [part.item() for part in model.parts]
            made = on_both(coordinator, model, optimizer, *extra)
            return moved(model, before, made)

        assert rates() == pytest.approx([0.5, 0.5])
        rates(2.0)  # worker 1 gets the rate of worker 0 after its first step
        assert optimizer.param_groups[0]["lr"] == 2.0
        assert rates() == pytest.approx([2.0, 2.0])
        optimizer.param_groups[0]["lr"] = 0.25  # as a scheduler does
        assert rates() == pytest.approx([0.25, 0.25])
        optimizer.param_groups[0]["lr"] = 0.5  # back to what servers were first told
        assert rates() == pytest.approx([0.5, 0.5])


def test_a_group_added_later_does_not_change_what_the_others_had(alone: sg.LocalCluster) -> None:
    """Servers are told of the new group when the first one's rate is not its first."""
    with sg.ParameterServerStrategy(alone.resolver) as strategy:
        with strategy.scope():
            first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
            nn.init.zeros_(first.weight)
            nn.init.zeros_(second.weight)
            optimizer = torch.optim.SGD(first.parameters(), lr=0.5)
        coordinator = sg.ClusterCoordinator(strategy)

        def step() -> None:
            optimizer.zero_grad()
            (-first.weight.sum() - second.weight.sum()).backward()
            optimizer.step()

        def weights() -> list[float]:
            coordinator.schedule(step)
            coordinator.join(timeout_s=60)
            return [first.weight.item(), second.weight.item()]

        assert weights() == [0.5, 0.0]
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.add_param_group({"params": list(second.parameters()), "lr": 1.0})
        assert weights() == [0.75, 1.0]
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.param_groups[1]["lr"] = 2.0
        assert weights() == [1.25, 3.0]
