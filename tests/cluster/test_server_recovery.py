"""A lost parameter server is restored from the last checkpoint, and the script goes on (recovery.md section 3)."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conserved import trained_plainly
from torch import nn
from waiting import wait_until_halted
from warm_start import Program

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem._ps.client.server_replacement import ServerReplacement
from stratagem.cluster_resolver import SimpleClusterResolver
from stratagem.config import ClusterOptions
from stratagem.errors import NotFoundError, ParameterServerLost

OPTIONS = ClusterOptions(heartbeat_s=0.2, heartbeat_limit_s=60.0, restart_pause_s=0.05)
"""Servers that end are noticed at once, those that are stopped when the local cluster has replaced them."""
LIMIT_S = 120.0


class Counters:
    """Counters on two servers, and a table with its optimizer on both."""

    def __init__(self, strategy: Any) -> None:
        with strategy.scope():
            self.first = sg.Variable(torch.zeros(3, dtype=torch.float64), name="first")
            self.second = sg.Variable(torch.zeros(3, dtype=torch.float64), name="second")
            self.table = nn.Embedding(50, 2)
            nn.init.zeros_(self.table.weight)
            self.optimizer = torch.optim.Adagrad(self.table.parameters(), lr=0.5, eps=1e-10)

    def checkpoint(self, **more: Any) -> sg.Checkpoint:
        return sg.Checkpoint(first=self.first, table=self.table, optimizer=self.optimizer, **more)

    def run(self, coordinator: ClusterCoordinator, count: int) -> None:
        first, second, table, optimizer = self.first, self.second, self.table, self.optimizer

        def step() -> None:
            first.assign_add(torch.ones(3, dtype=torch.float64))
            second.assign_add(torch.ones(3, dtype=torch.float64))
            optimizer.zero_grad()
            table(torch.arange(50)).sum().backward()
            optimizer.step()

        for _ in range(count):
            coordinator.schedule(step, exactly_once=True)
        coordinator.join(timeout_s=LIMIT_S)


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_the_script_goes_on_and_the_loss_is_reported_exactly(
    tmp_path: Path, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """Other servers lose nothing; the lost one loses what came after the save, to the update."""
    caplog.set_level(logging.INFO, "stratagem.coordinator")
    with LocalCluster(workers=2, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(
            cluster.resolver, sg.partitioners.FixedShardsPartitioner(2)
        )
        with strategy, ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
            mine = Counters(strategy)
            checkpoint = mine.checkpoint(second=mine.second)
            with sg.CheckpointManager(checkpoint, tmp_path) as manager:
                mine.run(coordinator, 20)
                manager.save(20, wait=True)
                mine.run(coordinator, 10)
                pid = cluster.pid("ps", 1)
                cluster.kill_ps(1, number)
                wait_until_halted(pid)
                mine.run(coordinator, 30)
                (recovery,) = coordinator.recoveries
                assert recovery.task == "/job:ps/task:1"
                assert (recovery.step, recovery.path) == (20, str(manager.latest.path))
                lost = recovery.updates
                assert set(lost.values()) == {10}
                assert set(recovery.variables) == set(lost)
                values = {"first": mine.first.numpy(), "second": mine.second.numpy()}
                for name, value in values.items():
                    parts = [lost.get(f"{name}/part_{part}", lost.get(name, 0)) for part in (0, 1)]
                    expected = [60.0 - parts[0]] * 2 + [60.0 - parts[1]]
                    assert value.tolist() == expected
                sums = mine.optimizer.state_dict()["state"][0]["sum"][:, 0]
                assert sorted({*sums.tolist()}) == [50.0, 60.0]
                handle = manager.save(60, wait=True)
                assert handle.done
                pid = cluster.pid("ps", 1)
                for updates in (1, 3):  # from the newer checkpoint, the second time since the first
                    mine.run(coordinator, updates)
                    killed = cluster.pid("ps", 1)
                    cluster.kill_ps(1)
                    wait_until_halted(killed)
                    mine.run(coordinator, 1)
                found = coordinator.recoveries
                assert [one.step for one in found] == [20, 60, 60]
                assert [set(one.updates.values()) for one in found] == [{10}, {1}, {4}]
                assert cluster.pid("ps", 1) != pid
    assert caplog.text.count("; its replacement starts") == 3
    assert "connects again, because /job:ps/task:1 is being restored" in caplog.text
    assert "create a new strategy" not in caplog.text  # advice for a run that has ended


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kept", [False, True])
def test_a_save_meets_a_server_that_has_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The new process answers before it is restored, and has no session: the save is made again.

    With `kept`, the connection of the save before ends with the process.
    """
    connect, killed = ServerReplacement.connect_beside, []
    beside = ServerReplacement.beside
    with LocalCluster(workers=1, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
            mine = Counters(strategy)
            with sg.CheckpointManager(mine.checkpoint(second=mine.second), tmp_path) as manager:
                mine.run(coordinator, 4)
                manager.save(4, wait=True)
                mine.run(coordinator, 2)

                def restarts(self: ServerReplacement, server: int, **more: Any) -> Any:
                    if server == 1 and not killed:
                        killed.append(cluster.pid("ps", 1))
                        cluster.kill_ps(1)
                        raise NotFoundError("session 'test' is not open on /job:ps/task:1")
                    return connect(self, server, **more)

                def ends(self: ServerReplacement, server: int) -> Any:
                    if not kept:
                        self.drop_beside(server)
                    found = beside(self, server)
                    if server == 1 and kept and not killed:
                        killed.append(cluster.pid("ps", 1))
                        cluster.kill_ps(1)
                    return found

                monkeypatch.setattr(ServerReplacement, "beside", ends)
                if not kept:
                    monkeypatch.setattr(ServerReplacement, "connect_beside", restarts)
                assert manager.save(6, wait=True).done
                assert killed
                mine.run(coordinator, 2)
                (recovery,) = coordinator.recoveries
                assert set(recovery.updates.values()) == {2}
                assert manager.latest.step == 6


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_server_that_cannot_be_restored_raises(tmp_path: Path) -> None:
    """Variables that are not in the checkpoint are named; `on_server_loss="raise"` restores nothing."""
    with LocalCluster(workers=1, ps=2) as cluster:
        for how in ("partial", "raise"):
            strategy = sg.ParameterServerStrategy(cluster.resolver)
            with strategy, ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
                mine = Counters(strategy)
                with sg.CheckpointManager(
                    mine.checkpoint(), tmp_path / how, on_server_loss=how
                ) as manager:
                    mine.run(coordinator, 3)
                    manager.save(3, wait=True)
                    pid = cluster.pid("ps", 1)
                    cluster.kill_ps(1)
                    match = (
                        "second.*not in the checkpoint" if how == "partial" else "second.*backups=1"
                    )
                    with pytest.raises(ParameterServerLost, match=match):
                        mine.run(coordinator, 50)
                    assert coordinator.recoveries == []
                    cluster._tasks.wait_restarted("ps:1", pid, 60.0)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_server_whose_newest_checkpoint_is_damaged(tmp_path: Path) -> None:
    """The error names the file; the next run restores the newest intact checkpoint."""
    with LocalCluster(workers=1, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
            mine = Counters(strategy)
            with sg.CheckpointManager(mine.checkpoint(second=mine.second), tmp_path) as manager:
                for step in (3, 6):
                    mine.run(coordinator, 3)
                    manager.save(step, wait=True)
                for file in manager.latest.path.glob("*.distcp"):
                    file.write_bytes(bytes(file.stat().st_size))
                pid = cluster.pid("ps", 1)
                cluster.kill_ps(1)
                with pytest.raises(ParameterServerLost, match=r"\.distcp is damaged.*[^.]\. Start"):
                    mine.run(coordinator, 50)
                cluster._tasks.wait_restarted("ps:1", pid, 60.0)
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
            mine = Counters(strategy)
            with sg.CheckpointManager(mine.checkpoint(second=mine.second), tmp_path) as manager:
                assert manager.restore_or_initialize() == 3
                mine.run(coordinator, 1)
                assert mine.first.numpy().tolist() == mine.second.numpy().tolist() == [4.0] * 3


class MovingResolver(SimpleClusterResolver):
    """Resolver of a cluster whose addresses change."""

    def __init__(self, spec: sg.ClusterSpec) -> None:
        super().__init__(spec)
        self.spec = spec

    def cluster_spec(self) -> sg.ClusterSpec:
        return self.spec


@contextmanager
def trained_by_hand(
    directory: Path, address: str, options: ClusterOptions
) -> Iterator[tuple[Counters, ClusterCoordinator, Callable[[str], None]]]:
    """Make six steps, saved after the fourth, with servers started by hand, the second one at `address`.

    Yields also a function that tells the resolver another address of the second server.
    """
    allowed = [str(directory)]
    with (
        sg.Server({"worker": ["127.0.0.1:0"]}) as worker,
        sg.Server({"ps": ["127.0.0.1:0"]}, checkpoint_directories=allowed) as stays,
    ):
        spec = {"ps": [stays.address, address], "worker": [worker.address]}
        resolver = MovingResolver(sg.ClusterSpec(spec))

        def move(to: str) -> None:
            spec["ps"][1] = to
            resolver.spec = sg.ClusterSpec(spec)

        strategy = sg.ParameterServerStrategy(resolver)
        with strategy, ClusterCoordinator(strategy, options=options) as coordinator:
            mine = Counters(strategy)
            with sg.CheckpointManager(mine.checkpoint(second=mine.second), directory) as manager:
                mine.run(coordinator, 4)
                manager.save(4, wait=True)
                mine.run(coordinator, 2)
                yield mine, coordinator, move


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["same", "other"])
def test_a_server_started_by_hand_at_the_same_or_another_address(
    tmp_path: Path, where: str
) -> None:
    allowed = [str(tmp_path)]
    goes = sg.Server({"ps": ["127.0.0.1:0"]}, checkpoint_directories=allowed)
    with trained_by_hand(tmp_path, goes.address, OPTIONS) as (mine, coordinator, move):
        goes.close()
        address = goes.address if where == "same" else "127.0.0.1:0"
        with sg.Server({"ps": [address]}, checkpoint_directories=allowed) as comes:
            move(comes.address)
            mine.run(coordinator, 3)
            (recovery,) = coordinator.recoveries
            assert recovery.updates["second"] == 2
            assert mine.first.numpy().tolist() == [9.0] * 3
            assert mine.second.numpy().tolist() == [7.0] * 3
            coordinator.strategy.close()


HUNG = """
import sys
import stratagem as sg
with sg.Server({"ps": ["127.0.0.1:0"]}, checkpoint_directories=[sys.argv[1]]) as server:
    print(server.address, flush=True)
    server.join()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hung_server_that_was_replaced_is_fenced_when_it_wakes(tmp_path: Path) -> None:
    """Its late answers count nothing. If it gets its address back, its old values are deleted."""
    allowed = [str(tmp_path)]
    options = replace(OPTIONS, heartbeat_limit_s=4.0)
    hung = Program([sys.executable, "-c", HUNG, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert hung.stdout is not None
        first_address = hung.stdout.readline().strip()
        with trained_by_hand(tmp_path, first_address, options) as (mine, coordinator, move):
            hung.send_signal(signal.SIGSTOP)
            wait_until_halted(hung.pid)
            with sg.Server({"ps": ["127.0.0.1:0"]}, checkpoint_directories=allowed) as new:
                move(new.address)
                mine.run(coordinator, 3)  # the first of these waits for the hung server
                hung.send_signal(signal.SIGCONT)
                mine.run(coordinator, 3)
                assert mine.first.numpy().tolist() == [12.0] * 3
                assert mine.second.numpy().tolist() == [10.0] * 3
                move(first_address)
            mine.run(coordinator, 1)
            assert [one.step for one in coordinator.recoveries] == [4, 4]
            assert coordinator.recoveries[-1].updates["second"] == 6
            assert mine.first.numpy().tolist() == [13.0] * 3
            assert mine.second.numpy().tolist() == [5.0] * 3
            coordinator.strategy.close()
    finally:
        hung.kill()
        hung.communicate(timeout=LIMIT_S)


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_a_rewound_run_repeats_the_steps_since_the_checkpoint(tmp_path: Path, name: str) -> None:
    """After two losses every variable on every server has had each step exactly once."""
    steps, kills = 24, {5, 17}
    seen: list[int] = []
    with LocalCluster(workers=2, ps=2) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
            with strategy.scope():
                first = sg.Variable(torch.zeros(3, dtype=torch.float64), name="first")
                second = sg.Variable(torch.zeros(3, dtype=torch.float64), name="second")
                layer = nn.Linear(4, 4)
                for parameter in layer.parameters():
                    nn.init.zeros_(parameter)
                optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)

            def step() -> None:
                first.assign_add(torch.ones(3, dtype=torch.float64))
                second.assign_add(torch.ones(3, dtype=torch.float64))
                optimizer.zero_grad()
                layer(torch.ones(1, 4)).sum().backward()
                optimizer.step()

            checkpoint = sg.Checkpoint(
                first=first, second=second, layer=layer, optimizer=optimizer, schedule=schedule
            )
            with sg.CheckpointManager(
                checkpoint, tmp_path, every_steps=10, on_server_loss="rewind"
            ) as manager:
                saving = None
                for number in manager.steps(steps):
                    coordinator.schedule(step)
                    schedule.step()
                    seen.append(number)
                    if number in kills:
                        kills.remove(number)
                        if saving is not None:
                            saving.wait(LIMIT_S)
                        coordinator.join(timeout_s=LIMIT_S)
                        cluster.kill_ps(number % 2)
                        coordinator.schedule(step)
                        coordinator.join(timeout_s=LIMIT_S)  # the loss is noticed in this step
                    saving = manager.step(number + 1) or saving
                assert first.numpy().tolist() == second.numpy().tolist() == [float(steps)] * 3
                assert schedule.last_epoch == steps
                assert torch.allclose(layer.weight, trained_plainly(name, steps))
                found = coordinator.recoveries
                assert [one.step for one in found] == [0, 10]
                assert [set(one.updates.values()) for one in found] == [{6}, {8}]
                assert seen == [*range(6), *range(18), *range(10, 24)]
                manager.save(steps, wait=True)
                assert sorted(saved.step for saved in manager.all()) == [0, 10, 20, 24]


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_loss_outside_of_the_loop_is_not_rewound(tmp_path: Path) -> None:
    with LocalCluster(workers=1, ps=1) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, ClusterCoordinator(strategy, options=OPTIONS) as coordinator:
            mine = Counters(strategy)
            with sg.CheckpointManager(
                mine.checkpoint(second=mine.second), tmp_path, on_server_loss="rewind"
            ) as manager:
                for _ in manager.steps(2):
                    mine.run(coordinator, 1)
                cluster.kill_ps(0)
                with pytest.raises(ParameterServerLost):
                    mine.run(coordinator, 1)
