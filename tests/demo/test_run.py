"""The whole demonstration at small size, and Ctrl-C in the middle of it, as real processes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import wait_until

from stratagem._demo.run import DemoOptions, run_demo


@pytest.mark.slow
def test_the_demonstration_trains_loses_a_worker_and_a_server_and_leaves_files(tmp_path, capsys):
    """Everything README promises of `make demo`, in a few seconds and plain lines."""
    options = DemoOptions(seconds=8, output=str(tmp_path), plain=True, vocabulary=(2000, 500, 100))
    assert run_demo(options) == 0
    out = capsys.readouterr().out
    for wanted in (
        "worker 0 killed",
        "worker 0 restarted",
        "parameter server 0 killed",
        "parameter server 0 restarted and restored from step",
        "best possible",
        "a process without Stratagem loaded it",
        "all processes have ended",
    ):
        assert wanted in out, wanted
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_ctrl_c_saves_the_model_and_leaves_no_process(tmp_path):
    """SIGINT while training: the files are written, the exit code is 130, every child has ended."""
    command = [sys.executable, "-m", "stratagem", "demo", "--plain", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while "AUC" not in process.stdout.readline():  # the first evaluated steps
                assert process.poll() is None
            children = _descendants(process.pid)
            assert children
            process.send_signal(signal.SIGINT)
            assert "stopped by Ctrl-C" in process.stdout.read()
            assert process.wait(120) == 130
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
        finally:
            process.kill()
    assert torch.load(tmp_path / "model.pt", weights_only=True)
    assert (tmp_path / "curves.png").exists()


def _descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in children]
    return found + [grandchild for child in found for grandchild in _descendants(child)]
