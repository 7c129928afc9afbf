"""Hosts in network namespaces, and the table of the rows between them (issue 18, point 3)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from waiting import wait_until

from benchmarks import namespaces
from benchmarks.hosts import Hosts, Link, missing
from benchmarks.namespaces import Findings, Found

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 240.0

needs_root = pytest.mark.skipif(missing() is not None, reason=f"no hosts here: {missing()}")

FOUND = Found(
    row="mlp_sockets",
    title="MLP",
    unit="steps/s",
    link="1 Gbit/s, 1 ms",
    value=100.0,
    spread=0.05,
    steps_per_s=100.0,
    bytes_per_step=1_600_000.0,
    processor_ms={"main": 0.1, "worker": 2.0, "ps": 1.0, "switch": 3.0},
    link_share=0.64,
    processor_share=0.3,
    busy_share=0.4,
)


@pytest.mark.parametrize(
    ("link", "processors", "busy", "bound"),
    [
        (0.8, 0.9, 0.95, "bandwidth"),
        (0.7, 0.9, 0.95, "processor"),
        (0.7, 0.8, 0.8, "latency"),
        (0.7, 0.1, 0.95, "other programs"),
    ],
)
def test_the_limit_of_a_row(link: float, processors: float, busy: float, bound: str):
    found = replace(FOUND, link_share=link, processor_share=processors, busy_share=busy)
    assert found.bound == bound


def test_the_table_is_made_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Every figure of the run is in the page; the rest of the page stays."""
    machine = {"cores": 2, "processor": "a processor", "name": "here", "load_before": 0.5}
    findings = Findings(
        machine=machine,
        began="2026-01-02T03:04:05+00:00",
        links={"1 Gbit/s, 1 ms": (0.00135, 0.94)},
        found=[FOUND],
    )
    source, page = tmp_path / "found.json", tmp_path / "page.md"
    source.write_text(namespaces.json.dumps(asdict(findings)))
    page.write_text("a\n<!-- namespaces:begin -->\nold\n<!-- namespaces:end -->\nz\n")
    assert namespaces.main(["--from", str(source), "--page", str(page)]) == 0
    text = page.read_text()
    assert "put into page.md" in capsys.readouterr().out
    assert text.startswith("a\n<!--")
    assert text.endswith("-->\nz\n")
    assert (
        "| MLP (steps/s) | 1 Gbit/s, 1 ms | 100 ±5% | 100 | 1,600,000 | 0.1 / 2.00 / 1.00 |" in text
    )
    assert "| 64% | 30% | latency |" in text
    assert "1.35 ms and 0.9 Gbit/s" in text
    assert "2026-01-02" in text


def spaces(mark: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.startswith(mark)]


@needs_root
@pytest.mark.soak
def test_hosts_have_the_rate_and_the_delay_of_their_link_and_go_away():
    """A byte needs at least the delay, a stream gets at most the rate; an error removes the hosts too."""
    mark = f"sgb{os.getpid()}"
    with pytest.raises(RuntimeError, match="of the test"), Hosts(["a", "b"]) as hosts:
        assert len(spaces(mark)) == 3
        hosts.set_link(Link(name="slow", gigabits=0.5, round_trip_s=0.02))
        assert hosts.round_trip_s("a", "b") >= 0.02
        before = hosts.traffic()
        assert 0 < hosts.stream_gigabits("a", "b", 1.0) < 0.6
        assert hosts.traffic()["b"][0] > before["b"][0] + 2**20
        assert hosts.traffic()["a"][1] > before["a"][1] + 2**20
        hosts.set_link(Link(name="not limited"))
        assert hosts.round_trip_s("a", "b") < 0.02
        raise RuntimeError("of the test")
    assert spaces(mark) == []


@needs_root
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_command_measures_and_ctrl_c_removes_the_hosts(tmp_path: Path):
    """A whole run at tiny size; then one that is interrupted while its tasks run."""
    command = [
        *(sys.executable, "-m", "benchmarks.namespaces", "--tiny", "--only", "empty"),
        *("--repetitions", "1", "--seconds", "0.1"),
        *("--results", str(tmp_path), "--page", str(tmp_path / "page.md")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.count("empty step") for line in done.stdout.splitlines()[2:5]] == [1, 1, 1]
    (written,) = tmp_path.glob("namespaces-*.json")
    assert len(Findings.from_json(namespaces.json.loads(written.read_text())).found) == 3
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    mark = f"sgb{process.pid}"
    wait_until(lambda: listening(f"{mark}ps1"), LIMIT_S)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert spaces(mark) == []


def listening(space: str) -> bool:
    """Return whether the parameter server of a host has started."""
    found = subprocess.run(
        ["ip", "netns", "exec", space, "ss", "-Htln", "sport = :2222"],
        capture_output=True,
        text=True,
        check=False,
    )
    return bool(found.stdout.strip())
