"""`backups=1`: nothing acknowledged is lost when a parameter server dies (recovery.md sections 3 and 6)."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conserved import STEP_LIMIT_S, ConservedRun
from torch import nn
from waiting import wait_until

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem._cluster.coordinator.server_recoveries import ServerRecoveries
from stratagem._ps.client.server_replacement import ServerReplacement
from stratagem.config import ClusterOptions
from stratagem.errors import ParameterServerLost
from stratagem.testing import Fault

OPTIONS = ClusterOptions(heartbeat_s=0.2, heartbeat_limit_s=60.0, restart_pause_s=0.05)
"""Servers that end are noticed at once; no session ends because the machine is slow."""
STEPS = 24


def run(mine: ConservedRun, coordinator: ClusterCoordinator, steps: int) -> None:
    for _ in range(steps):
        mine.schedule(coordinator)
    coordinator.join(timeout_s=STEP_LIMIT_S)


def await_backups(strategy: Any) -> None:
    """Wait until every server has a backup again."""
    wait_until(lambda: not strategy._cluster_views().servers.lack_backups(), timeout_s=120.0)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_servers_are_killed_in_turn() -> None:
    """Every server is lost, with shards that moved before; each step counts once, and redundancy returns."""
    with (
        LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=1) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        mine = ConservedRun(strategy, "Adam")
        run(mine, coordinator, 10)
        for turn, killed in enumerate((1, 0, 0, 1)):
            cluster.kill_ps(killed)
            run(mine, coordinator, 5)
            mine.check(15 + 5 * turn)
            await_backups(strategy)
        found = coordinator.recoveries
        assert {one.task for one in found} == {"/job:ps/task:0", "/job:ps/task:1"}
        assert all(one.backup and one.lost_s == 0 and not one.updates for one in found)
        workers = [one.incarnation for one in coordinator.workers]
        assert workers == [1, 1]  # no session of a worker ended


@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_coordinator_reads_no_memory_of_a_lost_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backup acknowledges a write while the coordinator still prepares to use it: a read waits."""
    promote, connect = ServerReplacement.promotion, ServerReplacement.connect_beside
    wait = ServerRecoveries.await_recovery
    promoted, seen = threading.Event(), threading.Event()

    def note_promotion(self: ServerReplacement, server: int, view: int) -> Any:
        promoted.set()
        return promote(self, server, view)

    def pause(self: ServerReplacement, server: int, **more: Any) -> Any:
        if promoted.is_set():
            assert seen.wait(STEP_LIMIT_S)
        return connect(self, server, **more)

    def note_wait(self: ServerRecoveries, error: Exception) -> bool:
        if threading.current_thread() is reader:
            seen.set()
        return wait(self, error)

    monkeypatch.setattr(ServerReplacement, "promotion", note_promotion)
    monkeypatch.setattr(ServerReplacement, "connect_beside", pause)
    monkeypatch.setattr(ServerRecoveries, "await_recovery", note_wait)
    found: list[float] = []
    with (
        LocalCluster(workers=1, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=1) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        with strategy.scope():
            counter = sg.Variable(torch.zeros(()), name="counter")

        def step() -> None:
            counter.assign_add(torch.ones(()))

        def read() -> None:
            found.append(float(counter.numpy()))
            seen.set()

        reader = threading.Thread(target=read)
        coordinator.schedule(step).fetch(timeout_s=STEP_LIMIT_S)
        assert float(counter.numpy()) == 1.0  # maps the memory
        cluster.kill_ps(0)
        try:
            coordinator.schedule(step).fetch(timeout_s=STEP_LIMIT_S)
            assert promoted.is_set()
            reader.start()
            reader.join(STEP_LIMIT_S)
        finally:
            seen.set()
    assert found == [2.0]


def survive(fault: Fault, name: str, *, workers: int = 2) -> None:
    """Train while a server is killed; every step counts once, on all servers."""
    with (
        sg.testing.inject(fault) as injected,
        LocalCluster(workers=workers, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=1) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        mine = ConservedRun(strategy, name)
        run(mine, coordinator, STEPS // 2)
        if fault.point in ("backup.in_streaming", "backup.receives_state"):
            await_backups(strategy)
            cluster.kill_ps(1)
        run(mine, coordinator, STEPS // 2)
        mine.check(STEPS)
        await_backups(strategy)
        run(mine, coordinator, 1)
        mine.check(STEPS + 1)
        wait_until(lambda: injected.count() == 1, timeout_s=120.0)


POINTS = [
    "backup.before_forward",
    "backup.after_forward",
    "backup.before_reply",
    "server.before_apply",
    "server.after_apply",
    "backup.receives_state",
]


def fault_at(point: str) -> Fault:
    # Servers create variables before they train: the faults come later.
    after = 0 if point == "backup.receives_state" else 30
    return Fault(point=point, action="kill", task="/job:ps/task:1", after=after)


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("point", "name", "shares"),
    [
        ("backup.before_forward", "SGD", True),
        ("backup.after_forward", "Adagrad", False),
        ("backup.before_reply", "Adam", True),
        ("backup.receives_state", "Adam", False),
    ],
)
def test_every_step_counts_once(
    monkeypatch: pytest.MonkeyPatch, point: str, name: str, shares: bool
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if shares else "0")
    survive(fault_at(point), name)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
@pytest.mark.parametrize("shares", [True, False])
def test_every_step_counts_once_at_every_point(
    monkeypatch: pytest.MonkeyPatch, point: str, name: str, shares: bool
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if shares else "0")
    survive(fault_at(point), name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_hangs_is_replaced_and_gives_way() -> None:
    """SIGSTOP is a loss; the server that wakes up frees what it has, and can be a backup again."""
    with (
        LocalCluster(workers=2, ps=2, restart=False) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=1) as strategy,
        ClusterCoordinator(
            strategy, options=replace(OPTIONS, heartbeat_limit_s=4.0)
        ) as coordinator,
    ):
        mine = ConservedRun(strategy, "Adam")
        run(mine, coordinator, 8)
        cluster.kill_ps(0, signal.SIGSTOP)
        run(mine, coordinator, 8)
        mine.check(16)
        assert [one.task for one in coordinator.recoveries] == ["/job:ps/task:0"]
        cluster.kill_ps(0, signal.SIGCONT)
        await_backups(strategy)
        run(mine, coordinator, 8)
        mine.check(24)
        cluster.kill_ps(1)
        run(mine, coordinator, 8)
        mine.check(32)


def second_loss(point: str) -> Fault:
    """Return the fault that kills the backup in promotion, or the primary while it copies its state to a new backup."""
    # Two streams are made with the strategy.
    after = 2 if point == "backup.in_streaming" else 0
    return Fault(point=point, action="kill", task="/job:ps/task:0", after=after)


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", ["backup.in_promotion", "backup.in_streaming"])
def test_a_second_loss_is_reported_as_a_lost_server(point: str) -> None:
    """Without a checkpoint the run ends, and the error says that both were lost."""
    with (
        sg.testing.inject(second_loss(point)) as injected,
        LocalCluster(workers=1, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=1) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        mine = ConservedRun(strategy, "Adam")
        run(mine, coordinator, 4)
        cluster.kill_ps(1)
        with pytest.raises(ParameterServerLost, match=r"and its backup too|before another server"):
            run(mine, coordinator, 100)
        assert injected.count() == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", ["backup.in_promotion", "backup.in_streaming"])
@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("Adam", True),
        *(
            pytest.param(name, shares, marks=pytest.mark.soak)
            for name in ("SGD", "Adagrad", "Adam")
            for shares in (True, False)
            if (name, shares) != ("Adam", True)
        ),
    ],
)
def test_a_second_loss_is_restored_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, name: str, shares: bool
) -> None:
    """What both servers lost comes from the checkpoint; the steps since then are repeated, and each counts once."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if shares else "0")
    with (
        sg.testing.inject(second_loss(point)) as injected,
        LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=1) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        mine = ConservedRun(strategy, name)
        with sg.CheckpointManager(mine.checkpoint, tmp_path, on_server_loss="rewind") as manager:
            to_kill = [1]
            for step in manager.steps(STEPS):
                mine.schedule(coordinator)
                if step == 8:
                    manager.save(step + 1, wait=True)
                if step == 12 and to_kill:
                    cluster.kill_ps(to_kill.pop())
                if step == 13:
                    wait_until(lambda: injected.count() == 1, timeout_s=120.0)
            mine.check(STEPS)
            assert 9 in [one.step for one in coordinator.recoveries]
            await_backups(strategy)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checkpoints_and_a_second_loss(tmp_path: Path) -> None:
    """Promoted servers save and restore; what both servers lost comes from the checkpoint."""
    with (
        LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=1) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        mine = ConservedRun(strategy, "Adam")
        with sg.CheckpointManager(
            mine.checkpoint, tmp_path, on_server_loss="rewind", every_steps=5
        ) as manager:
            for step in manager.steps(STEPS):
                mine.schedule(coordinator)
                manager.step(step + 1)
                if step == 8:
                    cluster.kill_ps(0)
                if step == 12:
                    coordinator.join(timeout_s=STEP_LIMIT_S)
                    await_backups(strategy)
                    assert [one.step for one in coordinator.recoveries] == [-1]
                    assert manager.save(step + 1, wait=True).done
                    cluster.kill_ps(0)
                    cluster.kill_ps(1)
            mine.check(STEPS)
            assert 13 in [one.step for one in coordinator.recoveries]
            manager.save(STEPS, wait=True)
        assert sg.CheckpointManager(mine.checkpoint, tmp_path).restore_or_initialize() == STEPS
        await_backups(strategy)
        cluster.kill_ps(0)  # the backups have what was restored
        mine.check(STEPS)


@pytest.mark.process
def test_the_loss_of_both_servers_is_reported_exactly(tmp_path: Path) -> None:
    """Also that of the server whose backup was asked to take over, and was lost as well."""
    with (
        LocalCluster(workers=1, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, backups=1) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        with strategy.scope():
            one, two = (
                sg.Variable(torch.zeros(()), name="one"),
                sg.Variable(torch.zeros(()), name="two"),
            )

        def step() -> None:
            one.assign_add(torch.ones(()))
            two.assign_add(torch.ones(()))

        with sg.CheckpointManager(sg.Checkpoint(one=one, two=two), tmp_path) as manager:
            manager.save(0, wait=True)
            for _ in range(7):
                coordinator.schedule(step)
            coordinator.join(timeout_s=STEP_LIMIT_S)
            cluster.kill_ps(0)
            cluster.kill_ps(1)
            coordinator.schedule(step)
            coordinator.join(timeout_s=STEP_LIMIT_S)
            found = {name: n for each in coordinator.recoveries for name, n in each.updates.items()}
            assert found == {"one": 7, "two": 7}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_servers_large_tensors_and_gradient_slots() -> None:
    """State of several messages is copied; dense gradients in shared memory reach both servers."""
    with (
        LocalCluster(workers=2, ps=3) as cluster,
        sg.ParameterServerStrategy(
            cluster.resolver, sg.partitioners.FixedShardsPartitioner(2), backups=1
        ) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        with strategy.scope():
            layer = nn.Linear(512, 2048, bias=False)  # 4 MB
            nn.init.zeros_(layer.weight)
            optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.5)
            table = nn.Embedding(200_000, 8)
            nn.init.zeros_(table.weight)
            rows = torch.optim.SGD(table.parameters(), lr=1.0)

        def step() -> None:
            optimizer.zero_grad()
            layer(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            rows.zero_grad()
            table(torch.arange(0, 200_000, 1000)).sum().backward()
            rows.step()

        for killed in (0, 1, 2):
            for _ in range(3):
                coordinator.schedule(step)
            cluster.kill_ps(killed)
            coordinator.schedule(
                step
            )  # needs the lost server: it is noticed before the next one is killed
            coordinator.join(timeout_s=STEP_LIMIT_S)
            await_backups(strategy)
        velocity, expected = 0.0, 0.0
        for _ in range(12):
            velocity = 0.5 * velocity + 1.0
            expected -= velocity
        assert set(layer.weight.detach().flatten().tolist()) == {expected}
        assert float(table.weight.detach().sum()) == -12 * 200 * 8


@pytest.mark.parametrize(("backups", "servers"), [(1, 1), (2, 2), (2, 3), (-1, 2), (True, 2)])
def test_too_many_backups_are_refused(backups: int, servers: int) -> None:
    with LocalCluster(workers=1, ps=servers, in_process=True) as cluster:
        with pytest.raises(ValueError, match=f"backups={backups}"):
            sg.ParameterServerStrategy(cluster.resolver, backups=backups)
