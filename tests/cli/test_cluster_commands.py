"""Commands that start or watch a cluster, against real processes."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import stratagem as sg
from stratagem import cli

pytestmark = pytest.mark.process


@pytest.fixture
def spec_text(monkeypatch):
    """A cluster of one worker and one parameter server, as JSON; who watches it has its key."""
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", "shared by this test and its cluster")
    with sg.LocalCluster(workers=1, ps=1) as cluster:
        yield json.dumps(cluster.cluster_spec.as_dict())


def test_top_shows_what_every_task_does(spec_text, capsys):
    """Idle tasks are shown as idle, with what the server holds."""
    assert cli.main(["top", "--once", "--cluster", spec_text]) == 0
    out = capsys.readouterr().out
    assert "worker 0 idle 0 steps" in out
    assert "ps 0 running 0 kB 0 updates" in out


def test_top_without_the_key_learns_nothing(spec_text, capsys, monkeypatch):
    """A stranger on the same machine is refused by every task."""
    monkeypatch.delenv("STRATAGEM_CLUSTER_KEY")
    assert cli.main(["top", "--once", "--cluster", spec_text]) == 1
    assert "worker 0 no answer" in capsys.readouterr().out


def test_top_of_a_cluster_that_is_gone_says_so(capsys):
    """No task answers: the exit code is 1 and each task is named."""
    nobody = json.dumps({"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:1"]})
    assert cli.main(["top", "--once", "--cluster", nobody]) == 1
    assert "worker 0 no answer" in capsys.readouterr().out


def test_train_with_parameter_servers_runs_the_script_on_a_cluster(tmp_path, capsys):
    """The script schedules work on real workers through the strategy it is given."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import stratagem as sg

            strategy = sg.auto_strategy()
            with sg.ClusterCoordinator(strategy) as coordinator:
                with strategy.scope():
                    total = sg.Variable(0.0)
                for number in range(10):
                    coordinator.schedule(lambda n: total.assign_add(n), args=(float(number),))
                coordinator.join(timeout_s=30)
                print(total.numpy())
            """
        )
    )
    words = ["train", str(script), "--strategy", "ps", "--workers", "2", "--ps", "1"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.strip() == "45.0"


def test_one_script_trains_with_parameter_servers_too(capsys):
    """The script that test_cli.py runs under the other strategies, unchanged."""
    script = Path(__file__).parents[2] / "examples" / "any_strategy.py"
    words = ["train", str(script), "--strategy", "ps", "--workers", "2", "--ps", "2"]
    assert cli.main([*words, "--epochs", "4"]) == 0
    assert float(capsys.readouterr().out.split()[-1]) > 0.8


def test_server_serves_until_ctrl_c(tmp_path):
    """`stratagem server` says where it serves and ends cleanly on SIGINT."""
    cluster = json.dumps({"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0"]})
    words = ["server", "--job", "ps", "--index", "0", "--cluster", cluster]
    with subprocess.Popen(
        [sys.executable, "-m", "stratagem", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("serving /job:ps/task:0 at ")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (0, 130)
        finally:
            process.kill()
