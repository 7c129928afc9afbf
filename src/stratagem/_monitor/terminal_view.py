"""Live picture of a training cluster, for terminals and for log files.

A `Picture` is plain data: a view of the cluster, and what the program adds to it. ``stratagem top`` and the
demonstration pass pictures to a `TerminalView`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, TextIO, final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stratagem._monitor.advice import advise
from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.view_tables import (
    GOOD_STATES,
    Rows,
    event_text,
    number,
    server_rows,
    worker_rows,
)

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_CHART_ROWS: Final = 4
_CHART_WIDTH: Final = 26
_CURVES: Final = 3
_NOTES: Final = 4
_WORKER_HEADS: Final = ("worker", "state", "steps", "steps/s", "restarts", "time")
_SERVER_HEADS: Final = ("server", "state", "variables", "updates", "updates/s", "busy")

_LINE_EVERY_S: Final = 5.0
"""Time between lines of a log: frequent enough to follow, rare enough for CI."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values over time, with a label."""

    label: str
    values: Sequence[float]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Everything that a view shows at one moment."""

    title: str
    subtitle: str = ""
    done_steps: int
    total_steps: int
    """Expected number of steps; 0 when unknown."""

    elapsed_s: float
    examples_per_s: float | None
    """None when unknown, as for the cluster of another program."""

    curves: Sequence[Curve] = ()
    notes: Sequence[str] = ()
    cluster: ClusterView = ClusterView(time_s=0.0)  # noqa: RUF009 - immutable

    @property
    def remaining_s(self) -> float | None:
        """Seconds left at the current rate; None before the first step."""
        if self.done_steps == 0 or self.total_steps == 0:
            return None
        return self.elapsed_s * (self.total_steps - self.done_steps) / self.done_steps


def picture_of(view: ClusterView, *, title: str) -> Picture:
    """Return the picture of a cluster that another program uses.

    Example:
        >>> picture_of(ClusterView(time_s=0.0, steps=7), title="top").done_steps
        7
    """
    return Picture(
        title=title,
        done_steps=view.steps,
        total_steps=0,
        elapsed_s=view.elapsed_s,
        examples_per_s=None,
        curves=[
            Curve(label=one.name, values=[value for _, value in one.points])
            for one in view.scalars[:_CURVES]
        ],
        notes=[event_text(event) for event in view.events[-_NOTES:]],
        cluster=view,
    )


@final
class TerminalView:
    """Output for pictures: a picture that is redrawn in place, or lines where that is not possible.

    A context manager, which restores the terminal at its end.

    Args:
        stream: where to write; by default standard output.
        plain: print lines on a terminal, too.
    """

    def __init__(self, stream: TextIO | None = None, *, plain: bool = False) -> None:
        self._console = console = Console(file=stream or sys.stdout)
        no_picture = not console.is_terminal or console.no_color or console.is_dumb_terminal
        self._live = None if plain or no_picture else Live(console=console, refresh_per_second=8)
        self._last_line = float("-inf")
        self._finished = False

    @property
    def is_live(self) -> bool:
        """True if pictures are redrawn in place."""
        return self._live is not None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, picture: Picture) -> None:
        """Redraw; or print one line if the last one is old enough, or the work is done."""
        if self._live is not None:
            self._live.update(draw(picture))
            return
        now = time.monotonic()
        finished = picture.done_steps >= picture.total_steps > 0 and not self._finished
        if now - self._last_line >= _LINE_EVERY_S or finished:
            self._last_line, self._finished = now, finished
            self.say(one_line(picture))

    def say(self, line: str) -> None:
        """Print one line that stays."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def one_line(picture: Picture) -> str:
    """Return the picture as one line for a log."""
    cluster = picture.cluster
    parts = [_steps(picture), *_speed(picture)]
    parts += [f"{curve.label} {curve.values[-1]:.4f}" for curve in picture.curves if curve.values]
    if cluster.staleness_mean is not None:
        parts.append(f"staleness {cluster.staleness_mean:.1f}")
    for row, worker in zip(worker_rows(cluster), cluster.workers, strict=True):
        rate = "" if worker.steps_per_s is None else f"{row['steps/s']} steps/s"
        note = ", ".join(filter(None, (rate, row["time"])))
        text = f"{worker.name} {row['state']} {worker.steps} steps"
        parts.append(f"{text} ({note})" if note else text)
    for row in server_rows(cluster):
        text = f"{row['server']} {row['state']} {row['variables']} {row['updates']} updates"
        parts.append(text if row["busy"] == "–" else f"{text} (busy {row['busy']})")
    if picture.remaining_s is not None:
        parts.append(f"{picture.remaining_s:.0f} s left")
    parts += [f"advice: {one}" for one in advise(cluster)[:1]]
    return ", ".join(parts)


def _speed(picture: Picture) -> list[str]:
    if picture.examples_per_s is not None:
        return [f"{picture.examples_per_s:,.0f} examples/s"]
    steps_per_s = picture.cluster.steps_per_s
    return [] if steps_per_s is None else [f"{number(steps_per_s)} steps/s"]


def _steps(picture: Picture) -> str:
    if picture.total_steps == 0:
        return f"{picture.done_steps} steps"
    share = 100 * picture.done_steps / picture.total_steps
    return f"step {picture.done_steps:,} of {picture.total_steps:,} ({share:.0f} %)"


def draw(picture: Picture) -> Panel:
    """Return the picture as a panel."""
    rows: list[RenderableType] = []
    if picture.subtitle:
        rows.append(Text(picture.subtitle, style="dim"))
    rows.append(Text(_summary(picture)))
    if picture.total_steps:
        rows.append(ProgressBar(total=picture.total_steps, completed=picture.done_steps))
    charts = [_chart(curve, picture.elapsed_s) for curve in picture.curves if curve.values]
    if charts:
        beside = Table.grid(*[""] * len(charts), expand=True, padding=(0, 1))
        beside.add_row(*charts)
        rows += [Text(), beside]
    # Events come before the tables: a low terminal shows only the first rows.
    rows += [Text(note, style="yellow") for note in picture.notes[-_NOTES:]]
    rows += [Text(), _table(_WORKER_HEADS, worker_rows(picture.cluster))]
    rows += [Text(), _table(_SERVER_HEADS, server_rows(picture.cluster))]
    rows += [Text(f"→ {one}", style="bold") for one in advise(picture.cluster)[:3]]
    return Panel(Group(*rows), title=picture.title, border_style="cyan")


def _summary(picture: Picture) -> str:
    parts = [_steps(picture), *_speed(picture)]
    if picture.remaining_s:
        parts.append(f"{picture.remaining_s:.0f} s left")
    mean, p99 = picture.cluster.staleness_mean, picture.cluster.staleness_p99
    if mean is not None:
        parts.append(f"staleness {mean:.1f} updates (p99 {p99 or 0:.0f})")
    return "   ".join(parts)


def _chart(curve: Curve, elapsed_s: float) -> Text:
    """Draw a curve in a few rows of blocks, with its current value, extremes and times."""
    count, width = len(curve.values), _CHART_WIDTH
    means = []
    for column in range(width):  # mean of the values in the column; a short curve is stretched
        low, high = column * count // width, (column + 1) * count // width
        values = curve.values[low : max(high, low + 1)]
        means.append(sum(values) / len(values))
    lowest, highest = min(means), max(means)
    span = (highest - lowest) or 1.0
    levels = len(_BLOCKS) - 1
    # One level at least, so that the smallest value is visible.
    heights = [1 + round((mean - lowest) / span * (_CHART_ROWS * levels - 1)) for mean in means]
    text = Text(f"{curve.label} {curve.values[-1]:.4f}", style="bold")
    text.append(f"  {curve.note}\n" if curve.note else "\n", style="dim")
    for row in reversed(range(_CHART_ROWS)):
        label = {_CHART_ROWS - 1: f"{highest:.3f}", 0: f"{lowest:.3f}"}.get(row, "")
        blocks = (_BLOCKS[min(max(height - row * levels, 0), levels)] for height in heights)
        text.append(f"{label:>6} ┤", style="dim")
        text.append(f"{''.join(blocks)}\n", style="green")
    end = f"{elapsed_s:.0f} s"
    text.append(f"{'':>6} └0 s{end:>{width - 3}}", style="dim")
    return text


def _table(heads: Sequence[str], rows: Rows) -> Table:
    """Return some columns of a table; empty ones are left out."""
    shown = [head for head in heads if not rows or any(row[head] for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for head in shown:
        table.add_column(head, no_wrap=head != "time")
    for row in rows:
        table.add_row(*(_cell(head, row[head]) for head in shown))
    return table


def _cell(head: str, value: str) -> Text:
    is_state = head == "state"
    return Text(value, style=("green" if value in GOOD_STATES else "bold red") if is_state else "")
