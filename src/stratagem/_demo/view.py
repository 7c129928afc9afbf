"""Live picture of a training cluster, for terminals and for log files.

A `Picture` is plain data. The training program fills one in and passes it to a `View`. ``stratagem top``
and the demonstration use it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TextIO, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = [
    "Curve",
    "LinesView",
    "LiveView",
    "Picture",
    "ServerRow",
    "View",
    "WorkerRow",
    "open_view",
]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """State of one worker."""

    name: str
    state: str
    steps: int
    restarts: int = 0
    steps_per_s: float | None = None
    time_use: str = ""
    """Phases that take most of its time."""
    is_straggler: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerRow:
    """State of one parameter server."""

    name: str
    state: str
    held_bytes: int
    updates: int
    updates_per_s: float | None = None
    busy_share: float | None = None
    refused: int = 0
    """Repeated writes, and writes of lost workers."""


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

    steps_per_s: float | None = None
    curves: Sequence[Curve] = ()
    workers: Sequence[WorkerRow] = ()
    servers: Sequence[ServerRow] = ()
    staleness_mean: float | None = None
    staleness_p99: float | None = None
    advice: Sequence[str] = ()
    """What limits the throughput, and what to try."""
    notes: Sequence[str] = ()

    @property
    def remaining_s(self) -> float | None:
        """Seconds left at the current rate; None before the first step."""
        if self.done_steps == 0 or self.total_steps == 0:
            return None
        return self.elapsed_s * (self.total_steps - self.done_steps) / self.done_steps


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
    """View that redraws the picture in place.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> picture = Picture(
        ...     title="t", done_steps=1, total_steps=2, elapsed_s=1.0, examples_per_s=8.0
        ... )
        >>> with LiveView(Console(file=io.StringIO(), force_terminal=True)) as view:
        ...     view.show(picture)
    """

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
    """View that prints one line every few seconds, for logs.

    Example:
        >>> import sys
        >>> picture = Picture(
        ...     title="t", done_steps=1, total_steps=2, elapsed_s=1.0, examples_per_s=8.0
        ... )
        >>> with LinesView(sys.stdout) as view:
        ...     view.show(picture)
        step 1 of 2 (50 %), 8 examples/s, 1 s left
    """

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
    parts = [_steps(picture)]
    if picture.examples_per_s is not None:
        parts.append(f"{picture.examples_per_s:,.0f} examples/s")
    elif picture.steps_per_s is not None:
        parts.append(f"{picture.steps_per_s:,.3g} steps/s")
    parts += [f"{curve.label} {curve.values[-1]:.4f}" for curve in picture.curves if curve.values]
    if picture.staleness_mean is not None:
        parts.append(f"staleness {picture.staleness_mean:.1f}")
    parts += [
        f"{row.name} {row.state} {row.steps} steps{_worker_note(row)}" for row in picture.workers
    ]
    parts += [
        f"{row.name} {row.state} {_size(row.held_bytes)} {row.updates} updates{_server_note(row)}"
        for row in picture.servers
    ]
    if picture.remaining_s is not None:
        parts.append(f"{picture.remaining_s:.0f} s left")
    parts += [f"advice: {one}" for one in picture.advice[:1]]
    return ", ".join(parts)


def _worker_note(row: WorkerRow) -> str:
    note = [] if row.steps_per_s is None else [f"{row.steps_per_s:.3g} steps/s"]
    if row.is_straggler:
        note.append("straggler")
    if row.time_use:
        note.append(row.time_use)
    return f" ({', '.join(note)})" if note else ""


def _server_note(row: ServerRow) -> str:
    return "" if row.busy_share is None else f" (busy {100 * row.busy_share:.0f} %)"


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
    rows += [Text(), _beside([_workers(picture), _servers(picture)])]
    rows += [Text(f"→ {one}", style="bold") for one in picture.advice[:3]]
    rows += [Text(note, style="yellow") for note in picture.notes[-4:]]
    return Panel(Group(*rows), title=picture.title, border_style="cyan")


def _beside(parts: Sequence[RenderableType]) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in parts:
        table.add_column(ratio=1)
    table.add_row(*parts)
    return table


def _summary(picture: Picture) -> str:
    parts = [_steps(picture)]
    if picture.examples_per_s is not None:
        parts.append(f"{picture.examples_per_s:,.0f} examples/s")
    elif picture.steps_per_s is not None:
        parts.append(f"{picture.steps_per_s:,.3g} steps/s")
    if picture.remaining_s:
        parts.append(f"{picture.remaining_s:.0f} s left")
    if picture.staleness_mean is not None:
        parts.append(
            f"staleness {picture.staleness_mean:.1f} updates (p99 {picture.staleness_p99 or 0:.0f})"
        )
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


def _workers(picture: Picture) -> Table:
    table = Table(title="workers", expand=True)
    for column in ("name", "state", "steps", "steps/s", "restarts"):
        table.add_column(column)
    detailed = any(row.time_use for row in picture.workers)
    if detailed:
        table.add_column("time")
    for row in picture.workers:
        cells: list[RenderableType] = [
            row.name,
            Text("straggler", style="bold red") if row.is_straggler else _state(row.state),
            f"{row.steps:,}",
            _rate(row.steps_per_s),
            str(row.restarts),
        ]
        table.add_row(*cells, *([Text(row.time_use)] if detailed else []))
    return table


def _servers(picture: Picture) -> Table:
    table = Table(title="parameter servers", expand=True)
    for column in ("name", "state", "memory", "updates", "per s", "busy", "refused"):
        table.add_column(column)
    for row in picture.servers:
        table.add_row(
            row.name,
            _state(row.state),
            _size(row.held_bytes),
            f"{row.updates:,}",
            _rate(row.updates_per_s),
            "–" if row.busy_share is None else f"{100 * row.busy_share:.0f} %",
            f"{row.refused:,}",
        )
    return table


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def _state(state: str) -> Text:
    return Text(state, style="green" if state in ("running", "idle", "checkpoint") else "bold red")
