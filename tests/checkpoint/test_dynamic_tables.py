"""Checkpoints of dynamic tables hold the rows in use, and fit any number of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg

POOL = torch.randint(-(2**62), 2**62, (400,), generator=torch.Generator().manual_seed(0))
MAX_ROWS = 40_000


def make(*, on_disk: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    table = sg.nn.DynamicEmbedding(4, max_rows=MAX_ROWS, on_disk=on_disk)
    model = nn.Sequential(table, nn.Linear(4, 1))
    return model, sg.optim.RowWiseAdagrad(model.parameters(), lr=0.1)


def train(
    directory: Path, steps: int, *, servers: int, full_every: int = 1, on_disk: bool = False
) -> tuple[int, dict]:
    """Train to `steps` from the newest checkpoint, one worker; the first step, and the final rows by id."""
    with sg.LocalCluster(workers=1, ps=servers, in_process=True) as cluster:
        partitioner = sg.partitioners.FixedShardsPartitioner(servers)
        strategy = sg.ParameterServerStrategy(cluster.resolver, variable_partitioner=partitioner)
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                model, optimizer = make(on_disk=on_disk)

            def step(ids: torch.Tensor) -> None:
                optimizer.zero_grad()
                model(ids).pow(2).sum().backward()
                optimizer.step()

            checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
            with sg.CheckpointManager(checkpoint, directory, full_every=full_every) as manager:
                first = manager.restore_or_initialize()
                for number in range(first, steps):
                    random = torch.Generator().manual_seed(number)
                    coordinator.schedule(
                        step, args=(POOL[torch.randint(0, 400, (16,), generator=random)],)
                    )
                    coordinator.join()
                    manager.save(number + 1, wait=True)
            ids, rows = model[0].export()
            return first, dict(zip(ids.tolist(), rows.tolist(), strict=True))


@pytest.mark.parametrize("full_every", [1, 4], ids=["full", "deltas"])
@pytest.mark.parametrize("servers", [1, 3])
def test_a_run_goes_on_with_another_number_of_servers(
    tmp_path: Path, servers: int, full_every: int
) -> None:
    """Rows, keys and optimizer state; also from a chain of deltas."""
    assert train(tmp_path / "a", 3, servers=2, full_every=full_every)[0] == 0
    first, resumed = train(tmp_path / "a", 6, servers=servers, full_every=full_every)
    assert first == 3
    _, unbroken = train(tmp_path / "b", 6, servers=2)
    assert resumed.keys() == unbroken.keys()
    for key, row in resumed.items():
        assert row == pytest.approx(unbroken[key], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, sg.optim.LazyAdam, sg.optim.RowWiseAdagrad])
def test_a_table_in_one_piece_and_state_that_is_no_row(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    """An optimizer's `step` of a table that is not divided is one number, however many rows are in use."""

    def train_on(steps: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
            with sg.ParameterServerStrategy(cluster.resolver) as strategy:
                with strategy.scope():
                    table = sg.nn.DynamicEmbedding(4, max_rows=MAX_ROWS, seed=1)
                    optimizer = kind(table.parameters(), lr=0.1)

                def step(some: torch.Tensor) -> None:
                    optimizer.zero_grad()
                    table(some).pow(2).sum().backward()
                    optimizer.step()

                checkpoint = sg.Checkpoint(table=table, optimizer=optimizer)
                with sg.CheckpointManager(checkpoint, tmp_path / str(len(ids))) as manager:
                    for number in range(manager.restore_or_initialize(), steps):
                        list(strategy.run_steps(step, [ids]))
                        manager.save(number + 1, wait=True)
                found: tuple[torch.Tensor, torch.Tensor] = table.export()
                return found

    train_on(2, POOL[:300])
    resumed = train_on(4, POOL[:300])
    unbroken = train_on(4, POOL[:301])
    kept = torch.isin(unbroken[0], resumed[0])
    assert torch.equal(resumed[0], unbroken[0][kept])
    torch.testing.assert_close(resumed[1], unbroken[1][kept])


def test_a_table_on_disk_continues_in_memory_and_back(tmp_path: Path) -> None:
    """Where rows are kept is no part of a checkpoint; full saves and deltas hold rows and optimizer state."""
    train(tmp_path / "a", 2, servers=2, full_every=4, on_disk=True)
    train(tmp_path / "a", 4, servers=1, full_every=4)
    first, resumed = train(tmp_path / "a", 6, servers=2, full_every=4, on_disk=True)
    assert first == 4
    _, unbroken = train(tmp_path / "b", 6, servers=2)
    assert resumed.keys() == unbroken.keys()
    for key, row in resumed.items():
        assert row == pytest.approx(unbroken[key], rel=1e-5, abs=1e-6)


def test_files_hold_rows_in_use_only(tmp_path: Path) -> None:
    train(tmp_path / "a", 1, servers=2)
    size = sum(one.stat().st_size for one in tmp_path.rglob("*.distcp"))
    assert size < MAX_ROWS * 4  # the whole table would have 16 bytes a row, and its keys 24


def test_from_servers_to_one_device_and_to_plain_pytorch(tmp_path: Path) -> None:
    _, expected = train(tmp_path / "a", 2, servers=2)
    model, optimizer = make()
    sg.Checkpoint(model=model, optimizer=optimizer).restore(tmp_path / "a")
    ids, rows = model[0].export()
    assert dict(zip(ids.tolist(), rows.tolist(), strict=True)) == expected
    assert int((optimizer.state[model[0].weight]["sum"] > 0).sum()) == len(expected)


def test_a_full_table_goes_on_from_its_checkpoint_when_rows_may_leave(tmp_path: Path) -> None:
    """As the error says; `max_rows` must stay the same."""

    def table(**more: Any) -> tuple[nn.Module, sg.Checkpoint]:
        made = sg.nn.DynamicEmbedding(4, seed=1, **more)
        return made, sg.Checkpoint(table=made)

    full, checkpoint = table(max_rows=20)
    full(torch.arange(20))
    with pytest.raises(
        MemoryError, match=r"Let rows leave with evict='age'.*also after a checkpoint"
    ):
        full(torch.tensor([20]))
    path = checkpoint.save(tmp_path / "full").path
    with pytest.raises(sg.errors.CheckpointMismatch, match=r"table\.keys"):
        table(max_rows=40)[1].restore(path)
    leaving, checkpoint = table(max_rows=20, evict="age")
    checkpoint.restore(path)
    for _ in range(70):
        leaving(torch.arange(10))
    leaving(torch.arange(100, 110))
    assert sorted(leaving.export()[0].tolist()) == [*range(10), *range(100, 110)]


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_momentum_of_sparse_gradients_is_saved(tmp_path: Path, is_dynamic: bool) -> None:
    """It is a sparse tensor on the servers, and a dense one in the checkpoint."""
    found = []
    for is_resumed in (False, True):
        with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
            with sg.ParameterServerStrategy(cluster.resolver) as strategy:
                torch.manual_seed(0)
                with strategy.scope():
                    table = nn.Embedding(500, 4, sparse=True)
                    if is_dynamic:
                        table = sg.nn.DynamicEmbedding(4, max_rows=500, seed=1)
                    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)

                def step(ids: torch.Tensor) -> None:
                    optimizer.zero_grad()
                    table(ids).pow(2).sum().backward()
                    optimizer.step()

                checkpoint = sg.Checkpoint(table=table, optimizer=optimizer)
                if is_resumed:
                    checkpoint.restore(tmp_path / "half")
                else:
                    list(strategy.run_steps(step, [torch.arange(100)] * 3))
                    checkpoint.save(tmp_path / "half")
                list(strategy.run_steps(step, [torch.arange(100)] * 3))
                found.append(table(torch.arange(100)).detach())
    assert torch.equal(*found)
