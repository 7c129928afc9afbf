"""The cluster examples run at small size and do what their texts say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warm_start import Program

from examples import parameter_server, surviving_anything, surviving_worker_loss

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def test_parameter_server_learns_and_goes_on_after_its_checkpoint(tmp_path, capsys):
    """Two epochs, then a third by a second run (the program of page 003)."""
    path = str(tmp_path / "checkpoints")
    first = parameter_server.main(epochs=2, steps=40, checkpoints=path)
    second = parameter_server.main(epochs=3, steps=40, checkpoints=path)
    assert "resuming after epoch 1" in capsys.readouterr().out
    assert second < first < 0.72


@pytest.mark.slow
def test_keras_clicks_learns_and_its_file_needs_no_cluster(tmp_path, capsys):
    """`fit` on workers and servers; a second run continues after the epochs of a backup."""
    from examples import keras_clicks

    found = keras_clicks.main(epochs=3, steps=40, directory=str(tmp_path / "clicks"))
    assert found["auc"] > 0.65
    assert (tmp_path / "clicks" / "log.csv").read_text().count("\n") == 4
    assert not (tmp_path / "clicks" / "backup").exists()  # it succeeded


def test_killed_workers_change_no_sum():
    """Exactly as many additions as scheduled."""
    total, kills = surviving_worker_loss.main(additions=1500)
    assert total == 1500
    assert kills >= 0


@pytest.mark.slow
def test_a_run_survives_the_loss_of_every_role(capfd):
    """A worker, a server and the coordinator are killed in turn; the model reaches its target."""
    loss, killed = surviving_anything.main(steps=600)
    assert killed == ["worker 0", "parameter server 0", "coordinator"]
    assert loss < surviving_anything.TARGET
    out, log = capfd.readouterr()
    starts = [int(found) for found in re.findall(r"begins at step (\d+)", out)]
    assert len(starts) == 2
    assert 0 == starts[0] < starts[1]
    assert "/job:ps/task:0 was lost and restored from step" in log


def free_ports(count):
    import socket

    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def test_three_terminals():
    """The docstring's three commands: the chief learns the weight, twice, from the same servers."""
    chief, ps, worker = (f"localhost:{port}" for port in free_ports(3))
    cluster = {"chief": [chief], "ps": [ps], "worker": [worker]}

    def start(kind):
        setting = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
        return Program(
            [sys.executable, str(ROOT / "examples" / "tf_config_cluster.py")],
            env={**os.environ, "TF_CONFIG": setting, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        )

    servers = [start("ps"), start("worker")]
    try:
        for server in servers:
            assert "waits for a chief" in server.stdout.readline()
        for _ in range(2):
            chief_process = start("chief")
            out, _ = chief_process.communicate(timeout=240)
            assert chief_process.returncode == 0
            found = [float(n) for n in re.findall(r"-?\d+\.\d+", out.splitlines()[-1])]
            assert found == pytest.approx([2.0, -3.0], abs=0.01)
    finally:
        for server in servers:
            server.kill()
            server.wait(60)
            server.stdout.close()
