"""HTML of the page's tables and texts; escapes every value."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stratagem._monitor.advice import Advice, advise, bottleneck
from stratagem._monitor.cluster_view import ClusterView, ServerView, WorkerView
from stratagem._snapshots import Event

EVENTS_SHOWN: Final = 50
ROWS_SHOWN: Final = 100

STYLE: Final = """
:host { color: var(--sg-text); font: 14px/1.45 system-ui, sans-serif; width: 100%; }
.bk-clearfix { width: 100%; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
th, td { text-align: right; padding: 3px 10px 3px 0; white-space: nowrap; }
th { font-weight: 500; color: var(--sg-faint); border-bottom: 1px solid var(--sg-line); }
th:first-child, td:first-child { text-align: left; }
ul { list-style: none; margin: 0; padding: 0; }
li { padding: 3px 0; overflow-wrap: anywhere; }
time { color: var(--sg-faint); margin-right: .7em; font-variant-numeric: tabular-nums; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile { border-left: 4px solid var(--sg-line); padding: 2px 0 2px 10px; min-width: 0; }
.tile b { display: block; font-size: 22px; line-height: 1.25; overflow-wrap: anywhere; font-weight: 600; }
.tile.long b { font-size: 16px; }
.tile span { color: var(--sg-faint); }
.good { border-color: var(--sg-good); }
.bad { border-color: var(--sg-bad); }
.badge { color: var(--sg-bad); font-weight: 600; }
.list { max-height: 260px; overflow-y: auto; }
.legend span { display: inline-block; margin-right: 14px; white-space: nowrap; color: var(--sg-faint); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
.quiet { color: var(--sg-faint); }
"""


def text(value: object) -> str:
    """Return a value as HTML that shows it literally.

    Example:
        >>> text("<script>")
        '&lt;script&gt;'
    """
    return html.escape(str(value), quote=True)


def canvas_text(value: object) -> str:
    """Return a text for a plot, whose library would typeset dollar signs and backslashes as formulas.

    Example:
        >>> "$$" in canvas_text("$$x$$")
        False
    """
    for mark in ("$$", "\\(", "\\["):
        value = str(value).replace(mark, mark[0] + "\u200b" + mark[1])
    return str(value)


def summary(view: ClusterView) -> str:
    """Return the head of the page: is the cluster healthy, how fast is it, and what limits it."""
    well = not view.lost
    rate = "–" if view.steps_per_s is None else _number(view.steps_per_s)
    stale = "–" if view.staleness_mean is None else f"{view.staleness_mean:.1f}"
    p99 = "" if view.staleness_p99 is None else f", p99 {view.staleness_p99:.0f}"
    tiles = [
        _tile(view.health, "state", "good" if well else "bad"),
        _tile(rate, f"steps/s, {view.steps:,} in total"),
        _tile(stale, f"staleness{p99}"),
        _tile(bottleneck(view), "bottleneck", "long"),
    ]
    if view.events:
        last = view.events[-1]
        ago = max(0, round(view.time_s - last.time_s))
        tiles.append(_tile(last.name.replace("_", " "), f"latest event, {ago} s ago", "long"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def legend(colours: Mapping[str, str]) -> str:
    """Return names with the colours that stand for them in a plot."""
    items = [
        f'<span><i style="background:{text(colour)}"></i>{text(name)}</span>'
        for name, colour in colours.items()
    ]
    return f'<div class="legend">{"".join(items)}</div>'


def advice_list(view: ClusterView) -> str:
    """Return what to try."""
    found: Sequence[Advice] = advise(view)
    if not found:
        return '<div class="quiet">Nothing stands out.</div>'
    return "<ul>" + "".join(f"<li>{text(one)}</li>" for one in found) + "</ul>"


def worker_table(workers: Sequence[WorkerView]) -> str:
    """Return the workers as a table; stragglers are marked."""
    rows = [
        [
            text(worker.name),
            _state(worker.state, "straggler" if worker.is_straggler else ""),
            text(f"{worker.steps:,}"),
            text("–" if worker.steps_per_s is None else _number(worker.steps_per_s)),
            text(_share(worker.cpu_share)),
            text(_size(worker.memory_bytes)),
            text(worker.restarts),
        ]
        for worker in workers[:ROWS_SHOWN]
    ]
    return _table(("worker", "state", "steps", "steps/s", "CPU", "memory", "restarts"), rows)


def server_table(servers: Sequence[ServerView]) -> str:
    """Return the parameter servers as a table."""
    rows = [
        [
            text(server.name),
            _state(server.state, "checkpoint" if server.is_checkpointing else "", good=True),
            text(_size(server.variable_bytes)),
            text(f"{server.updates:,}"),
            text("–" if server.updates_per_s is None else _number(server.updates_per_s)),
            text(_share(server.busy_share)),
            text(server.duplicates),
            text(server.fenced),
            text(_share(server.cpu_share)),
            text(_size(server.memory_bytes)),
            text(server.restarts),
        ]
        for server in servers[:ROWS_SHOWN]
    ]
    heads = ("server", "state", "variables", "updates", "updates/s", "busy", "duplicates")
    return _table((*heads, "fenced", "CPU", "memory", "restarts"), rows)


def table_table(view: ClusterView) -> str:
    """Return the tables of rows, the one with the most reads first."""
    rows = [
        [
            text(table.name),
            text(_number(table.rows_per_s)),
            text(f"{table.rows:,}"),
            text(f"{table.ids:,}"),
            text(_share(table.distinct_share)),
        ]
        for table in view.tables[:ROWS_SHOWN]
    ]
    if not rows:
        return '<div class="quiet">No table has been read.</div>'
    return _table(("table", "rows/s", "rows read", "ids asked", "distinct"), rows)


def event_list(events: Sequence[Event]) -> str:
    """Return the latest events, the newest first."""
    if not events:
        return '<div class="quiet">Nothing has happened.</div>'
    items = [
        f"<li><time>{text(_clock(event.time_s))}</time>{text(event_text(event))}</li>"
        for event in reversed(events[-EVENTS_SHOWN:])
    ]
    return f'<ul class="list">{"".join(items)}</ul>'


def event_text(event: Event) -> str:
    """Return an event as one line."""
    facts = ", ".join(f"{name}={value}" for name, value in event.facts.items())
    source = f"{event.source}: " if event.source else ""
    name = event.name.replace("_", " ")
    return f"{source}{name} ({facts})" if facts else f"{source}{name}"


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _tile(value: object, label: str, kind: str = "") -> str:
    return f'<div class="tile {kind}"><b>{text(value)}</b><span>{text(label)}</span></div>'


def _state(state: str, note: str, *, good: bool = False) -> str:
    alive = state in ("running", "idle")
    shown = text(state) if alive else f'<span class="badge">{text(state)}</span>'
    if not note:
        return shown
    return f"{shown}, {text(note)}" if good else f'{shown} <span class="badge">{text(note)}</span>'


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{text(one)}</th>" for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


_UNITS: Mapping[str, float] = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def _size(value: int | None) -> str:
    if value is None:
        return "–"
    for unit, scale in _UNITS.items():
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value} B"
