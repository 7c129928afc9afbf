"""Live picture of a training cluster, for terminals and for log files.

A `Picture` is plain data: a view of the cluster, and what the program adds to it. ``stratagem top`` and the
demonstration pass pictures to a `View`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TextIO, final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stratagem._monitor.advice import advise
from stratagem._monitor.cluster_view import ClusterView, ServerView, WorkerView
from stratagem._monitor.markup import event_text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS = 4
_CURVES = 3
_NOTES = 4


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
    scalars = view.scalars[:_CURVES]
    return Picture(
        title=title,
        done_steps=view.steps,
        total_steps=0,
        elapsed_s=view.elapsed_s,
        examples_per_s=None,
        curves=[
            Curve(label=one.name, values=[value for _, value in one.points]) for one in scalars
        ],
        notes=[event_text(event) for event in view.events[-_NOTES:]],
        cluster=view,
    )


class View(Protocol):
    """Output for pictures; a context manager that restores the terminal at its end."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: object) -> None: ...

    def show(self, picture: Picture) -> None:
        """Replace the picture."""

    def say(self, line: str) -> None:
        """Print one line that stays."""


def open_view(*, stream: TextIO | None = None, plain: bool = False) -> View:
    """Return a live view on a terminal, plain lines elsewhere (pipes, CI, no colours)."""
    console = Console(file=stream or sys.stdout)
    if plain or not console.is_terminal or console.no_color or console.is_dumb_terminal:
        return LinesView(stream or sys.stdout)
    return LiveView(console)


@final
class LiveView:
    """View that redraws the picture in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._live.stop()

    def show(self, picture: Picture) -> None:
        """Redraw."""
        self._live.update(draw(picture))

    def say(self, line: str) -> None:
        """Print a line above the picture, or below it after the end."""
        self._console.print(line, markup=False, highlight=False)


@final
class LinesView:
    """View that prints one line every few seconds, for logs."""

    # Frequent enough to follow, rare enough for a CI log.
    _EVERY_S = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = float("-inf")
        self._finished = False

    def __enter__(self) -> LinesView:
        return self

    def __exit__(self, *failure: object) -> None:
        self._stream.flush()

    def show(self, picture: Picture) -> None:
        """Print one line if the last one is old enough, or the work is done."""
        now = time.monotonic()
        finished = picture.done_steps >= picture.total_steps > 0 and not self._finished
        if now - self._last < self._EVERY_S and not finished:
            return
        self._last = now
        self._finished = finished
        self.say(one_line(picture))

    def say(self, line: str) -> None:
        """Print one line at once."""
        print(line, file=self._stream, flush=True)


def one_line(picture: Picture) -> str:
    """Return the picture as one line for a log."""
    cluster = picture.cluster
    parts = [_steps(picture), *_speed(picture)]
    parts += [f"{curve.label} {curve.values[-1]:.4f}" for curve in picture.curves if curve.values]
    if cluster.staleness_mean is not None:
        parts.append(f"staleness {cluster.staleness_mean:.1f}")
    parts += [
        f"{one.name} {one.state} {one.steps} steps{_worker_note(one)}" for one in cluster.workers
    ]
    parts += [
        f"{one.name} {_state_of(one)} {_size(one.variable_bytes)} {one.updates} updates{_server_note(one)}"
        for one in cluster.servers
    ]
    if picture.remaining_s is not None:
        parts.append(f"{picture.remaining_s:.0f} s left")
    parts += [f"advice: {one}" for one in advise(cluster)[:1]]
    return ", ".join(parts)


def _speed(picture: Picture) -> list[str]:
    if picture.examples_per_s is not None:
        return [f"{picture.examples_per_s:,.0f} examples/s"]
    steps_per_s = picture.cluster.steps_per_s
    return [] if steps_per_s is None else [f"{steps_per_s:,.3g} steps/s"]


def _worker_note(worker: WorkerView) -> str:
    note = [] if worker.steps_per_s is None else [f"{worker.steps_per_s:.3g} steps/s"]
    if worker.is_straggler:
        note.append("straggler")
    if time_use := _time_use(worker):
        note.append(time_use)
    return f" ({', '.join(note)})" if note else ""


def _time_use(worker: WorkerView) -> str:
    """Return the two phases that take most of a worker's time."""
    longest = sorted(worker.phases.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{phase} {100 * share:.0f} %" for phase, share in longest if share >= 0.05)


def _server_note(server: ServerView) -> str:
    return "" if server.busy_share is None else f" (busy {100 * server.busy_share:.0f} %)"


def _state_of(server: ServerView) -> str:
    return "checkpoint" if server.is_checkpointing else server.state


def _steps(picture: Picture) -> str:
    if picture.total_steps == 0:
        return f"{picture.done_steps} steps"
    share = 100 * picture.done_steps / picture.total_steps
    return f"step {picture.done_steps:,} of {picture.total_steps:,} ({share:.0f} %)"


def _size(held: int) -> str:
    return f"{held / 1e6:,.1f} MB" if held >= 1e6 else f"{held / 1e3:,.0f} kB"


def draw(picture: Picture) -> Panel:
    """Return the picture as a panel."""
    rows: list[RenderableType] = []
    if picture.subtitle:
        rows.append(Text(picture.subtitle, style="dim"))
    rows.append(Text(_summary(picture)))
    if picture.total_steps:
        rows.append(ProgressBar(total=picture.total_steps, completed=picture.done_steps))
    curves = [curve for curve in picture.curves if curve.values]
    if curves:
        rows += [Text(), _beside([_chart(curve, picture.elapsed_s) for curve in curves])]
    # Events come before the tables: a low terminal shows only the first rows.
    rows += [Text(note, style="yellow") for note in picture.notes[-_NOTES:]]
    rows += [Text(), _workers(picture.cluster), Text(), _servers(picture.cluster)]
    rows += [Text(f"→ {one}", style="bold") for one in advise(picture.cluster)[:3]]
    return Panel(Group(*rows), title=picture.title, border_style="cyan")


def _beside(parts: Sequence[RenderableType]) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in parts:
        table.add_column(ratio=1)
    table.add_row(*parts)
    return table


def _summary(picture: Picture) -> str:
    parts = [_steps(picture), *_speed(picture)]
    if picture.remaining_s:
        parts.append(f"{picture.remaining_s:.0f} s left")
    mean, p99 = picture.cluster.staleness_mean, picture.cluster.staleness_p99
    if mean is not None:
        parts.append(f"staleness {mean:.1f} updates (p99 {p99 or 0:.0f})")
    return "   ".join(parts)


def _chart(curve: Curve, elapsed_s: float, *, width: int = 26) -> Text:
    """Draw a curve in a few rows of blocks, with its current value, extremes and times."""
    count = len(curve.values)
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


def _workers(cluster: ClusterView) -> Table:
    table = _table("worker", "state", "steps", "steps/s", "restarts")
    detailed = any(map(_time_use, cluster.workers))
    if detailed:
        table.add_column("time")
    for row in cluster.workers:
        cells: list[RenderableType] = [
            row.name,
            Text("straggler", style="bold red") if row.is_straggler else _state(row.state),
            f"{row.steps:,}",
            _rate(row.steps_per_s),
            str(row.restarts),
        ]
        table.add_row(*cells, *([Text(_time_use(row))] if detailed else []))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _servers(cluster: ClusterView) -> Table:
    table = _table("server", "state", "memory", "updates", "per s", "busy", "refused")
    for row in cluster.servers:
        table.add_row(
            row.name,
            _state(_state_of(row)),
            _size(row.variable_bytes),
            f"{row.updates:,}",
            _rate(row.updates_per_s),
            "–" if row.busy_share is None else f"{100 * row.busy_share:.0f} %",
            f"{row.duplicates + row.fenced:,}",  # repeated writes, and writes of lost workers
        )
    return table


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def _state(state: str) -> Text:
    return Text(state, style="green" if state in ("running", "idle", "checkpoint") else "bold red")
