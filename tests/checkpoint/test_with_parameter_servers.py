"""Checkpoints under parameter servers: the state passes through the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg


def train(directory: Path, steps: int, *, servers: int, shards: int) -> tuple[int, list[Any]]:
    """Train to `steps` from the newest checkpoint, one worker; the first step, and the final state."""
    torch.manual_seed(0)
    with sg.LocalCluster(workers=1, ps=servers, in_process=True) as cluster:
        partitioner = sg.partitioners.FixedShardsPartitioner(shards)
        strategy = sg.ParameterServerStrategy(cluster.resolver, variable_partitioner=partitioner)
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                model = nn.Sequential(nn.EmbeddingBag(100, 4, mode="sum"), nn.Linear(4, 1))
                optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
                total = sg.Variable(torch.zeros(10, 2), name="total")

            def step(ids: torch.Tensor) -> None:
                optimizer.zero_grad()
                model(ids).pow(2).sum().backward()
                optimizer.step()

            checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, total=total)
            with sg.CheckpointManager(checkpoint, directory) as manager:
                first = manager.restore_or_initialize()
                for number in range(first, steps):
                    ids = torch.randint(
                        0, 100, (8, 3), generator=torch.Generator().manual_seed(number)
                    )
                    coordinator.schedule(step, args=(ids,))
                    coordinator.join()
                    total.assign_add(torch.full((10, 2), float(number)))
                    manager.save(number + 1, wait=True)
            weights = [each.clone() for each in model.state_dict().values()]
            sums = [each["sum"].clone() for each in optimizer.state_dict()["state"].values()]
            return first, [*weights, *sums, torch.as_tensor(total.numpy())]


@pytest.mark.parametrize(("servers", "shards"), [(1, 1), (3, 3)])
def test_a_run_goes_on_with_another_number_of_servers(
    tmp_path: Path, servers: int, shards: int
) -> None:
    """With one worker the weights are those of an unbroken run, whatever the servers and shards."""
    assert train(tmp_path / "a", 3, servers=2, shards=2)[0] == 0
    first, resumed = train(tmp_path / "a", 6, servers=servers, shards=shards)
    assert first == 3
    _, unbroken = train(tmp_path / "b", 6, servers=2, shards=2)
    for one, other in zip(resumed, unbroken, strict=True):
        torch.testing.assert_close(one, other)


def test_from_servers_to_one_device(tmp_path: Path) -> None:
    _, state = train(tmp_path / "a", 2, servers=2, shards=2)
    model = nn.Sequential(nn.EmbeddingBag(100, 4, mode="sum"), nn.Linear(4, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    total = sg.Variable(torch.zeros(10, 2))
    sg.Checkpoint(model=model, optimizer=optimizer, total=total).restore(tmp_path / "a")
    assert torch.equal(model[0].weight, state[0])
    assert torch.equal(optimizer.state[model[0].weight]["sum"], state[3])
    assert torch.equal(total.read_value(), state[-1])
