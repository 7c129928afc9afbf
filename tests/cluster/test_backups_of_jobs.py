"""Named jobs with `backups=1`: worker, servers and coordinator die, and the result is that of an unbroken run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from job_training import train
from waiting import wait_until
from warm_start import run_program

import stratagem as sg
from stratagem.errors import JobMismatch
from stratagem.testing import Fault

LIMIT_S = 200.0
SCRIPT = Path(__file__).parents[1] / "plugins" / "job_training.py"


def killed(cluster: sg.LocalCluster, directory: Path, steps: int, kill: str) -> None:
    """Run the training script with backups until it is killed."""
    directory.mkdir(exist_ok=True)
    spec = json.dumps(cluster.cluster_spec.as_dict())
    arguments = [spec, cluster._key, str(directory), str(steps), kill, "1"]
    found = run_program(
        [sys.executable, str(SCRIPT), *arguments],
        env=dict(os.environ),
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == -signal.SIGKILL, found.stderr


def unbroken(directory: Path, steps: int) -> dict[str, Any]:
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        return train(cluster.resolver, str(directory), steps, job=None)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["counters"] == other["counters"]
    assert one["rate"] == other["rate"]
    for key in ("weights", "moments"):
        for mine, theirs in zip(one[key], other[key], strict=True):
            assert torch.equal(mine, theirs)


def kills(*places: tuple[str, str, int]) -> list[Fault]:
    """Return faults that kill a task when it has passed a point some times."""
    return [
        Fault(point=point, action="kill", task=task, after=after) for point, task, after in places
    ]


def survive(directory: Path, steps: int, faults: list[Fault], coordinators: list[str]) -> None:
    """Train with one worker while tasks are killed; the result is that of an unbroken run, bit for bit."""
    with (
        sg.testing.inject(*faults) as injected,
        sg.LocalCluster(workers=1, ps=2) as cluster,
    ):
        for kill in coordinators:
            killed(cluster, directory / "c", steps, kill)
        # Paced: closures of a lost worker are queued behind the others (CCO-13).
        found = train(cluster.resolver, str(directory / "c"), steps, backups=1, paced=True)
        assert injected.count() == len(faults), injected.fired
    assert_equal(found, unbroken(directory / "whole", steps))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_server_and_coordinator_are_killed(tmp_path: Path) -> None:
    faults = kills(
        ("backup.after_forward", "/job:ps/task:0", 40),
        ("worker.before_closure", "/job:worker/task:0", 20),
    )
    survive(tmp_path, 60, faults, ["step:30"])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ten_kills(tmp_path: Path) -> None:
    faults = kills(
        ("backup.after_forward", "/job:ps/task:0", 60),
        ("worker.before_closure", "/job:worker/task:0", 30),
        ("backup.before_forward", "/job:ps/task:1", 200),
        ("worker.after_closure", "/job:worker/task:0", 50),
        ("backup.before_reply", "/job:ps/task:0", 150),
        ("worker.before_closure", "/job:worker/task:0", 70),
        ("server.after_apply", "/job:ps/task:1", 400),
    )
    survive(tmp_path, 600, faults, ["step:150", "unsent:100", "unnoted:20"])


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_server_dies_while_no_coordinator_runs(tmp_path: Path) -> None:
    """The new coordinator finds the backup of the lost server, and makes it the primary.

    A script with another number of backups is refused.
    """
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        killed(cluster, tmp_path / "c", 60, "step:30")
        pid = cluster.pid("ps", 0)
        cluster.kill_ps(0)
        wait_until(lambda: cluster.pid("ps", 0) not in (pid, 0), LIMIT_S)
        with pytest.raises(JobMismatch, match="backups=0"):
            train(cluster.resolver, str(tmp_path / "c"), 60)
        found = train(cluster.resolver, str(tmp_path / "c"), 60, backups=1)
    assert found["first"] > 0
    assert_equal(found, unbroken(tmp_path / "whole", 60))
