"""Checkpoints under parameter servers: the state passes through the coordinator."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from waiting import Gate, pass_gate, wait_until

import stratagem as sg
from stratagem._ps.server import checkpoint_parts


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


def test_two_managers_save_the_same_servers_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server has one cut at a time: the save of the second manager used to end that of the first, and both failed."""
    may_write, written = threading.Event(), checkpoint_parts.write_file

    def held(*args: Any) -> Any:
        assert may_write.wait(60)
        return written(*args)

    monkeypatch.setattr(checkpoint_parts, "write_file", held)
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        with (
            sg.ParameterServerStrategy(cluster.resolver) as strategy,
            ThreadPoolExecutor(1) as pool,
        ):
            with strategy.scope():
                model = nn.Linear(3, 2)
            checkpoint = sg.Checkpoint(model=model)
            with (
                sg.CheckpointManager(checkpoint, tmp_path / "a", every_steps=1) as first,
                sg.CheckpointManager(checkpoint, tmp_path / "b", every_steps=1) as second,
            ):
                saves = [first.save(1)]
                assert second.step(1) is None  # it never waits
                waiting = pool.submit(second.save, 2)
                wait_until(lambda: strategy._variables.client.replacement.turn.is_wanted)
                assert not saves[0].done
                may_write.set()
                saves.append(waiting.result(60))
                single = pool.submit(checkpoint.save, tmp_path / "single")
                checkpoint.restore(saves[0].wait(60).path)  # a restore waits, too
                single.result(60)
                assert [one.wait(60).step for one in saves] == [1, 2]
                assert second.step(3) is not None
            for path in (*tmp_path.glob("*/step_*"), tmp_path / "single"):
                sg.Checkpoint(model=nn.Linear(3, 2)).restore(path)
            assert len(list(tmp_path.glob("*/step_*"))) == 3


def test_a_restore_waits_for_the_functions_that_were_scheduled(tmp_path: Path, gate: Gate) -> None:
    """One that runs later would change restored values."""
    with (
        sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
        ThreadPoolExecutor(1) as pool,
    ):
        with strategy.scope():
            total = sg.Variable(torch.zeros(3))
        checkpoint = sg.Checkpoint(total=total)
        saved = checkpoint.save(tmp_path / "one")
        path = gate.path

        def add() -> None:
            pass_gate(path)
            total.assign_add(torch.ones(3))

        for _ in range(4):
            coordinator.schedule(add)
        gate.wait_for_arrival()
        restoring = pool.submit(checkpoint.restore, saved.path)
        wait_until(lambda: restoring.done() or coordinator._joining)
        gate.open()
        restoring.result(60)
        coordinator.join(timeout_s=60)
        assert total.numpy().tolist() == [0.0] * 3
