"""Scripts that crash and are run again, and clusters that outlive their scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from waiting import wait_until
from warm_start import run_program

import stratagem as sg
from stratagem import cli
from stratagem.errors import StartupError

pytestmark = pytest.mark.process

LIMIT_S = 180.0


def stratagem(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "stratagem", *words]
    return run_program(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.slow
def test_a_killed_script_is_run_again_on_the_same_cluster(tmp_path: Path) -> None:
    """The second run continues the job: every closure has counted once."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            import torch
            import stratagem as sg

            strategy = sg.auto_strategy()
            with sg.ClusterCoordinator(strategy) as coordinator:
                with strategy.scope():
                    total = sg.Variable(torch.zeros((), dtype=torch.float64))

                def step():
                    total.assign_add(torch.ones((), dtype=torch.float64))

                folder = sys.argv[1]
                with sg.CheckpointManager(sg.Checkpoint(total=total), folder) as manager:
                    first = manager.restore_or_initialize()
                    for number in range(first, 50):
                        coordinator.schedule(step)
                        manager.step(number + 1)
                        if number == 30 and not os.path.exists(folder + "/killed"):
                            open(folder + "/killed", "w").close()
                            os.kill(os.getpid(), signal.SIGKILL)
                    coordinator.join()
                    print("total", float(total.read_value()))
            """
        )
    )
    words = ["--strategy", "ps", "--workers", "1", "--ps", "1", "--restarts", "2", "--"]
    done = stratagem("train", str(script), *words, str(tmp_path / "c"))
    assert done.returncode == 0, done.stderr
    assert "total 50.0" in done.stdout
    assert "ended by signal 9" in done.stderr
    assert "restart 1 of 2" in done.stderr


def test_the_last_exit_code_is_returned(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('run', flush=True)\nsys.exit(3)\n")
    done = stratagem("train", str(script), "--restarts", "1")
    assert done.returncode == 3
    assert done.stdout.split() == ["run", "run"]
    assert "ended by exit code 3" in done.stderr


@pytest.mark.slow
def test_a_detached_cluster_stays_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tasks end with its owner, even if that is killed; nothing is left behind."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "stratagem" / "clusters"
    cluster = sg.DetachedCluster("dev", workers=1, ps=1)
    try:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy, strategy.scope():
            assert float(sg.Variable(torch.ones(())).read_value()) == 1.0
        assert (folder / "dev.json").stat().st_mode & 0o777 == 0o600
        assert sg.DetachedCluster("dev", workers=1, ps=1).pid == cluster.pid
        with pytest.raises(StartupError, match="1 workers and 1 parameter servers"):
            sg.DetachedCluster("dev", workers=2, ps=1)
        assert cli.main(["cluster", "ls"]) == 0
        assert f"process {cluster.pid}" in capsys.readouterr().out

        task = tasks_of(cluster.pid)[0]
        os.kill(cluster.pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{task}").exists(), LIMIT_S)
        assert cluster.pid == 0
        assert cli.main(["cluster", "ls"]) == 0
        assert "no cluster runs" in capsys.readouterr().out

        again = sg.DetachedCluster("dev", workers=1, ps=1)
        task = tasks_of(again.pid)[0]
        assert cli.main(["cluster", "stop", "--name", "dev"]) == 0
        wait_until(lambda: not Path(f"/proc/{task}").exists(), LIMIT_S)
        assert list(folder.iterdir()) == []
    finally:
        cluster.stop()
    assert cli.main(["cluster", "stop", "--name", "dev"]) == 1


def tasks_of(owner: int) -> list[int]:
    """Return the children of the process that forks an owner's tasks."""

    def children(pid: int) -> list[int]:
        path = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(word) for word in path.read_text().split()]

    return [task for child in children(owner) for task in children(child)]


def test_bad_arguments_of_detached_clusters() -> None:
    with pytest.raises(ValueError, match="ps=0: expected a whole number of at least 1"):
        sg.DetachedCluster("dev", ps=0)
    with pytest.raises(TypeError, match="workers='2' has type str"):
        sg.DetachedCluster("dev", workers="2")  # type: ignore[arg-type]
