"""The evaluator as a task: in a local cluster, and as ``stratagem server --job evaluator``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from warm_start import run_program

import stratagem as sg
from stratagem.errors import CheckpointTimeout, ClusterError, MisuseError

LIMIT_S = 120.0


def build() -> nn.Module:
    return nn.Linear(2, 1)


def evaluator_of(directory: Path, **options: Any) -> sg.Evaluator:
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"bias": model.bias.item()}

    return sg.Evaluator(directory, build, evaluate, poll_s=0.01, tensorboard=False, **options)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_beside_parameter_servers_killed_and_replaced(tmp_path: Path) -> None:
    """It needs no address, is started again when it was killed, and ends after the final checkpoint."""
    with sg.LocalCluster(workers=1, ps=1, evaluator=evaluator_of(tmp_path)) as cluster:
        assert cluster.cluster_spec.jobs == ["ps", "worker"]
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                model = build()
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

            def step() -> None:
                (-model(torch.zeros(1, 2))).sum().backward()  # adds 1 to the bias
                optimizer.step()

            checkpoint = sg.Checkpoint(model=model)
            with sg.CheckpointManager(checkpoint, tmp_path, keep_best="bias") as manager:
                manager.save(1, wait=True)
                pid = cluster.pid("evaluator", 0)
                os.kill(pid, signal.SIGKILL)
                cluster._tasks.wait_restarted("evaluator:0", pid, LIMIT_S)
                coordinator.schedule(step)
                coordinator.join(timeout_s=LIMIT_S)
                manager.save(2, wait=True, final=True)
                results = cluster.wait_evaluated(LIMIT_S)
                assert results[-1].step == 2
                assert results[-1].metrics["bias"] == model.bias.item()
                assert manager.best is not None
                assert manager.best.step == 2
        assert cluster.wait_evaluated(LIMIT_S) == results  # it was not started again


def test_errors_of_evaluators(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected an sg\.Evaluator"):
        sg.LocalCluster(1, 1, in_process=True, evaluator=build)  # type: ignore[arg-type]
    lock = threading.Lock()  # cannot be pickled
    evaluator = sg.Evaluator(tmp_path, build, lambda model: {"locked": lock.locked()})
    with pytest.raises(TypeError, match="cannot be sent"):
        sg.LocalCluster(1, 1, in_process=True, evaluator=evaluator)
    with sg.LocalCluster(1, 1, in_process=True) as cluster:
        with pytest.raises(MisuseError, match="no evaluator"):
            cluster.wait_evaluated()
    with sg.CheckpointManager(sg.Checkpoint(model=nn.Linear(5, 5)), tmp_path / "other") as manager:
        manager.save(1, wait=True, final=True)
    evaluator = evaluator_of(tmp_path / "other")
    with sg.LocalCluster(1, 1, in_process=True, evaluator=evaluator) as cluster:
        with pytest.raises(ClusterError, match="does not fit"):
            cluster.wait_evaluated(LIMIT_S)
    evaluator = evaluator_of(tmp_path / "empty")
    with sg.LocalCluster(1, 1, in_process=True, evaluator=evaluator) as cluster:
        with pytest.raises(CheckpointTimeout, match="final=True"):
            cluster.wait_evaluated(0.05)


SCRIPT = """
import torch, stratagem as sg

def make():
    evaluate = lambda model: {"bias": model.bias.item()}
    return sg.Evaluator(DIRECTORY, lambda: torch.nn.Linear(2, 1), evaluate, poll_s=0.01, tensorboard=False)
"""


@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_command_runs_an_evaluator(tmp_path: Path) -> None:
    """TF_CONFIG names the task, as in page 003; the cluster need not list the evaluator."""
    model = build()
    with sg.CheckpointManager(sg.Checkpoint(model=model), tmp_path / "saves") as manager:
        manager.save(7, wait=True, final=True)
    script = tmp_path / "my_evaluation.py"
    script.write_text(SCRIPT.replace("DIRECTORY", repr(str(tmp_path / "saves"))))
    config = {
        "cluster": {"ps": ["a:1"], "worker": ["b:1"]},
        "task": {"type": "evaluator", "index": 0},
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return run_program(
            [sys.executable, "-m", "stratagem", "server", *words],
            env={**os.environ, "TF_CONFIG": json.dumps(config)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    done = run("--evaluator", "my_evaluation:make")
    assert done.returncode == 0, done.stderr
    assert f"step 7: bias={model.bias.item():g}" in done.stdout
    wrong = run()
    assert wrong.returncode == 1
    assert "FILE.py:NAME" in wrong.stderr


def test_wrong_evaluators_on_the_command_line_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stratagem import cli

    script = tmp_path / "own.py"
    script.write_text("number = 3\n")
    for named, expected in (
        (f"{script}:nobody", "has no 'nobody'"),
        (f"{script}:number", "expected an sg.Evaluator"),
        (f"{tmp_path}/nowhere.py:make", "no file"),
    ):
        before = sys.path[:]
        assert cli.main(["server", "--job", "evaluator", "--evaluator", named]) == 1
        sys.path[:] = before
        assert expected in capsys.readouterr().err
