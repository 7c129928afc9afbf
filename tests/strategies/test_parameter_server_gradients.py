"""Gradients in shared-memory slots: plain PyTorch's numbers whatever a function does with ``.grad``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stratagem as sg
from stratagem._ps.worker.dense_parameter import IN_PLACE_BYTES

pytestmark = pytest.mark.process

NUMBERS = 1 << 19  # 2 MB

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "nesterov, foreach": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, foreach=True
    ),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.01, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Net(nn.Module):
    """Weights of 512 KB, which keep their gradients in slots, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.norm = nn.LayerNorm(512)
        self.second = nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return out


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


Train = Callable[[nn.Module, torch.optim.Optimizer, Tensor], None]


def assert_trains_alike(
    cluster: sg.LocalCluster, train: Train, *, make: Any = Net, optimizer: Any = sgd
) -> None:
    """Train by `train`, in one scheduled function and in plain PyTorch, and compare the weights."""
    torch.manual_seed(3)
    plain, x = make(), torch.randn(16, 256)
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = make()
            model.load_state_dict(plain.state_dict())
            remote_optimizer = optimizer(model.parameters())
        with sg.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(train, args=(model, remote_optimizer, x)).fetch(timeout_s=60)
            train(plain, optimizer(plain.parameters()), x)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)


# What functions do with gradients.


def test_zeroed_in_place_and_set_to_none_in_turns(cluster: sg.LocalCluster) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 3 != 1)
            loss_of(model, x + step).backward()
            optimizer.step()

    assert_trains_alike(cluster, train)


def test_detached_and_zeroed_as_before_set_to_none(cluster: sg.LocalCluster) -> None:
    """Torch refuses `detach_` of a view."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        for step in range(3):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
            loss_of(model, x + step).backward()
            optimizer.step()

    assert_trains_alike(cluster, train)


def test_accumulated_over_several_backward_passes(cluster: sg.LocalCluster) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        for step in range(4):
            optimizer.zero_grad()
            for part in range(3):
                loss_of(model, x + step + part).backward()
            optimizer.step()

    assert_trains_alike(cluster, train)


def test_never_zeroed(cluster: sg.LocalCluster) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        for step in range(3):
            loss_of(model, x + step).backward()
            optimizer.step()

    assert_trains_alike(cluster, train)


def test_clipped_in_place(cluster: sg.LocalCluster) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, 10 * x + step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            nn.utils.clip_grad_value_(model.parameters(), 0.0001)
            optimizer.step()

    assert_trains_alike(cluster, train)


def test_replaced_by_other_tensors(cluster: sg.LocalCluster) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, x + step).backward()
            first, *others = model.parameters()
            assert first.grad is not None
            first.grad = first.grad * 0.5
            others[-2].grad = first.grad.t().contiguous()  # another one's, of the same shape
            others[-1].grad = None
            if step == 2:
                first.grad = first.grad.view_as(first)
            optimizer.step()

    assert_trains_alike(cluster, train)


def test_kept_by_the_user_after_the_step(cluster: sg.LocalCluster) -> None:
    """A gradient that the function still holds is not overwritten by the next backward pass."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        kept, copies = [], []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, x + step).backward()
            for number, parameter in enumerate(model.parameters()):
                assert parameter.grad is not None
                kept.append(parameter.grad if number % 2 else parameter.grad[:1])
                copies.append(kept[-1].clone())
            optimizer.step()
            for one, other in zip(kept, copies, strict=True):
                assert torch.equal(one, other)

    assert_trains_alike(cluster, train)


def test_tied_weights_and_hooks(cluster: sg.LocalCluster) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(256, 256, bias=False)
            self.second = nn.Linear(256, 256, bias=False)
            self.second.weight = self.first.weight
            self.first.weight.register_hook(lambda grad: grad * 0.5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(torch.tanh(self.first(x)))
            return out

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        (weight,) = model.parameters()

        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        handle = weight.register_post_accumulate_grad_hook(halve)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, x + step).backward()
            optimizer.step()
        handle.remove()

    assert_trains_alike(cluster, train, make=Tied)


def test_frozen_then_unfrozen(cluster: sg.LocalCluster) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        first = next(model.parameters())
        for step in range(4):
            first.requires_grad_(step % 2 == 1)
            optimizer.zero_grad()
            loss_of(model, x + step).backward()
            optimizer.step()
        first.requires_grad_()

    assert_trains_alike(cluster, train)


def test_part_of_a_graph(cluster: sg.LocalCluster) -> None:
    """``create_graph`` makes gradients that can be differentiated again: they stay where they are."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        import warnings

        for step in range(3):
            optimizer.zero_grad()
            with warnings.catch_warnings(action="ignore"):
                loss_of(model, x + step).backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
            assert isinstance(penalty, Tensor)
            penalty.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_alike(cluster, train)


def test_two_optimizers_and_a_step_without_some_gradients(cluster: sg.LocalCluster) -> None:
    torch.manual_seed(5)
    plain, x = Net(), torch.randn(16, 256)

    def train(model: Any, one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> None:
        for step in range(5):
            one.zero_grad()
            two.zero_grad()
            loss = model(x).mean() if step % 2 else model.first(x + step).square().mean()
            loss.backward()
            one.step()
            two.step()

    def optimizers(model: Net) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        shared = [*model.first.parameters(), *model.second.parameters()]
        return torch.optim.SGD(shared, lr=0.1), torch.optim.Adam(model.second.parameters())

    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = Net()
            model.load_state_dict(plain.state_dict())
            made = optimizers(model)
        with sg.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(train, args=(model, *made)).fetch(timeout_s=60)
            train(plain, *optimizers(plain))
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)


# All optimizers; and where gradients lie.


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_plain_pytorchs_numbers(
    cluster: sg.LocalCluster, name: str, shards: int
) -> None:
    """One worker, steps scheduled one by one; gradients stay what they were."""
    torch.manual_seed(3)
    plain = Net()
    batches = [torch.randn(16 + 16 * (index % 3), 256) for index in range(9)]
    partitioner = sg.partitioners.FixedShardsPartitioner(shards)
    with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
        with strategy.scope():
            model = Net()
            model.load_state_dict(plain.state_dict())
            optimizer = OPTIMIZERS[name](model.parameters())

        def step(x: Tensor) -> tuple[float, list[int]]:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            kept = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            for parameter, grad in zip(model.parameters(), kept, strict=True):
                assert torch.equal(parameter.grad, grad)
            large = [p.grad for p in model.parameters() if p.nbytes >= IN_PLACE_BYTES]
            return float(loss.detach()), [grad.data_ptr() for grad in large]

        with sg.ClusterCoordinator(strategy) as coordinator:
            found = [coordinator.schedule(step, args=(x,)).fetch(timeout_s=60) for x in batches]
            optimizer = OPTIMIZERS[name](plain.parameters())
            losses = []
            for x in batches:
                optimizer.zero_grad()
                loss = plain(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-4)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)
            if shards == 1:  # large gradients lie in the same memory in every step
                assert len({tuple(places) for _, places in found}) == 1


def test_large_gradients_are_not_copied_by_the_step(cluster: sg.LocalCluster) -> None:
    """A step copies small gradients into their slots and nothing else: torch sees every copy."""

    class CountedCopies(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "copy" in str(func) or "clone" in str(func):
                written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
                self.nbytes += sum(one.nbytes for one in written)
            return func(*args, **(kwargs or {}))

    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 256)

        def step() -> int:
            """Return how many bytes the third step copies."""
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                with CountedCopies() as copies:
                    optimizer.step()
            return copies.nbytes

        with sg.ClusterCoordinator(strategy) as coordinator:
            small = sum(p.nbytes for p in model.parameters() if p.nbytes < IN_PLACE_BYTES)
            assert coordinator.schedule(step).fetch(timeout_s=60) == small


def test_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, x + step).backward()
            optimizer.step()

    with sg.LocalCluster(workers=1, ps=2) as cluster:
        assert_trains_alike(cluster, train)


# Writes of variables: copied once.


def test_a_value_may_be_changed_at_once_after_it_was_assigned(cluster: sg.LocalCluster) -> None:
    """Whole values and rows alike; more of them than the send buffers hold."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            v, table = sg.Variable(torch.zeros(NUMBERS)), sg.Variable(torch.zeros(1 << 12, 1 << 8))

        def step() -> None:
            delta = torch.ones(NUMBERS)
            ids, rows = torch.arange(1 << 12), torch.full((1 << 12, 1 << 8), 2.0)
            for _ in range(5):
                v.assign_add(delta)
                delta.fill_(100.0)
                delta.fill_(1.0)
                table.scatter_add(torch.sparse_coo_tensor(ids[None], rows, table.shape))
                rows.fill_(50.0)
                rows.fill_(2.0)
            v.assign_sub(delta[:].view(NUMBERS))

        with sg.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(step).fetch(timeout_s=60)
            assert torch.equal(v.read_value(), torch.full((NUMBERS,), 4.0))
            assert torch.equal(table.read_value(), torch.full((1 << 12, 1 << 8), 10.0))


def test_values_arrive_as_they_read_whatever_their_layout(cluster: sg.LocalCluster) -> None:
    """Transposed, with gaps, expanded, conjugated or negated lazily."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            v = sg.Variable(torch.zeros(1 << 9, 1 << 10))
            z = sg.Variable(torch.zeros(NUMBERS, dtype=torch.complex64))
            model = nn.Linear(NUMBERS, 1, bias=False, dtype=torch.complex64)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step() -> None:
            square = torch.arange(float(NUMBERS)).view(1 << 10, 1 << 9)
            v.assign_add(square.t())
            v.assign_add(torch.ones(1 << 9, 1 << 11)[:, ::2])
            v.assign_add(torch.ones(1, 1 << 10).expand(1 << 9, 1 << 10))
            v.assign_add(torch._neg_view(torch.ones(1 << 9, 1 << 10)))
            z.assign_add(torch.full((NUMBERS,), 1 + 2j).conj())
            weight = model.weight
            for used in (weight, weight.conj(), weight, weight.conj()):
                optimizer.zero_grad()
                (used * torch.full((1, NUMBERS), 1 + 2j)).real.sum().backward()
                optimizer.step()

        with sg.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(step).fetch(timeout_s=60)
            wanted = torch.arange(float(NUMBERS)).view(1 << 10, 1 << 9).t() + 1.0
            assert torch.equal(v.read_value(), wanted)
            assert torch.equal(z.read_value(), torch.full((NUMBERS,), 1 - 2j))
            # Each of four steps takes away 1 - 2j, or with the conjugate 1 + 2j.
            assert torch.equal(model.weight.detach(), torch.full((1, NUMBERS), -4 + 0j))


def test_workers_killed_while_servers_read_their_memory() -> None:
    """FLT-5: exactly once holds for large writes, too."""
    with (
        sg.LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            variables = [sg.Variable(torch.zeros(NUMBERS)) for _ in range(2)]

        def step() -> None:
            for variable in variables:
                variable.assign_add(torch.ones(NUMBERS))

        with sg.ClusterCoordinator(strategy) as coordinator:
            for round_ in range(6):
                for _ in range(25):
                    coordinator.schedule(step, exactly_once=True)
                cluster.kill_worker(round_ % 2)
            coordinator.join(timeout_s=120)
            for variable in variables:
                assert torch.equal(variable.read_value(), torch.full((NUMBERS,), 150.0))


def test_a_model_may_be_copied_in_a_function(cluster: sg.LocalCluster) -> None:
    """The copy is the function's own: its gradients lie in no slot."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = Net()
        x = torch.randn(4, 256)

        def step() -> bool:
            loss_of(model, x).backward()
            twin = copy.deepcopy(model)
            twin.zero_grad()
            loss_of(twin, x).backward()
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            return all(
                torch.equal(one.grad, other.grad) and one.grad.data_ptr() != other.grad.data_ptr()
                for one, other in pairs
            )

        with sg.ClusterCoordinator(strategy) as coordinator:
            assert coordinator.schedule(step).fetch(timeout_s=60)


def test_parameters_without_elements_are_trained_like_others(
    either_way: sg.ClusterCoordinator,
) -> None:
    """``nn.Linear(hidden // 4, 2)`` of a small model has an empty weight; its bias is trained."""
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))

    def train(run: Callable[..., Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            model = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            (model(x) - 1.0).square().mean().backward()
            optimizer.step()

        for _ in range(3):
            run(step)
        return model.state_dict()

    with either_way.strategy.scope():
        mine = train(lambda step: either_way.schedule(step).get(timeout_s=60))
    torch.testing.assert_close(mine, train(lambda step: step()))
