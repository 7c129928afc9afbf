"""Optimizers whose parameters influence each other: right on one parameter server, refused on several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from own_optimizer import (
    Clipping,
    CountingGroups,
    Factored,
    Needing,
    Noisy,
    SeveralMomenta,
    Sharing,
    SignDescent,
    TrustRatio,
    Windowed,
)
from torch import nn

import stratagem as sg
from stratagem._ps.coordinator.optimizer_trial import check_construction, looks_across_parameters
from stratagem.errors import UnsupportedOptimizer


class Net(nn.Module):
    """Parameters of several shapes, on every server; `extra` is used by odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.first = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, step: int) -> torch.Tensor:
        hidden = torch.tanh(self.first(self.table(ids)))
        return (self.extra(hidden) if step % 2 else hidden).square().sum()


@pytest.fixture(scope="module", params=[1, 2], ids=["one server", "two servers"])
def cluster(request: pytest.FixtureRequest) -> Iterator[sg.LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATAGEM_OPTIMIZER_MODULES", "own_optimizer")
        with sg.LocalCluster(workers=1, ps=request.param, in_process=True) as made:
            yield made


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(5):
        optimizer.zero_grad()
        model(torch.tensor([1, 5, 1]), step).backward()
        optimizer.step()


def train_remotely(
    cluster: sg.LocalCluster, make: Any, partitioner: Any = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights after a scheduled function, and after the same function in plain PyTorch."""
    torch.manual_seed(4)
    plain = Net()
    with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
        with strategy.scope():
            model = Net()
            model.load_state_dict(plain.state_dict())
            optimizer = make(model.parameters())
        with sg.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(train, args=(model, optimizer)).fetch(timeout_s=60)
            train(plain, make(plain.parameters()))
            remote = [one.detach().clone() for one in model.parameters()]
            return remote, [one.detach() for one in plain.parameters()]


def servers_of(cluster: sg.LocalCluster) -> int:
    return cluster.resolver.cluster_spec().num_tasks("ps")


@pytest.mark.parametrize("kind", [Clipping, Sharing])
def test_influence_between_parameters(cluster: sg.LocalCluster, kind: Any) -> None:
    if servers_of(cluster) == 1:
        remote, plain = train_remotely(cluster, kind)
        torch.testing.assert_close(remote, plain)
        return
    with pytest.raises(UnsupportedOptimizer, match=rf"{kind.__name__} computes .* 2 parameter"):
        train_remotely(cluster, kind)


def per_group(parameters: Any) -> torch.optim.Optimizer:
    """One parameter per group: influence between groups counts, too."""
    return Clipping([{"params": [one]} for one in parameters])


def test_influence_between_groups(cluster: sg.LocalCluster) -> None:
    if servers_of(cluster) == 2:
        with pytest.raises(UnsupportedOptimizer, match="Clipping computes"):
            train_remotely(cluster, per_group)


def unclipped(parameters: Any) -> torch.optim.Optimizer:
    return Clipping(parameters, max_grad_norm=None)


@pytest.mark.parametrize("make", [SignDescent, unclipped, TrustRatio, CountingGroups])
def test_parameters_by_themselves(cluster: sg.LocalCluster, make: Any) -> None:
    """Counters of groups move with every step, on servers without a gradient, too."""
    remote, plain = train_remotely(cluster, make)
    torch.testing.assert_close(remote, plain)


def test_random_numbers_are_no_influence(cluster: sg.LocalCluster) -> None:
    """The trial does not disturb the program's random numbers, either."""
    train_remotely(cluster, Noisy)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    optimizer = Noisy([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    assert not looks_across_parameters(optimizer)
    assert torch.equal(torch.rand(3), expected)


def test_whole_tensors_in_shards(cluster: sg.LocalCluster) -> None:
    two = sg.partitioners.FixedShardsPartitioner(2)
    with pytest.raises(UnsupportedOptimizer, match="TrustRatio looks at a whole tensor"):
        train_remotely(cluster, TrustRatio, two)
    remote, plain = train_remotely(cluster, SignDescent, two)
    torch.testing.assert_close(remote, plain)


def needing(parameters: Any) -> torch.optim.Optimizer:
    return Needing(parameters, torch.sign)


def test_a_class_that_servers_cannot_construct_is_named_with_the_reason(
    cluster: sg.LocalCluster,
) -> None:
    with pytest.raises(UnsupportedOptimizer, match=r"cannot construct Needing.*'rule'"):
        train_remotely(cluster, needing)


def test_state_that_servers_cannot_send_is_refused(cluster: sg.LocalCluster) -> None:
    """Issue 20: reading such state ended the server. The trial leaves the random numbers alone."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with pytest.raises(
        UnsupportedOptimizer, match=r"SeveralMomenta keeps a dict as state .*'momenta'"
    ):
        check_construction(SeveralMomenta([nn.Parameter(torch.ones(2))]))
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(UnsupportedOptimizer, match="SeveralMomenta keeps a dict as state"):
        train_remotely(cluster, SeveralMomenta)
    remote, plain = train_remotely(cluster, SignDescent)  # the servers are there
    torch.testing.assert_close(remote, plain)


def test_state_of_matrices_alone_is_refused_as_well(cluster: sg.LocalCluster) -> None:
    with pytest.raises(UnsupportedOptimizer, match=r"Factored keeps a list as state 'factors'"):
        train_remotely(cluster, Factored)


def test_state_that_appears_later_ends_no_server(cluster: sg.LocalCluster) -> None:
    """The trial does not see it; reading the state raises the same error."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 2)
            optimizer = Windowed(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        with sg.ClusterCoordinator(strategy) as coordinator:
            for _ in range(4):
                coordinator.schedule(step)
            coordinator.join(timeout_s=60)
            with pytest.raises(
                UnsupportedOptimizer, match="Windowed keeps a deque as state 'window'"
            ):
                optimizer.state_dict()
            coordinator.schedule(step).get(timeout_s=60)  # the servers are there
    remote, plain = train_remotely(cluster, SignDescent)
    torch.testing.assert_close(remote, plain)


def test_muon_steps_on_matrices(cluster: sg.LocalCluster) -> None:
    """It cannot be constructed over a vector."""

    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=0.1)

    remote, plain = train_remotely(cluster, muon)
    torch.testing.assert_close(remote, plain)
    with pytest.raises(UnsupportedOptimizer, match="Muon looks at a whole tensor"):
        train_remotely(cluster, muon, sg.partitioners.FixedShardsPartitioner(2))
