"""The whole demonstration at small size, and Ctrl-C in the middle of it, as real processes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stratagem._demo.run import DemoOptions, run_demo


@pytest.mark.timeout(120)
def test_the_demonstration_trains_loses_a_worker_and_leaves_files(tmp_path, capsys):
    """Everything README promises of `make demo`, in a few seconds and plain lines."""
    options = DemoOptions(seconds=8, output=str(tmp_path), plain=True, rows_per_worker=20_000)
    assert run_demo(options) == 0
    out = capsys.readouterr().out
    for wanted in (
        "killed worker 0 on purpose",
        "best possible",
        "a process without Stratagem loaded it",
        "every process is gone",
    ):
        assert wanted in out, wanted
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_demonstration_cleanly(tmp_path):
    """SIGINT while training: exit code 130 within seconds, no child process left."""
    command = [sys.executable, "-m", "stratagem", "demo", "--plain", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while "examples/s" not in process.stdout.readline():
                assert process.poll() is None
            children = _descendants(process.pid)
            assert children
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
        finally:
            process.kill()


def _descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in children]
    return found + [grandchild for child in found for grandchild in _descendants(child)]
