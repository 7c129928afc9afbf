"""Tables that one step uses by rows and as a whole: plain PyTorch's numbers, wherever gradients are cleared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg

WORDS, WIDTH, STEPS = 12, 4, 4

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


class Tied(nn.Module):
    """A language model whose output layer is its embedding (GPT-2, word_language_model --tied)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WORDS, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.decoder(torch.tanh(self.hidden(self.encoder(ids))))
        return F.cross_entropy(logits, (ids + 1) % WORDS)


class Graph(nn.Module):
    """LightGCN: propagation over all users and items at once, a penalty on the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(WORDS, WIDTH)
        self.items = nn.Embedding(WORDS, WIDTH)
        edges = torch.rand(2 * WORDS, 2 * WORDS, generator=torch.Generator().manual_seed(1))
        self.register_buffer("edges", (edges > 0.7).float(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        spread = torch.cat([self.users.weight, self.items.weight])
        for _ in range(2):
            spread = spread + self.edges @ spread / 8
        users, items = torch.split(spread, [WORDS, WORDS])
        scores = (users[ids] * items[ids]).sum(1) - (users[ids] * items[(ids + 3) % WORDS]).sum(1)
        penalty = self.users(ids).square().sum() + self.items(ids).square().sum()
        return F.softplus(-scores).mean() + 0.01 * penalty


def by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


CLEARINGS: list[Callable[[nn.Module, torch.optim.Optimizer], None]] = [
    by_optimizer,
    in_place,
    by_model,
    by_hand,
]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clear: Any,
    when: str,
    first: int,
    count: int,
) -> list[float]:
    """Train a few steps; return the norm of each step's gradient and each step's loss."""
    found = []
    for step in range(first, first + count):
        ids = (torch.arange(6) * (step + 2)) % WORDS
        if when == "start":
            clear(model, optimizer)
        loss = model(ids)
        if when == "middle":
            clear(model, optimizer)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found += [float(torch.stack([g.norm() for g in grads]).norm()), float(loss.detach())]
        optimizer.step()
        if when == "end":
            clear(model, optimizer)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as made:
        yield made


def assert_equals_plain_pytorch(
    cluster: sg.LocalCluster, make: Any, optimizer: Any, run: Any, shards: int = 1
) -> None:
    """Compare two scheduled functions, with gradients kept between them or not, with plain PyTorch."""
    torch.manual_seed(2)
    plain = make()
    partitioner = sg.partitioners.FixedShardsPartitioner(shards) if shards > 1 else None
    with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
        with strategy.scope():
            model = make()
            model.load_state_dict(plain.state_dict())
            remote_optimizer = optimizer(model.parameters())
        with sg.ClusterCoordinator(strategy) as coordinator:
            local_optimizer = optimizer(plain.parameters())
            for first in (0, STEPS):
                args = (model, remote_optimizer, first)
                found = coordinator.schedule(run, args=args).fetch(timeout_s=60)
                assert found == pytest.approx(run(plain, local_optimizer, first), rel=1e-4)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "shards"), [("sgd", 1), ("adam", 2)])
@pytest.mark.parametrize("make", [Tied, Graph])
@pytest.mark.parametrize("when", ["start", "middle", "end"])
@pytest.mark.parametrize("clear", CLEARINGS, ids=lambda clear: clear.__name__)
def test_gradients_may_be_cleared_anywhere_in_the_step(
    cluster: sg.LocalCluster, clear: Any, when: str, make: Any, name: str, shards: int
) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        return train(model, optimizer, clear, when, first, STEPS)

    assert_equals_plain_pytorch(cluster, make, OPTIMIZERS[name], run, shards)


def test_gradients_cleared_between_two_backward_passes_of_one_graph(
    cluster: sg.LocalCluster,
) -> None:
    """The same leaves get a gradient again after the table's gradient was cleared."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        loss = model(torch.arange(first, first + 4))
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        optimizer.step()
        return [float(loss.detach())]

    assert_equals_plain_pytorch(cluster, Tied, OPTIMIZERS["adam"], run)


def test_a_gradient_that_shares_memory_with_another_ones_is_not_written(
    cluster: sg.LocalCluster,
) -> None:
    """Autograd may give two leaves of a sum the same memory."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, WIDTH)
            self.other = nn.Parameter(torch.ones(WORDS, WIDTH))

        def forward(self, ids: Tensor) -> Tensor:
            both = self.table.weight.unsqueeze(0) + self.other.unsqueeze(0)
            return both.square().sum() + self.table(ids).sum()

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        return train(model, optimizer, by_optimizer, "middle", first, STEPS)

    assert_equals_plain_pytorch(cluster, Sum, lambda p: torch.optim.SGD(p, lr=0.01), run)


def test_second_derivatives_through_the_gradient_of_two_lookups(cluster: sg.LocalCluster) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).pow(3).sum() + self.table(ids + 1).pow(3).sum()

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        import warnings

        optimizer.zero_grad()
        with warnings.catch_warnings(action="ignore"):
            model(torch.arange(4)).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        assert isinstance(penalty, Tensor)
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [float(penalty.detach())]

    assert_equals_plain_pytorch(cluster, Twice, lambda p: torch.optim.SGD(p, lr=1e-3), run)


@pytest.mark.parametrize("when", ["start", "middle", "end"])
@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_replicas_of_a_worker_give_one_devices_numbers(
    cluster: sg.LocalCluster, aggregation: str, when: str
) -> None:
    """Several lookups and a whole use in one pass are one gradient; two passes add up."""

    class Model(Tied):
        def forward(self, ids: Tensor) -> Tensor:
            more = self.encoder(ids) + self.encoder((ids + 1) % WORDS)
            logits: Tensor = self.decoder(torch.tanh(self.hidden(more)))
            return logits.square().mean()

    torch.manual_seed(2)
    plain, ids = Model(), torch.arange(5)
    with sg.ParameterServerStrategy(
        cluster.resolver, worker_devices=["cpu:0", "cpu:1"], gradient_aggregation=aggregation
    ) as strategy:
        with strategy.scope():
            model = Model()
            model.load_state_dict(plain.state_dict())
            optimizer = OPTIMIZERS["adam"](model.parameters())

        def step(model: Any, optimizer: Any, part: Tensor, scale: float) -> None:
            if when == "start":
                optimizer.zero_grad()
            losses = [model(part), model((part + 2) % WORDS)]
            if when == "middle":
                optimizer.zero_grad()
            for loss in losses:
                (loss * scale).backward()
            optimizer.step()
            if when == "end":
                optimizer.zero_grad()

        def replica(part: Tensor) -> None:
            step(model, optimizer, part, len(part) / 5 if aggregation == "sum" else 1.0)

        def work() -> None:
            for _ in range(2):
                strategy.run(replica, args=(sg.PerReplica([ids[:2], ids[2:]]),))

        with sg.ClusterCoordinator(strategy) as coordinator:
            local = OPTIMIZERS["adam"](plain.parameters())
            for _ in range(2):
                coordinator.schedule(work).fetch(timeout_s=60)
                step(plain, local, ids, 1.0)
                step(plain, local, ids, 1.0)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)
