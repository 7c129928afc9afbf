"""Modules as people write them: converted, copied, hooked, parametrized, with buffers they assign to.

One worker, asynchronously or not, gives plain PyTorch's numbers (issue 4: "an unmodified step works").
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scheduling import WAIT_S, run
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import stratagem as sg

pytestmark = pytest.mark.process


@pytest.fixture
def partitioner() -> sg.partitioners.Partitioner:
    """Everything in two pieces."""
    return sg.partitioners.FixedShardsPartitioner(2)


def train_both(
    coordinator: sg.ClusterCoordinator,
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    example: Callable[[int], Tensor],
    steps: int = 4,
) -> tuple[nn.Module, nn.Module]:
    """Train the same model here and there; the two must be the same afterwards."""
    strategy = coordinator.strategy
    torch.manual_seed(0)
    here, optimizer_here = make()
    torch.manual_seed(0)
    with strategy.scope():
        there, optimizer_there = make()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def step_there(x: Tensor) -> None:
        if strategy.num_replicas_in_sync == 1:
            step(there, optimizer_there, x)
        else:
            strategy.run(step, args=(there, optimizer_there, sg.PerReplica(list(x.chunk(2)))))

    for number in range(steps):
        step(here, optimizer_here, example(number))
        coordinator.schedule(step_there, args=(example(number),))
        coordinator.join(timeout_s=WAIT_S)
    for name, value in here.state_dict().items():
        torch.testing.assert_close(
            there.state_dict()[name], value, msg=lambda m, n=name: f"{n}: {m}"
        )
    return here, there


def rows(number: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


def ids(number: int) -> Tensor:
    return torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(number))


# ------------------------------------------------------------------ hooks


def test_gradient_hooks_of_the_coordinator_act_on_workers(
    coordinator: sg.ClusterCoordinator,
) -> None:
    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        model[1].weight.register_post_accumulate_grad_hook(double)
        model[1].bias.register_hook(lambda gradient: gradient / 4)
        model[1].bias.requires_grad_(False)  # hooked, then frozen
        return model, torch.optim.SGD(model.parameters(), 0.1)

    train_both(coordinator, make, rows)


def test_a_gradient_hook_on_a_table_sees_the_whole_gradient(
    coordinator: sg.ClusterCoordinator,
) -> None:
    frozen_rows = torch.ones(20, 6)
    frozen_rows[3:9] = 0

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 3))
        model[0].weight.register_hook(lambda gradient: gradient * frozen_rows)
        return model, torch.optim.Adagrad(model.parameters(), 0.1)

    train_both(coordinator, make, ids)


def test_step_hooks_of_the_coordinator_act_on_workers(coordinator: sg.ClusterCoordinator) -> None:
    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer.register_step_pre_hook(halve)
        # What comes after the step cannot change it: had it run before, nothing would move.
        optimizer.register_step_post_hook(lambda o, args, kwargs: o.zero_grad(set_to_none=False))
        return model, optimizer

    train_both(coordinator, make, rows)


class Watching(nn.Module):
    """Its hooks and attributes lead back to itself, as those of feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.inner.register_forward_hook(self.scaled)
        self.inner.owner = [self]  # type: ignore[assignment]
        self.inner.weight.register_hook(self.damped)

    def scaled(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.scale

    def damped(self, gradient: Tensor) -> Tensor:
        return gradient / (1 + self.inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def test_references_from_a_part_to_the_whole_are_sent(
    coordinator: sg.ClusterCoordinator,
) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Watching()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    _, there = train_both(coordinator, make, rows)
    assert run(coordinator, lambda: there.inner.owner[0] is there)


# ------------------------------------------------------------------ other kinds of modules


def test_parametrized_modules_train(coordinator: sg.ClusterCoordinator) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(6, 8)),
            parametrizations.orthogonal(nn.Linear(8, 8)),
            nn.Linear(8, 3),
        )
        return model, torch.optim.SGD(model.parameters(), 0.1)

    train_both(coordinator, make, rows)


def test_spectral_norm_trains(alone: sg.ClusterCoordinator) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 3)))
        return model, torch.optim.SGD(model.parameters(), 0.1)

    train_both(alone, make, rows)


@pytest.mark.parametrize("inside", [True, False], ids=["in the scope", "after it"])
def test_a_model_converted_before_its_first_use_keeps_its_dtype_on_servers(
    alone: sg.ClusterCoordinator, inside: bool
) -> None:
    with alone.strategy.scope():
        model: nn.Module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
        if inside:
            model = model.double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if not inside:
        model.double()

    def step(x: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    seen = run(alone, step, rows(0).double())
    assert {value.dtype for value in seen.values()} == {torch.float64, torch.int64}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, seen[name])
    assert float(model[1].running_mean.abs().sum()) > 0
    model.float()
    with pytest.raises(
        ValueError, match=r"torch.float32 now, but is stored .* as .* torch.float64"
    ):
        alone.schedule(lambda: model)


# ------------------------------------------------------------------ buffers


class Counting(nn.Module):
    """Assigns to its buffers, instead of writing into them."""

    def __init__(self, wide: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(wide))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + self.mean[:3]
        self.calls = self.calls + 1
        self.mean = self.mean * 0.9 + 0.1
        return result


@pytest.mark.parametrize("wide", [3, 1 << 17], ids=["small", "large"])
def test_a_buffer_that_a_step_assigns_to_reaches_the_server(
    coordinator: sg.ClusterCoordinator, wide: int
) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Counting(wide)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    here, there = train_both(coordinator, make, rows)
    assert float(there.calls) == float(here.calls) == 4


def test_a_buffer_assigned_to_by_a_function_that_fails_stays(alone: sg.ClusterCoordinator) -> None:
    with alone.strategy.scope():
        model = Counting()

    def fail() -> None:
        model(rows(0))
        raise LookupError

    alone.schedule(fail)
    with pytest.raises(LookupError):
        alone.join(timeout_s=WAIT_S)
    assert float(model.calls) == run(alone, lambda: float(model.calls)) == 0

    def misshape() -> None:
        model.mean = torch.zeros(2)

    alone.schedule(misshape)
    with pytest.raises(ValueError, match=r"buffer 'mean' was given \(2,\)"):
        alone.join(timeout_s=WAIT_S)
    assert run(alone, lambda: model.mean.shape) == (3,)


@pytest.mark.parametrize("wide", [3, 1 << 17], ids=["small", "large"])
def test_a_buffer_that_a_function_resizes_raises_an_error_and_stays(
    alone: sg.ClusterCoordinator, wide: int
) -> None:
    """Observers of quantization find the number of channels in their first forward pass."""
    with alone.strategy.scope():
        model = Counting(wide)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def observe() -> None:
        model.mean.resize_(wide + 1)
        model.mean.fill_(1.0)
        optimizer.zero_grad()
        model.inner(rows(0)).sum().backward()
        optimizer.step()

    alone.schedule(observe)
    with pytest.raises(ValueError, match=r"buffer 'mean' was given .* one forward pass on the"):
        alone.join(timeout_s=WAIT_S)
    model.mean.fill_(0.5)
    assert run(alone, lambda: (tuple(model.mean.shape), float(model.mean.sum()))) == (
        (wide,),
        wide / 2,
    )


def test_swapping_buffers_for_one_call_writes_nothing(coordinator: sg.ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        norm = nn.BatchNorm1d(3)

    def call(x: Tensor) -> Tensor:
        swapped = {"running_mean": torch.full((3,), 5.0), "running_var": torch.ones(3)}
        norm.eval()
        return torch.func.functional_call(norm, swapped, (x,)).detach()

    expected = functional.batch_norm(torch.zeros(2, 3), torch.full((3,), 5.0), torch.ones(3))
    torch.testing.assert_close(run(coordinator, call, torch.zeros(2, 3)), expected)
    torch.testing.assert_close(call(torch.zeros(2, 3)), expected)
    assert norm.running_mean.tolist() == [0, 0, 0]
    assert run(coordinator, lambda: norm.running_mean.tolist()) == [0, 0, 0]


def test_a_buffer_assigned_on_the_coordinator_is_seen_by_later_functions(
    coordinator: sg.ClusterCoordinator,
) -> None:
    with coordinator.strategy.scope():
        norm = nn.BatchNorm1d(2)

    def seen() -> list[float]:
        return norm.running_mean.tolist()

    assert run(coordinator, seen) == [0, 0]
    norm.running_mean = torch.full((2,), 5.0)
    assert run(coordinator, seen) == [5, 5]
    norm.running_mean = norm.running_mean + 1
    assert run(coordinator, seen) == norm.running_mean.tolist() == [6, 6]


def test_statistics_of_copies_and_shared_buffers_are_merged(
    alone: sg.ClusterCoordinator,
) -> None:
    with alone.strategy.scope():
        first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        second.running_mean = first.running_mean
    twin = copy.deepcopy(first)

    def use(x: Tensor) -> tuple[Tensor, Tensor]:
        first(x)
        twin(x + 1)
        assert second.running_mean is first.running_mean
        return second.running_mean.clone(), twin.running_mean.clone()

    shared, copied = run(alone, use, rows(0)[:, :2])
    torch.testing.assert_close(first.running_mean, shared)
    torch.testing.assert_close(second.running_mean, shared)
    torch.testing.assert_close(twin.running_mean, copied)
    torch.testing.assert_close(copied, shared + 0.1)


# ------------------------------------------------------------------ state


def test_momentum_of_sparse_gradients_is_in_the_state_dict(
    alone: sg.ClusterCoordinator,
) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizers.append(optimizer)
        return model, optimizer

    optimizers: list[torch.optim.Optimizer] = []
    train_both(alone, make, ids)
    here, there = (one.state_dict()["state"][0]["momentum_buffer"] for one in optimizers)
    torch.testing.assert_close(there, here.to_dense())
