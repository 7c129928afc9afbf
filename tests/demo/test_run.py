"""The whole demonstration at small size, and Ctrl-C in the middle of it, as real processes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import wait_until

from stratagem._commands.command_parser import make_parser
from stratagem._demo import run
from stratagem._demo.clicks import ClickWorld
from stratagem._demo.run import draw_curves, run_demo, save_model


def demo_options(output, seconds):
    words = ["demo", "--seconds", str(seconds), "--output", str(output), "--plain"]
    return make_parser().parse_args(words)


@pytest.mark.slow
def test_the_demonstration_trains_loses_a_worker_and_a_server_and_leaves_files(tmp_path, capsys):
    """Everything README promises of `make demo`, in a few seconds and plain lines."""
    assert run_demo(demo_options(tmp_path, 8), vocabulary=(2000, 500, 100)) == 0
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


def test_a_worker_that_begins_again_draws_other_clicks():
    """Rows that a worker repeats after its restart would make the model overfit."""
    clicks = run._endless_clicks(ClickWorld(vocabulary=(50, 20), seed=1))
    first, again = (next(iter(clicks))[1] for _ in range(2))
    assert not torch.equal(first, again)


def test_a_folder_that_cannot_be_made_is_reported_before_the_training(tmp_path):
    """The error comes before any process starts."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        run_demo(demo_options(tmp_path / "file" / "folder", 60))


@pytest.mark.slow
def test_ctrl_c_after_the_training_still_writes_the_files(tmp_path, capsys, monkeypatch):
    """The first Ctrl-C never loses the model."""
    calls = []

    def save(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return save_model(*arguments)

    monkeypatch.setattr(run, "save_model", save)
    assert run_demo(demo_options(tmp_path, 1), vocabulary=(200, 50)) == 130
    assert len(calls) == 2
    assert "stopped by Ctrl-C; writing the files" in capsys.readouterr().out
    assert torch.load(tmp_path / "model.pt", weights_only=True)
    assert (tmp_path / "curves.png").exists()


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


def test_the_curves_show_the_whole_legend(tmp_path):
    """Long events do not leave the picture: its edges are white."""
    image = pytest.importorskip("matplotlib.image")
    text = "parameter server 0 restarted and restored from step 1275 in 1.1 s; lost: 10.5 s of its variables (1435 updates)"
    points = [(float(n), 0.5 + n / 100) for n in range(10)]
    marks = [(float(n), text) for n in range(4)]
    drawn = draw_curves(points, points, best_auc=0.9, marks=marks, path=tmp_path / "curves.png")
    pixels = image.imread(drawn)
    assert (pixels[:, :3] == 1).all()
    assert (pixels[:, -3:] == 1).all()
    assert (pixels[-3:] == 1).all()


def _descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in children]
    return found + [grandchild for child in found for grandchild in _descendants(child)]
