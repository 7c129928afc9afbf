"""The live picture draws on terminals and speaks plainly elsewhere."""

import io

from rich.console import Console

from stratagem._demo.view import (
    LinesView,
    LiveView,
    Picture,
    ServerRow,
    WorkerRow,
    draw,
    one_line,
    open_view,
)


def _picture(done: int = 50) -> Picture:
    return Picture(
        title="clicks",
        done_steps=done,
        total_steps=100,
        elapsed_s=10.0,
        examples_per_s=1234.5,
        losses=[0.9, 0.7, 0.5],
        workers=[
            WorkerRow(name="worker 0", state="running", steps=25),
            WorkerRow(name="worker 1", state="lost", steps=25, restarts=1),
        ],
        servers=[ServerRow(name="ps 0", state="running", held_bytes=2_500_000, updates=50)],
        staleness_mean=1.25,
        staleness_max=4.0,
        notes=["killed worker 1 on purpose"],
    )


def test_the_picture_shows_everything_a_user_asks_for():
    """Progress, ETA, speed, loss, worker and server state, staleness and notes are on it."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(draw(_picture()))
    text = console.file.getvalue()
    for wanted in (
        "step 50 of 100",
        "1,234 examples/s",
        "10 s to go",
        "loss 0.5000",
        "worker 1",
        "lost",
        "2,500 kB",
        "staleness 1.2",
        "killed worker 1 on purpose",
    ):
        assert wanted in text, wanted


def test_one_line_says_the_same_for_a_log():
    """A log line carries step, speed, loss and each worker's state."""
    line = one_line(_picture())
    assert line.startswith("step 50/100 (50%), 1,234 examples/s, loss 0.5000")
    assert "worker 1 lost 25 steps" in line


def test_remaining_time_is_unknown_before_the_first_step():
    """No division by zero, no invented estimate."""
    assert _picture(done=0).remaining_s is None


def test_a_pipe_gets_lines_and_a_terminal_gets_a_picture(monkeypatch):
    """CI logs are not flooded with control characters."""
    assert isinstance(open_view(stream=io.StringIO()), LinesView)
    assert isinstance(LiveView(Console(file=io.StringIO(), force_terminal=True)), LiveView)


def test_lines_come_seldom_but_the_last_one_always():
    """A thousand updates in a moment print once, and the end prints again."""
    stream = io.StringIO()
    with LinesView(stream) as view:
        for done in range(1, 101):
            view.show(_picture(done=done))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[-1].startswith("step 100/100")
