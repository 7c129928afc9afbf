"""Parameter servers write and read their own rows: real processes, kills, another number of servers."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem._checkpoint.directory import chain_of, load
from stratagem._ps.blocks.block_reader import BlockReader
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem.errors import CheckpointCorrupt, CheckpointError

pytestmark = pytest.mark.process

ROWS, COLUMNS = 400, 8


class Program:
    """A table and a layer on parameter servers, trained by one worker."""

    def __init__(self, cluster: sg.LocalCluster, shards: int, optimizer: str) -> None:
        torch.manual_seed(0)
        self.strategy = sg.ParameterServerStrategy(
            cluster.resolver, variable_partitioner=sg.partitioners.FixedShardsPartitioner(shards)
        )
        self.coordinator = sg.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            model = nn.Sequential(
                nn.EmbeddingBag(ROWS, COLUMNS, mode="sum"), nn.BatchNorm1d(COLUMNS), nn.Linear(8, 1)
            )
            self.total = sg.Variable(torch.zeros(10, 2), name="total")
        made = {
            "adagrad": lambda: torch.optim.Adagrad(model.parameters(), lr=0.1),
            "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.01),
            "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        }
        self.model, self.optimizer = model, made[optimizer]()
        self.checkpoint = sg.Checkpoint(
            model=model, optimizer=self.optimizer, parts={"total": self.total}
        )

    def train(self, steps: int, seed: int = 0) -> None:
        model, optimizer = self.model, self.optimizer

        def step(ids: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(ids).pow(2).sum().backward()
            optimizer.step()

        for number in range(steps):
            made = torch.Generator().manual_seed(1000 * seed + number)
            self.coordinator.schedule(step, args=(torch.randint(0, ROWS, (16, 3), generator=made),))
        self.coordinator.join(timeout_s=120)
        self.total.assign_add(torch.full((10, 2), float(seed + 1)))

    def state(self) -> list[torch.Tensor]:
        found = [each.clone() for each in self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            found += [each.clone() for each in state.values() if isinstance(each, torch.Tensor)]
        return [*found, torch.as_tensor(self.total.numpy()).clone()]


@contextmanager
def program(
    servers: int, shards: int, optimizer: str = "adagrad", *, in_process: bool = True
) -> Iterator[tuple[Program, sg.LocalCluster]]:
    with sg.LocalCluster(workers=1, ps=servers, in_process=in_process) as cluster:
        made = Program(cluster, shards, optimizer)
        with made.strategy, made.coordinator:
            yield made, cluster


def rows_by_file(saved: Any) -> dict[str, int]:
    """How many rows of the table each file has."""
    found: dict[str, int] = {}
    for block in saved.manifest.blocks:
        if block.tensor == "model.0.weight":
            found[block.file] = found.get(block.file, 0) + block.rows
    return found


@pytest.mark.parametrize(
    "optimizer",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("adagrad", "adam")), "momentum"],
)
def test_round_trip_to_other_servers(tmp_path: Path, optimizer: str) -> None:
    """2 servers and 2 shards → 3 and 3 → 1 and 1 → one device: bit for bit, by bare torch, too."""
    with program(2, 2, optimizer) as (first, _):
        first.train(4)
        saved = first.checkpoint.save(tmp_path / "a")
        expected = first.state()
    assert rows_by_file(saved) == {"__1_0.distcp": 200, "__2_0.distcp": 200}
    with BlockReader(chain_of(saved)) as reader:
        reader.verify()
    path = tmp_path / "a"
    for servers in (3, 1):
        with program(servers, servers, optimizer) as (other, _):
            other.train(1, seed=5)  # everything that must be replaced exists
            other.checkpoint.restore(path)
            for one, two in zip(other.state(), expected, strict=True):
                assert torch.equal(one, two)
            path = tmp_path / f"on_{servers}"
            saved = other.checkpoint.save(path)
            assert len(rows_by_file(saved)) == servers
    with program(2, 2, optimizer) as (other, _):  # nothing is on the servers yet
        other.checkpoint.restore(path)
        for one, two in zip(other.state(), expected, strict=True):
            assert torch.equal(one, two)
    code = (
        "import sys, torch\n"
        "sys.modules['stratagem'] = None\n"
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
        f"dcp_to_torch_save({str(tmp_path / 'a')!r}, {str(tmp_path / 'one.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(one["model"]["0.weight"], expected[0])


def test_nothing_is_fetched_to_save_or_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that workers changed stay on the servers: neither pass reads a variable."""
    with program(2, 2) as (made, _):
        made.train(2)
        saved_state = made.state()
        made.train(1, seed=1)  # the coordinator's copies are outdated
        made.checkpoint.restore(made.checkpoint.save(tmp_path / "a").path)
        made.train(1, seed=2)
        with monkeypatch.context() as patched:

            def refuse(self: RemoteVariable) -> torch.Tensor:
                raise AssertionError(f"{self.name} was fetched")

            patched.setattr(RemoteVariable, "read", refuse)
            saved = made.checkpoint.save(tmp_path / "b")
            made.checkpoint.restore(saved.path)
        after = made.state()
        assert not torch.equal(after[0], saved_state[0])


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    with program(2, 2, "adam") as (unbroken, _):
        unbroken.train(3)
        unbroken.train(3, seed=1)
        expected = unbroken.state()
    with program(2, 2, "adam") as (first, _):
        first.train(3)
        first.checkpoint.save(tmp_path / "a")
    with program(2, 2, "adam") as (second, _):
        second.checkpoint.restore(tmp_path / "a")
        second.train(3, seed=1)
        for one, two in zip(second.state(), expected, strict=True):
            assert torch.equal(one, two)


def test_a_save_while_workers_train_is_a_cut(tmp_path: Path) -> None:
    """Adagrad with gradient 1: value and sum of every row belong together, in every checkpoint."""
    rows, lr = 20_000, 0.5
    with sg.LocalCluster(workers=2, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(
            cluster.resolver, variable_partitioner=sg.partitioners.FixedShardsPartitioner(2)
        )
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                table = nn.Embedding(rows, 4)
                nn.init.zeros_(table.weight)
                optimizer = torch.optim.Adagrad(table.parameters(), lr=lr, eps=1e-10)

            def step(seed: int) -> None:
                ids = torch.randint(0, rows, (500,), generator=torch.Generator().manual_seed(seed))
                optimizer.zero_grad()
                table(torch.unique(ids)).sum().backward()
                optimizer.step()

            with sg.CheckpointManager(
                sg.Checkpoint(table=table, optimizer=optimizer), tmp_path
            ) as manager:
                coordinator.schedule(step, args=(0,))
                coordinator.join(timeout_s=60)
                for number in range(1, 301):
                    coordinator.schedule(step, args=(number,))
                    if number % 100 == 50:
                        manager.save(number).wait(timeout_s=120)
                coordinator.join(timeout_s=120)
                manager.save(301, wait=True)
                saves = manager.all()
    steps = torch.arange(0, 400, dtype=torch.float64)
    after = torch.cumsum(torch.cat([torch.zeros(1), -lr / torch.sqrt(steps[1:])]), 0)
    seen = []
    for saved in saves:
        plain = nn.Embedding(rows, 4)
        plain_optimizer = torch.optim.Adagrad(plain.parameters(), lr=lr)
        sg.Checkpoint(table=plain, optimizer=plain_optimizer).restore(saved.path)
        sums = plain_optimizer.state[plain.weight]["sum"]
        assert bool((sums == sums[:, :1]).all())
        expected = after[sums.long()].float()
        torch.testing.assert_close(plain.weight.detach(), expected, rtol=1e-4, atol=1e-4)
        seen.append(float(sums.sum()))
    assert seen == sorted(seen)
    assert seen[0] > 0


def test_a_server_killed_in_a_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with program(2, 2, in_process=False) as (made, cluster):
        made.train(2)
        with (
            pytest.raises(CheckpointError),
            sg.CheckpointManager(made.checkpoint, tmp_path, on_server_loss="raise") as manager,
        ):
            good = manager.save(1, wait=True)
            cluster.kill_ps(1, signal.SIGKILL)
            manager.save(2, wait=True)
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == [good.path.name]
    assert not list(tmp_path.glob(".probe*"))
    with program(1, 1) as (other, _):
        assert sg.CheckpointManager(other.checkpoint, tmp_path).restore_or_initialize() == 1


@pytest.mark.parametrize("limit", [100, 5_000])
def test_a_server_whose_disk_is_full(tmp_path: Path, limit: int) -> None:
    """One of two server processes cannot write its file: the save fails, and the next one has all rows."""
    with (
        program(2, 2, in_process=False) as (made, cluster),
        sg.CheckpointManager(made.checkpoint, tmp_path) as manager,
    ):
        made.train(1)
        manager.save(1, wait=True)
        made.train(1, seed=1)
        pid = cluster.pid("ps", 1)
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, before[1]))
        expected = r"/job:ps/task:1 .*could not be written to .*File too large.*Free disk space"
        with pytest.raises(CheckpointError, match=expected):
            manager.save(2, wait=True)
        handle = manager.save(2)
        with pytest.raises(CheckpointError, match=expected):
            handle.wait(60)
        assert sorted(os.listdir(tmp_path)) == [".lock", "step_00000001"]
        made.train(1, seed=2)  # nothing waits for the failed save
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        saved = manager.save(3, wait=True)
        assert saved.path is not None
        load(saved.path).verify()
        state = made.state()
    with program(1, 1) as (other, _):
        other.checkpoint.restore(tmp_path)
        assert all(torch.equal(one, two) for one, two in zip(other.state(), state, strict=True))


def test_damage_leaves_the_servers_as_they_were(tmp_path: Path) -> None:
    """Rows are verified by the servers before any of them is replaced; the next older one is used."""
    with program(2, 2) as (made, _):
        with sg.CheckpointManager(made.checkpoint, tmp_path) as manager:
            made.train(1)
            manager.save(1, wait=True)
            older = made.state()
            made.train(1, seed=1)
            newest = manager.save(2, wait=True).path
            block = next(
                one
                for one in load(newest).manifest.blocks
                if one.tensor == "optimizer.state.0.weight.sum" and one.start
            )
            with (newest / block.file).open("r+b") as file:
                file.seek(block.offset + 8)
                file.write(b"\xff")
            made.train(1, seed=2)
            before = made.state()
            with pytest.raises(CheckpointCorrupt, match=block.file):
                made.checkpoint.restore(newest)
            assert all(torch.equal(one, two) for one, two in zip(made.state(), before, strict=True))
            assert manager.restore_or_initialize() == 1
            assert all(torch.equal(one, two) for one, two in zip(made.state(), older, strict=True))


def test_a_server_writes_only_where_it_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without permission the rows pass through the coordinator; one log line says why."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    with (
        sg.Server({"ps": ["127.0.0.1:0"]}, checkpoint_directories=[str(allowed)]) as ps,
        sg.Server({"worker": ["127.0.0.1:0"]}) as worker,
    ):
        spec = sg.ClusterSpec({"ps": [ps.address], "worker": [worker.address]})
        strategy = sg.ParameterServerStrategy(sg.cluster_resolver.SimpleClusterResolver(spec))
        with strategy, strategy.scope():
            model = nn.Linear(3, 2)
            checkpoint = sg.Checkpoint(model=model)
            inside = checkpoint.save(allowed / "a")
            assert {block.file for block in inside.manifest.blocks} == {"__1_0.distcp"}
            with caplog.at_level(logging.WARNING, "stratagem.checkpoint"):
                outside = checkpoint.save(tmp_path / "b")
                os.symlink(tmp_path, allowed / "link")
                through_link = checkpoint.save(allowed / "link" / "c")
            assert {block.file for block in outside.manifest.blocks} == {"__0_0.distcp"}
            assert {block.file for block in through_link.manifest.blocks} == {"__0_0.distcp"}
            assert sum("through the coordinator" in one.message for one in caplog.records) == 1
            checkpoint.restore(tmp_path / "b")


def test_a_directory_that_cannot_be_written_any_more(tmp_path: Path) -> None:
    """The error says so, training goes on, and the next save succeeds when the directory is back."""
    place, elsewhere = tmp_path / "saves", tmp_path / "elsewhere"
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        made = Program(cluster, 2, "adagrad")
        with made.strategy, made.coordinator:
            with sg.CheckpointManager(made.checkpoint, place, every_steps=1) as manager:
                manager.save(1, wait=True)
                place.rename(elsewhere)
                for save in (manager.save, manager.step):
                    with pytest.raises(
                        CheckpointError, match=r"saves cannot be written: .*No such"
                    ):
                        save(2)
                with pytest.raises(CheckpointError, match=r"cannot be written: .*No such"):
                    made.checkpoint.save("/proc/no")
                made.train(1)
                elsewhere.rename(place)
                manager.save(3, wait=True)
                assert [one.step for one in manager.all()] == [1, 3]


MEMORY = """
import resource, sys, torch
import stratagem as sg

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def main():
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        partitioner = sg.partitioners.FixedShardsPartitioner(2)
        strategy = sg.ParameterServerStrategy(cluster.resolver, variable_partitioner=partitioner)
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                table = torch.nn.Embedding(1_000_000, 16)  # 64 MB
                optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
            def step(ids):
                optimizer.zero_grad()
                table(ids).sum().backward()
                optimizer.step()
            coordinator.schedule(step, args=(torch.arange(1000),))
            coordinator.join()
            checkpoint = sg.Checkpoint(table=table, optimizer=optimizer)
            checkpoint.save(sys.argv[1] + "/warm_up_of_code", step=1)
            before = peak()
            saved = checkpoint.save(sys.argv[1] + "/a")
            checkpoint.restore(saved.path)
            print(saved.bytes, peak() - before, before)

main()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_tables_never_pass_through_the_coordinator(tmp_path: Path) -> None:
    """A table of 64 MB and its state: saved and restored, the coordinator grows by less than 24 MB."""
    script = tmp_path / "memory.py"
    script.write_text(MEMORY)
    environment = {**os.environ, "STRATAGEM_REMOTE_TABLE_BYTES": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size, growth, _ = map(int, done.stdout.split())
    assert size > 125_000_000
    assert growth < 24_000_000
