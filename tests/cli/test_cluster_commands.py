"""Commands that start or watch a cluster, against real processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from waiting import wait_until
from warm_start import Program

import stratagem as sg
from stratagem import cli
from stratagem._cluster.discovery.announced_clusters import AnnouncedCluster, find_clusters
from stratagem._commands import top
from stratagem._monitor.monitor import Monitor
from stratagem._monitor.sample_sources import ClusterSource

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
    assert "ps 0 running 0 B 0 updates" in out


def test_top_without_the_key_learns_nothing(spec_text, capsys, monkeypatch):
    """Every task refuses another key, and `top` tells that from a task that does not answer."""
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", "not the key of this cluster")
    assert cli.main(["top", "--once", "--cluster", spec_text]) == 1
    out = capsys.readouterr().out
    assert "worker 0 wrong key" in out
    assert "ps 0 wrong key" in out
    assert "set STRATAGEM_CLUSTER_KEY" in out
    assert "no answer" not in out


def test_top_finds_a_local_cluster_by_itself(capsys, monkeypatch):
    """Neither addresses nor the key are needed, and a worker that is started again is found at its new address."""
    monkeypatch.delenv("STRATAGEM_CLUSTER_KEY", raising=False)
    with sg.LocalCluster(workers=1, ps=1) as cluster:
        (own,) = (one for one in find_clusters() if one.owner == os.getpid())
        assert own.spec == cluster.cluster_spec
        chosen = top.source_of(
            str(os.getpid())
        )  # other programs of this user may have clusters too
        with Monitor(chosen) as monitor:
            assert not monitor.look().lost
            old = cluster.pid("worker", 0)
            cluster.kill_worker(0)
            cluster.wait_restarted(0, old)
            wait_until(lambda: not monitor.look().lost)
        assert cli.main(["top", "--once", "--cluster", str(os.getpid())]) == 0
        assert "worker 0 idle 0 steps" in capsys.readouterr().out
    assert os.getpid() not in [one.owner for one in find_clusters()]


def test_top_chooses_among_the_clusters_that_it_finds(monkeypatch):
    """One cluster needs no choice; several are listed with the number to choose one by."""
    one, other = (
        AnnouncedCluster(
            owner=owner,
            pids=(owner + 1,),
            spec=sg.ClusterSpec({"ps": ["localhost:1"]}),
            key="k" * 16,
        )
        for owner in (os.getpid(), 2)
    )
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for found in ([one], [one, other], []):
        monkeypatch.setattr(top, "find_clusters", lambda found=found: found)
        if len(found) == 1:
            assert not top.source_of(None).sample().workers
        else:
            expected = (
                r"--cluster and its process number:\n" if found else "no cluster of yours runs"
            )
            with pytest.raises(ValueError, match=expected) as error:
                top.source_of(None)
            assert str(os.getpid()) in str(error.value) or not found
    with pytest.raises(ValueError, match="process number or the name"):
        top.source_of("99999999")


def test_top_does_not_take_another_cluster_for_an_unknown_name(monkeypatch):
    """Tasks that no process owns do not match a name that no cluster has."""
    served = AnnouncedCluster(
        owner=0, pids=(2,), spec=sg.ClusterSpec({"ps": ["localhost:1"]}), key="k" * 16
    )
    monkeypatch.setattr(top, "find_clusters", lambda: [served])
    with pytest.raises(ValueError, match="--cluster 'no-such-cluster'"):
        top.source_of("no-such-cluster")
    assert not top.source_of("2").sample().workers


def test_a_server_task_is_found_with_its_key_until_it_ends(monkeypatch):
    """Tasks of `stratagem server` are found too; the addresses of all tasks come from their specification."""
    monkeypatch.delenv("STRATAGEM_CLUSTER_KEY", raising=False)
    cluster = {"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:1"]}
    key = "only this server has this key"

    def found():
        return [one for one in find_clusters() if one.key == key]

    with sg.Server(cluster, job_name="ps", task_index=0, key=key) as server:
        (one,) = found()
        assert one.spec == {"ps": [server.address], "worker": ["127.0.0.1:1"]}
        assert one.number == os.getpid()
        links = {link: os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
        (notice,) = (int(link.name) for link, to in links.items() if "stratagem-task" in to)
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[notice]):
            assert len(found()) == 1  # a child may have the descriptor, and is not the task
        with ClusterSource(one.spec, one.key) as source:
            sample = source.sample()
        assert [task.state for task in sample.servers] == ["running"]
        assert [task.state for task in sample.workers] == ["no answer"]
    assert found() == []


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
                coordinator.join(timeout_s=120)
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
    with Program(
        [sys.executable, "-m", "stratagem", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("serving /job:ps/task:0 at ")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (0, 130)
        finally:
            process.kill()
