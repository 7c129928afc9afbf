"""A live picture of a training cluster, for terminals that can draw and for logs that cannot.

`Picture` is plain data: whoever trains fills one in and hands it to a `View`. `stratagem top` and the
demonstration both look through this window.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TextIO, final

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = ["LinesView", "LiveView", "Picture", "ServerRow", "View", "WorkerRow", "open_view"]

_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """One worker as the coordinator sees it."""

    name: str
    state: str
    steps: int
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerRow:
    """One parameter server as it reports itself."""

    name: str
    state: str
    held_bytes: int
    updates: int


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Everything the window shows at one moment."""

    title: str
    done_steps: int
    total_steps: int
    elapsed_s: float
    examples_per_s: float | None
    """None where it is not known, as when watching somebody else's cluster."""

    losses: Sequence[float] = ()
    workers: Sequence[WorkerRow] = ()
    servers: Sequence[ServerRow] = ()
    staleness_mean: float | None = None
    staleness_max: float | None = None
    notes: Sequence[str] = field(default=())

    @property
    def remaining_s(self) -> float | None:
        """Seconds to go at the present pace; None before the first step."""
        if self.done_steps == 0 or self.total_steps == 0:
            return None
        return self.elapsed_s * (self.total_steps - self.done_steps) / self.done_steps


class View(Protocol):
    """Where pictures are shown; a context manager so that the terminal is always given back."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def show(self, picture: Picture) -> None:
        """Replace what is shown."""

    def say(self, line: str) -> None:
        """One line that stays."""


def open_view(*, stream: TextIO | None = None, plain: bool = False) -> View:
    """A drawing view on a terminal, plain lines anywhere else (pipes, CI, no colours)."""
    console = Console(file=stream or sys.stdout)
    if plain or not console.is_terminal or console.no_color or console.is_dumb_terminal:
        return LinesView(stream or sys.stdout)
    return LiveView(console)


@final
class LiveView:
    """Draws the picture in place, a few times a second.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> with LiveView(Console(file=io.StringIO(), force_terminal=True)) as view:
        ...     view.show(
        ...         Picture(
        ...             title="t", done_steps=1, total_steps=2, elapsed_s=1.0, examples_per_s=8.0
        ...         )
        ...     )
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, picture: Picture) -> None:
        """Redraw."""
        self._live.update(draw(picture))

    def say(self, line: str) -> None:
        """Print a line above the picture."""
        self._console.print(line, markup=False)


@final
class LinesView:
    """One line every few seconds, for logs.

    Example:
        >>> import sys
        >>> with LinesView(sys.stdout) as view:
        ...     view.show(
        ...         Picture(
        ...             title="t", done_steps=1, total_steps=2, elapsed_s=1.0, examples_per_s=8.0
        ...         )
        ...     )
        step 1/2 (50%), 8 examples/s, 1 s to go
    """

    # Often enough to see it live, seldom enough for a CI log.
    _EVERY_S = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = float("-inf")
        self._said_the_end = False

    def __enter__(self) -> LinesView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.flush()

    def show(self, picture: Picture) -> None:
        """Print one line if the last one is old enough, or the work is done."""
        now = time.monotonic()
        finished = picture.done_steps >= picture.total_steps > 0 and not self._said_the_end
        if now - self._last < self._EVERY_S and not finished:
            return
        self._last = now
        self._said_the_end = finished
        self.say(one_line(picture))

    def say(self, line: str) -> None:
        """Print one line at once."""
        print(line, file=self._stream, flush=True)


def one_line(picture: Picture) -> str:
    """The picture as a sentence for a log."""
    parts = [_steps(picture)]
    if picture.examples_per_s is not None:
        parts.append(f"{picture.examples_per_s:,.0f} examples/s")
    if picture.losses:
        parts.append(f"loss {picture.losses[-1]:.4f}")
    if picture.staleness_mean is not None:
        parts.append(f"staleness {picture.staleness_mean:.1f}")
    parts += [f"{row.name} {row.state} {row.steps} steps" for row in picture.workers]
    parts += [
        f"{row.name} {row.state} {row.held_bytes / 1e3:,.0f} kB {row.updates} updates"
        for row in picture.servers
    ]
    if picture.remaining_s is not None:
        parts.append(f"{picture.remaining_s:.0f} s to go")
    return ", ".join(parts)


def _steps(picture: Picture) -> str:
    if picture.total_steps == 0:  # nobody knows where it ends
        return f"{picture.done_steps} steps"
    share = 100 * picture.done_steps / picture.total_steps
    return f"step {picture.done_steps}/{picture.total_steps} ({share:.0f}%)"


def draw(picture: Picture) -> Panel:
    """The picture as a panel."""
    rows = [] if picture.total_steps == 0 else [_progress(picture)]
    if picture.losses:
        rows.append(Group(Text(f"loss {picture.losses[-1]:.4f}"), _curve(picture.losses)))
    tables = Table.grid(expand=True)
    tables.add_row(_workers(picture), _servers(picture))
    rows.append(Group(tables))
    rows += [Group(Text(note, style="yellow")) for note in picture.notes[-4:]]
    return Panel(Group(*rows), title=picture.title, border_style="cyan")


def _progress(picture: Picture) -> Group:
    remaining = picture.remaining_s
    staleness = (
        ""
        if picture.staleness_mean is None
        else f"   staleness {picture.staleness_mean:.1f} (max {picture.staleness_max or 0:.0f})"
    )
    text = Text(
        f"step {picture.done_steps:,} of {picture.total_steps:,}   "
        f"{picture.examples_per_s or 0:,.0f} examples/s   "
        f"{'' if remaining is None else f'{remaining:.0f} s to go'}{staleness}"
    )
    bar = ProgressBar(total=max(picture.total_steps, 1), completed=picture.done_steps)
    return Group(text, bar)


def _curve(values: Sequence[float], *, width: int = 72) -> Text:
    """The curve as one line of blocks, averaged into `width` buckets."""
    count = len(values)
    buckets = [
        values[i * count // width : max((i + 1) * count // width, i * count // width + 1)]
        for i in range(min(width, count))
    ]
    means = [sum(bucket) / len(bucket) for bucket in buckets if bucket]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    blocks = (_BLOCKS[int((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)
    return Text("".join(blocks), style="green")


def _workers(picture: Picture) -> Table:
    table = Table(title="workers", expand=True)
    for column in ("name", "state", "steps", "restarts"):
        table.add_column(column)
    for row in picture.workers:
        style = "green" if row.state == "running" else "bold red"
        table.add_row(row.name, Text(row.state, style=style), f"{row.steps:,}", str(row.restarts))
    return table


def _servers(picture: Picture) -> Table:
    table = Table(title="parameter servers", expand=True)
    for column in ("name", "state", "holds", "updates"):
        table.add_column(column)
    for row in picture.servers:
        style = "green" if row.state == "running" else "bold red"
        table.add_row(
            row.name,
            Text(row.state, style=style),
            f"{row.held_bytes / 1e3:,.0f} kB",
            f"{row.updates:,}",
        )
    return table
