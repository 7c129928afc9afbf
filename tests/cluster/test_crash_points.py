"""Processes are killed at named points of the code; every step still counts exactly once (recovery.md section 6)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conserved import STEP_LIMIT_S, ConservedRun
from waiting import wait_until
from warm_start import run_program

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem._checkpoint.directory import CheckpointDirectory
from stratagem.config import ClusterOptions
from stratagem.testing import POINTS, Fault

OPTIONS = ClusterOptions(heartbeat_s=0.2, heartbeat_limit_s=60.0, restart_pause_s=0.05)
STEPS = 24
EVERY = 5

SERVER = [name for name in POINTS if name.startswith(("server.", "save."))]
WORKER = [name for name in POINTS if name.startswith("worker.")]


def faults_at(point: str) -> list[Fault]:
    """Return the faults that kill the process of a point; in a restore, that of a server killed before."""
    task = "/job:worker/task:0" if point in WORKER else "/job:ps/task:1"
    # The first checkpoint, which a loss needs, is complete by then.
    after = {"server.in_cut": 3, "server.in_block": 3, "save.before_fsync": 1}
    found = [Fault(point=point, action="kill", task=task, after=after.get(point, 7))]
    if point == "server.in_restore":
        found = [
            Fault(point="server.after_apply", action="kill", task=task, after=33),
            Fault(point=point, action="kill", task=task),
        ]
    return found


def survive(
    directory: Path, faults: list[Fault], name: str, options: ClusterOptions = OPTIONS
) -> None:
    """Train with faults; the result is that of an unbroken run."""
    with (
        sg.testing.inject(*faults) as injected,
        LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
        ClusterCoordinator(strategy, options=options) as coordinator,
    ):
        mine = ConservedRun(strategy, name)
        with sg.CheckpointManager(
            mine.checkpoint, directory, every_steps=EVERY, on_server_loss="rewind"
        ) as manager:
            saving = None
            for step in manager.steps(STEPS):
                mine.schedule(coordinator)
                if saving is not None and (step + 1 == STEPS or (step + 1) % EVERY == 0):
                    last = saving  # steps may be faster than saves, and saves never overlap
                    wait_until(lambda last=last: last.done, STEP_LIMIT_S)  # type: ignore[misc]
                saving = manager.step(step + 1) or saving
            mine.check(STEPS)
            coordinator.join(timeout_s=STEP_LIMIT_S)
            assert injected.count() == len(faults), injected.fired
            lost = injected.count(task="/job:ps/*")
            assert 0 < len(coordinator.recoveries) <= lost or not lost
    for saved in CheckpointDirectory(directory).scan():
        saved.verify()


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("point", "name", "shares"),
    [
        ("server.after_apply", "Adagrad", False),
        ("server.in_restore", "Adam", True),
        pytest.param("server.before_apply", "SGD", True, marks=pytest.mark.soak),
        pytest.param("server.in_cut", "SGD", False, marks=pytest.mark.soak),
        pytest.param("server.in_block", "Adam", True, marks=pytest.mark.soak),
        pytest.param("worker.after_closure", "Adagrad", True, marks=pytest.mark.soak),
    ],
)
def test_every_step_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, name: str, shares: bool
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if shares else "0")
    survive(tmp_path, faults_at(point), name)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", [*SERVER, *WORKER])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
@pytest.mark.parametrize("shares", [True, False])
def test_every_step_counts_once_at_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, name: str, shares: bool
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if shares else "0")
    survive(tmp_path, faults_at(point), name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", ["server.after_apply", "worker.before_closure"])
def test_a_task_that_stops_is_replaced(tmp_path: Path, point: str) -> None:
    """SIGSTOP at a point of the code: after the limit for silence the task counts as lost."""
    faults = [replace(one, action="stop") for one in faults_at(point)]
    survive(tmp_path, faults, "Adam", replace(OPTIONS, heartbeat_limit_s=4.0))


@pytest.mark.process
@pytest.mark.timeout(300)
def test_delays_and_dropped_connections_change_nothing(tmp_path: Path) -> None:
    """At random, from a seed; the faults are counted."""
    drops = Fault(
        point="server.*_apply", action="drop", task="/job:ps/*", probability=0.02, seed=3, times=4
    )
    delays = Fault(
        point="worker.*", action="delay", probability=0.2, seed=4, times=None, seconds=0.002
    )
    with (
        sg.testing.inject(drops, delays) as injected,
        LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
        ClusterCoordinator(strategy, options=OPTIONS) as coordinator,
    ):
        mine = ConservedRun(strategy, "Adam")
        for _ in range(STEPS):
            mine.schedule(coordinator)
        coordinator.join(timeout_s=STEP_LIMIT_S)
        mine.check(STEPS)
    assert injected.count(action="drop") == 4
    assert injected.count(action="delay") > 0
    assert {one.task for one in injected.fired if one.action == "drop"} <= {
        "/job:ps/task:0",
        "/job:ps/task:1",
    }


SCRIPT = """
import sys
import stratagem as sg
sys.path.insert(0, sys.argv[3])
from conserved import ConservedRun
faults = [
    sg.testing.Fault(point=point, action="kill", task="/job:chief/*", after=int(sys.argv[4]))
    for point in sys.argv[1:2]
    if point
]
with (
    sg.testing.inject(*faults),
    sg.LocalCluster(workers=1, ps=2) as cluster,
    sg.ParameterServerStrategy(cluster.resolver) as strategy,
    sg.ClusterCoordinator(strategy) as coordinator,
):
    mine = ConservedRun(strategy, sys.argv[5])
    with sg.CheckpointManager(mine.checkpoint, sys.argv[2], every_steps=4) as manager:
        first = manager.restore_or_initialize()
        for step in range(first, 16):
            mine.schedule(coordinator)
            coordinator.join()
            handle = manager.step(step + 1)
            if handle is not None:
                handle.wait()
        mine.check(16)
print("began at", first)
"""


COORDINATOR = {
    "coordinator.scheduled": 9,
    "coordinator.finished": 9,
    "coordinator.between_cuts": 3,
    "coordinator.before_manifest": 1,
    "coordinator.before_rename": 1,
}
"""Points of a coordinator that trains, and how often it passes them before it is killed."""

MATRIX = [(name, shares) for name in ("SGD", "Adagrad", "Adam") for shares in (True, False)]


def killed_and_continued(directory: Path, point: str, name: str = "Adam") -> None:
    """Kill a script at a point of the coordinator; the next run starts from the newest checkpoint, exactly."""

    def run(point: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", SCRIPT, point, str(directory)]
        plugins = str(Path(__file__).parents[1] / "plugins")
        command += [plugins, str(COORDINATOR.get(point, 0)), name]
        return run_program(command, capture_output=True, text=True, timeout=250, check=False)

    killed = run(point)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = CheckpointDirectory(directory).scan()
    for saved in left:
        saved.verify()
    continued = run("")
    assert continued.returncode == 0, continued.stderr
    first = left[-1].step if left else 0  # on a busy machine it may be killed before its first save
    assert f"began at {first}" in continued.stdout


@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_killed_coordinator_leaves_complete_checkpoints(tmp_path: Path) -> None:
    killed_and_continued(tmp_path, "coordinator.before_rename")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("point", COORDINATOR)
@pytest.mark.parametrize(("name", "shares"), MATRIX)
def test_a_killed_coordinator_at_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, name: str, shares: bool
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if shares else "0")
    killed_and_continued(tmp_path, point, name)


JOB = """
import json, os, signal, sys
import stratagem as sg
spec, key, directory, plugins, name, end, after = sys.argv[1:]
sys.path.insert(0, plugins)
from conserved import ConservedRun
resolver = sg.cluster_resolver.SimpleClusterResolver(
    sg.ClusterSpec(json.loads(spec)), cluster_key=key
)
faults = [
    sg.testing.Fault(point=point, action="kill", task="/job:chief/*", after=int(after))
    for point in [end]
    if point.startswith("coordinator.")
]
with (
    sg.testing.inject(*faults),
    sg.ParameterServerStrategy(resolver, job="crash") as strategy,
    sg.ClusterCoordinator(strategy) as coordinator,
):
    mine = ConservedRun(strategy, name)
    with sg.CheckpointManager(mine.checkpoint, directory) as manager:
        first = manager.restore_or_initialize()
        for step in range(first, 12):
            mine.schedule(coordinator)
            coordinator.join()
            manager.step(step + 1)
            if end == f"step {step}":
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 4 == 3 and end.startswith("coordinator."):
                manager.save(step + 1, wait=True)
        mine.check(12)
print("began at", first)
"""


def killed_and_taken_over(directory: Path, ends: list[str], name: str) -> None:
    """Kill coordinators of a live job, each at its end of `ends`; the next one finishes it, and every step counts once."""
    plugins = str(Path(__file__).parents[1] / "plugins")
    with LocalCluster(workers=1, ps=2) as cluster:
        spec = json.dumps(cluster.cluster_spec.as_dict())

        def run(end: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", JOB, spec, cluster._key, str(directory), plugins]
            command += [name, end, str(COORDINATOR.get(end, 0))]
            return run_program(command, capture_output=True, text=True, timeout=250, check=False)

        for end in ends:
            killed = run(end)
            assert killed.returncode == -signal.SIGKILL, (end, killed.stderr)
        continued = run("")
        assert continued.returncode == 0, continued.stderr
        # The noted position may be older; closures that had finished are recognised.
        assert "continuing the live job" in continued.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("Adam", True),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in MATRIX if one != ("Adam", True)),
    ],
)
def test_a_coordinator_killed_while_it_attaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shares: bool
) -> None:
    """Twice, with its claim made and no variable adopted: the next one continues the job, and every step counts once."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if shares else "0")
    ends = ["step 6", "coordinator.in_attach", "coordinator.in_attach"]
    killed_and_taken_over(tmp_path, ends, name)
    assert not CheckpointDirectory(tmp_path).scan()  # all of it came from the live job


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", COORDINATOR)
@pytest.mark.parametrize(("name", "shares"), MATRIX)
def test_a_job_is_continued_wherever_its_coordinator_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, name: str, shares: bool
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if shares else "0")
    killed_and_taken_over(tmp_path, [point], name)
    for saved in CheckpointDirectory(tmp_path).scan():
        saved.verify()


def test_every_point_is_tested() -> None:
    """A new point of the coordinator needs its place in these tests."""
    found = {name for name in POINTS if name.startswith("coordinator.")}
    assert found == {*COORDINATOR, "coordinator.in_attach"}


def test_wrong_faults_are_refused() -> None:
    with pytest.raises(ValueError, match=r"server\.before_apply"):
        Fault(point="server.nowhere", action="kill")
    with pytest.raises(ValueError, match="expected 'kill'"):
        Fault(point="server.in_cut", action="explode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dropped at"):
        Fault(point="server.in_cut", action="drop")
    wrong: dict[str, Any]
    for wrong in ({"after": -1}, {"times": 0}, {"probability": 2.0}, {"seconds": -1.0}):
        [(name, value)] = wrong.items()
        with pytest.raises(ValueError, match=f"{name}={value}: expected"):
            Fault(point="server.in_cut", action="delay", **wrong)


def test_faults_of_a_block_continue_after_a_block_inside_it(tmp_path: Path) -> None:
    delay = Fault(point="coordinator.before_rename", action="delay", seconds=0.0, times=None)
    checkpoint = sg.Checkpoint(epoch=1)
    with sg.testing.inject(delay) as outer:
        with sg.testing.inject() as inner:
            checkpoint.save(tmp_path / "one")
        assert outer.count() == inner.count() == 0
        checkpoint.save(tmp_path / "two")
        assert outer.count() == 1
    checkpoint.save(tmp_path / "three")
    assert outer.count() == 1
