"""Reports, TensorBoard scalars and the page of a cluster that another program uses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import urllib.request

import pytest
from warm_start import Program

import stratagem as sg
from stratagem import cli

ONE_DEVICE = """
import stratagem as sg

strategy = sg.auto_strategy()
for step in range(3):
    sg.metrics.log("NAME", 1.0 / (1 + step))
"""

ON_WORKERS = """
import stratagem as sg

strategy = sg.auto_strategy()
with sg.ClusterCoordinator(strategy) as coordinator:
    for number in range(10):
        coordinator.schedule(sg.metrics.log, args=("worker_loss", float(number)))
    coordinator.join(timeout_s=60)
    while not coordinator.worker_metrics.scalars:  # comes with the next heartbeat
        coordinator.schedule(lambda: None).fetch()
    raise RuntimeError("after the training")
"""


def write(path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_report_of_a_script_on_one_device(tmp_path) -> None:
    """`train --report` works under every strategy: logged values are in the file."""
    report = tmp_path / "report.html"
    script = write(tmp_path / "script.py", ONE_DEVICE.replace("NAME", "reported_loss"))
    assert cli.main(["train", script, "--report", str(report)]) == 0
    assert "reported_loss" in report.read_text()


def test_scalars_for_tensorboard_when_asked_for(tmp_path) -> None:
    """`train --tensorboard` writes logged values that TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    script = write(tmp_path / "script.py", ONE_DEVICE.replace("NAME", "board_loss"))
    assert cli.main(["train", script, "--tensorboard", str(tmp_path / "runs")]) == 0
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    (point,) = events.Scalars("board_loss")
    assert 0.3 < point.value < 1.0


@pytest.mark.process
def test_a_report_of_a_cluster_whose_script_failed(tmp_path, capsys) -> None:
    """The report has the tasks and what workers logged, also after an error."""
    report = tmp_path / "report.html"
    script = write(tmp_path / "script.py", ON_WORKERS)
    words = ["train", script, "--strategy", "ps", "--workers", "1", "--ps", "1"]
    assert cli.main([*words, "--report", str(report)]) == 1
    assert "after the training" in capsys.readouterr().err
    text = report.read_text()
    for wanted in ("worker_loss", "worker 0", "ps 0"):
        assert wanted in text


@pytest.mark.slow
def test_the_page_of_a_cluster_that_another_program_uses(monkeypatch) -> None:
    """`stratagem top --web` prints a link that shows the tasks, until Ctrl-C."""
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", "shared by this test and its cluster")
    with sg.LocalCluster(workers=1, ps=1) as cluster:
        spec = json.dumps(cluster.cluster_spec.as_dict())
        command = [sys.executable, "-m", "stratagem", "top", "--web", "--cluster", spec]
        with Program(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                link = process.stdout.readline().split()[-1]
                address, _, token = link.partition("/?token=")
                request = urllib.request.Request(
                    f"{address}/metrics", headers={"Authorization": f"Bearer {token}"}
                )
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = answer.read().decode()
                assert 'stratagem_up{task="worker-0"} 1.0' in text
                assert 'stratagem_up{task="ps-0"} 1.0' in text
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
            finally:
                process.kill()


@pytest.mark.process
def test_top_says_what_limits_a_running_cluster(monkeypatch, capsys) -> None:
    """The terminal has rates, the use of time and the advice; figures come from the tasks themselves."""
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", "shared by this test and its cluster")
    with (
        sg.LocalCluster(workers=1, ps=1) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        coordinator = sg.ClusterCoordinator(strategy)
        coordinator.schedule(lambda: None).fetch()
        spec = json.dumps(cluster.cluster_spec.as_dict())
        assert cli.main(["top", "--once", "--cluster", spec]) == 0
    out = capsys.readouterr().out
    assert "worker 0 running 1 steps (0 steps/s, waiting for work 100 %)" in out
    assert "advice: workers wait for closures 100 % of the time" in out
