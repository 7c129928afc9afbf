"""Whole programs on a real Ray: how they end, what they print, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_nodes import RayNodes, ray_nodes
from waiting import wait_until

pytestmark = pytest.mark.soak

LIMIT_S = 250.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head with 4 CPUs."""
    with ray_nodes() as made:
        yield made


TRAIN = """
import json, os, sys, time
import torch
import stratagem as sg

def train(strategy, steps, note):
    with sg.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            total = sg.Variable(torch.zeros((), dtype=torch.float64))

        def step(number):
            if number == 3:
                print("the third step", flush=True)
            total.assign_add(torch.ones((), dtype=torch.float64))

        for number in range(steps):
            coordinator.schedule(step, args=(number,))
        coordinator.join(timeout_s=120)
        note()
        print("total", float(total.read_value()))
"""

OWN = (
    TRAIN
    + """
def pids(cluster):
    found = [cluster.pid("worker", 0), cluster.pid("ps", 0)]
    with open(sys.argv[1] + ".new", "w") as file:
        json.dump(found, file)
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    if sys.argv[2] == "wait":
        time.sleep(600)

with sg.RayCluster(workers=1, ps=1) as cluster:
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        train(strategy, 10, lambda: pids(cluster))
"""
)


def begin(script: str, path: Path, *arguments: str, nodes: RayNodes) -> subprocess.Popen[str]:
    path.write_text(textwrap.dedent(script))
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env={**os.environ, "RAY_ADDRESS": nodes.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(pids: list[int]) -> Callable[[], bool]:
    return lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)


def all_free() -> bool:
    import ray

    states = {one["state"] for one in ray.util.placement_group_table().values()}
    return ray.available_resources().get("CPU") == 4.0 and states <= {"REMOVED"}


def test_worker_output_appears_once_and_nothing_stays(nodes: RayNodes, tmp_path: Path) -> None:
    """Printed lines come once, with the worker's name; not through Ray's logs as well."""
    notes = tmp_path / "pids"
    program = begin(OWN, tmp_path / "script.py", str(notes), "go", nodes=nodes)
    output, _ = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, output
    assert "total 10.0" in output
    assert output.count("the third step") == 1
    assert "[/job:worker/task:0] the third step" in output
    assert ended(json.loads(notes.read_text()))()
    wait_until(all_free)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_everything_ends_with_the_program(
    nodes: RayNodes, tmp_path: Path, number: signal.Signals
) -> None:
    """Killed, stopped with Ctrl-C, or terminated: no task stays, and Ray gets its resources back."""
    notes = tmp_path / "pids"
    program = begin(OWN, tmp_path / "script.py", str(notes), "wait", nodes=nodes)
    try:
        wait_until(lambda: notes.exists() or program.poll() is not None, LIMIT_S)
        pids = json.loads(notes.read_text())
        assert not any(ended([pid])() for pid in pids)
        program.send_signal(number)
        output, _ = program.communicate(timeout=LIMIT_S)
    finally:
        program.kill()
        program.wait()
    assert program.returncode != 0, output
    wait_until(ended(pids))
    wait_until(all_free)


def test_the_train_command_runs_a_script_on_ray(nodes: RayNodes, tmp_path: Path) -> None:
    """`stratagem train --on ray`; a range of workers starts with the smallest number."""
    script = tmp_path / "script.py"
    script.write_text(TRAIN + "\ntrain(sg.auto_strategy(), 20, lambda: None)\n")
    command = [sys.executable, "-m", "stratagem", "train", str(script), "--on", "ray"]
    command += ["--workers", "1:2", "--ps", "1", "--resources-per-worker", "CPU=1,head=1"]
    done = subprocess.run(
        command,
        env={**os.environ, "RAY_ADDRESS": nodes.address},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "total 20.0" in done.stdout
    wait_until(all_free)
