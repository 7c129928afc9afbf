"""HTML of the page's tables and texts; escapes every value."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from typing import Final

from stratagem._monitor.advice import advise, bottleneck
from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.view_tables import GOOD_STATES, Rows, event_text, number
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
    stale = "–" if view.staleness_mean is None else f"{view.staleness_mean:.1f}"
    p99 = "" if view.staleness_p99 is None else f", p99 {view.staleness_p99:.0f}"
    tiles = [
        _tile(view.health, "state", "bad" if view.lost else "good"),
        _tile(number(view.steps_per_s), f"steps/s, {view.steps:,} in total"),
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
    found = "".join(f"<li>{text(one)}</li>" for one in advise(view))
    return f"<ul>{found}</ul>" if found else quiet("Nothing stands out.")


def table(rows: Rows, without: Sequence[str] = ()) -> str:
    """Return a table; states that need attention are marked."""
    if not rows:
        return quiet("None so far.")
    heads = [head for head in rows[0] if head not in without]
    head = "".join(f"<th>{text(one)}</th>" for one in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(one, row[one])}</td>" for one in heads) + "</tr>"
        for row in rows[:ROWS_SHOWN]
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def event_list(events: Sequence[Event]) -> str:
    """Return the latest events, the newest first."""
    if not events:
        return quiet("Nothing has happened.")
    items = [
        f"<li><time>{time.strftime('%H:%M:%S', time.localtime(event.time_s))}</time>{text(event_text(event))}</li>"
        for event in reversed(events[-EVENTS_SHOWN:])
    ]
    return f'<ul class="list">{"".join(items)}</ul>'


def quiet(words: str) -> str:
    """Return a remark in place of contents."""
    return f'<div class="quiet">{text(words)}</div>'


def _tile(value: object, label: str, kind: str = "") -> str:
    return f'<div class="tile {kind}"><b>{text(value)}</b><span>{text(label)}</span></div>'


def _cell(head: str, value: str) -> str:
    is_bad = head == "state" and value not in GOOD_STATES
    return f'<span class="badge">{text(value)}</span>' if is_bad else text(value)
