"""The live view draws on terminals and prints plain lines elsewhere."""

import io

from rich.console import Console

from stratagem._monitor.cluster_view import ClusterView, ServerView, WorkerView
from stratagem._monitor.terminal_view import (
    Curve,
    Picture,
    TerminalView,
    draw,
    one_line,
)


def _picture(done: int = 50) -> Picture:
    return Picture(
        title="clicks",
        done_steps=done,
        total_steps=100,
        elapsed_s=10.0,
        examples_per_s=1234.5,
        curves=[Curve(label="loss", values=[0.9, 0.7, 0.5], note="(smaller is better)")],
        notes=["killed worker 1 on purpose"],
        cluster=ClusterView(
            time_s=0.0,
            workers=(
                WorkerView(name="worker 0", state="running", steps=25),
                WorkerView(name="worker 1", state="lost", steps=25, restarts=1),
            ),
            servers=(
                ServerView(name="ps 0", state="running", variable_bytes=2_500_000, updates=50),
            ),
            staleness_mean=1.25,
            staleness_p99=4.0,
        ),
    )


def test_the_picture_shows_everything_a_user_asks_for():
    """Progress, ETA, speed, loss, worker and server state, staleness and notes are on it."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(draw(_picture()))
    text = console.file.getvalue()
    for wanted in (
        "step 50 of 100",
        "1,234 examples/s",
        "10 s left",
        "loss 0.5000",
        "(smaller is better)",
        "0.900 ┤",
        "0.500 ┤",
        "└0 s",
        "worker 1",
        "lost",
        "2.5 MB",
        "staleness 1.2",
        "killed worker 1 on purpose",
    ):
        assert wanted in text, wanted


def test_a_small_terminal_shows_whole_words_and_events_first():
    """At 80 columns no header is cut, and the first 24 lines contain the events."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(draw(_picture()))
    lines = console.file.getvalue().splitlines()
    assert "…" not in "".join(lines)
    assert any("restarts" in line for line in lines)
    assert any("killed worker 1 on purpose" in line for line in lines[:16])


def test_one_line_says_the_same_for_a_log():
    """A log line carries step, speed, loss and each worker's state."""
    line = one_line(_picture())
    assert line.startswith("step 50 of 100 (50 %), 1,234 examples/s, loss 0.5000")
    assert "worker 1 lost 25 steps" in line


def test_remaining_time_is_unknown_before_the_first_step():
    """No division by zero, no invented estimate."""
    assert _picture(done=0).remaining_s is None


def test_a_pipe_gets_lines_and_a_terminal_gets_a_picture(monkeypatch):
    """CI logs are not flooded with control characters."""
    assert not TerminalView(io.StringIO()).is_live
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any file for a terminal
    assert TerminalView(io.StringIO()).is_live
    assert not TerminalView(io.StringIO(), plain=True).is_live


def test_lines_come_seldom_but_the_last_one_always():
    """A thousand updates in a moment print once, and the end prints again."""
    stream = io.StringIO()
    with TerminalView(stream) as view:
        for done in range(1, 101):
            view.show(_picture(done=done))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[-1].startswith("step 100 of 100")


def test_the_chart_has_one_column_per_value_until_it_is_full():
    """A falling curve ends at the lowest block; a long one is averaged into columns."""
    for values in ([3.0, 2.0, 1.0], [float(n) for n in range(1000, 0, -1)]):
        console = Console(file=io.StringIO(), width=60, color_system=None)
        picture = Picture(
            title="t",
            done_steps=1,
            total_steps=1,
            elapsed_s=9.0,
            examples_per_s=None,
            curves=[Curve(label="loss", values=values)],
        )
        console.print(draw(picture))
        rows = [line for line in console.file.getvalue().splitlines() if "┤" in line]
        assert len(rows) == 4
        assert rows[0].split("┤")[1].strip(" │")[0] == "█"
        assert rows[-1].split("┤")[1].rstrip(" │")[-1] == "▁"


def test_a_constant_curve_can_be_drawn():
    """There is no division by the difference of equal values."""
    console = Console(file=io.StringIO(), width=60, color_system=None)
    console.print(draw(_picture(done=0)))
    curve = Curve(label="loss", values=[1.0, 1.0])
    picture = Picture(
        title="t", done_steps=0, total_steps=0, elapsed_s=0.0, examples_per_s=None, curves=[curve]
    )
    console.print(draw(picture))
    assert "1.000 ┤" in console.file.getvalue()
