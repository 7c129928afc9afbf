"""Plots and tables of a `ClusterView`, for the live page and the report.

Colours of texts and lines suit a light and a dark background; the background follows the reader's setting.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, final

from bokeh.core.validation import silence
from bokeh.core.validation.warnings import MISSING_RENDERERS
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.models import (
    Column,
    ColumnDataSource,
    DatetimeTickFormatter,
    Div,
    FactorRange,
    HoverTool,
    InlineStyleSheet,
    Legend,
    LegendItem,
    NumeralTickFormatter,
)
from bokeh.plotting import figure
from bokeh.resources import INLINE
from jinja2 import Environment

from stratagem._monitor import markup, view_tables
from stratagem._monitor.cluster_view import PHASES, ClusterView, ScalarView
from stratagem._monitor.markup import canvas_text

LINES: Final = 8  # workers or servers drawn in one plot; the tables have all of them
SCALARS: Final = 12
BARS: Final = 32
_POINTS: Final = 4000  # that a browser keeps; more than the history sends

# 4.5 : 1 on white and 4.1 : 1 on the dark background.
_GREY: Final = "#757575"
_COLOURS: Final = (
    "#3b82c4",
    "#d97f1e",
    "#2f9e6e",
    "#b069c4",
    "#cf4f4b",
    "#2b98a8",
    "#998f2a",
    "#8d6e63",
)
_PHASE_COLOURS: Final = dict(
    zip(
        PHASES,
        ("#9aa0a6", "#d97f1e", "#2b98a8", "#2f9e6e", "#3b82c4", "#b069c4", "#c9b458"),
        strict=True,
    )
)

TEMPLATE: Final = Environment(autoescape=True).from_string("""{% from macros import embed %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
{{ bokeh_css | safe if bokeh_css }}{{ bokeh_js | safe if bokeh_js }}
<style>
:root { --sg-back: #f4f5f7; --sg-card: #ffffff; --sg-text: #1d2125; --sg-faint: #666b72; --sg-line: #d5d8dc;
  --sg-good: #2f9e6e; --sg-bad: #c9372c; }
@media (prefers-color-scheme: dark) { :root { --sg-back: #08090a; --sg-card: #101214; --sg-text: #e3e5e8;
  --sg-faint: #9aa0a6; --sg-line: #33383d; --sg-good: #3fb27f; --sg-bad: #f0625a; } }
html, body { margin: 0; background: var(--sg-back); color: var(--sg-text); font: 14px/1.45 system-ui, sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 12px; }
h1 { font-size: 17px; margin: 0 0 10px; font-weight: 600; }
h2 { font-size: 13px; margin: 0 0 6px; font-weight: 600; color: var(--sg-faint); }
.grid { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.card { background: var(--sg-card); border: 1px solid var(--sg-line); border-radius: 8px; padding: 10px 12px;
  min-width: 0; overflow: hidden; }
.wide { grid-column: 1 / -1; }
</style>
</head>
<body><main>
<h1>{{ title }}</h1>
<div class="grid">
{% for name, heading, kind in cards %}
<section class="card {{ kind }}" id="{{ name }}">{% if heading %}<h2>{{ heading }}</h2>{% endif %}{{ embed(roots[name]) }}</section>
{% endfor %}
</div>
</main>
{{ plot_script | safe }}
</body>
</html>
""")

# Roots of the document: name, heading, class of the card.
CARDS: Final = (
    ("summary", "", "wide"),
    ("advice", "What to try", "wide"),
    ("steps", "Steps per second", ""),
    ("phases", "Where the workers' time goes", ""),
    ("scalars", "Logged values", ""),
    ("staleness", "Staleness (updates by others between read and write)", ""),
    ("busy", "Servers: busy share", ""),
    ("updates", "Servers: updates per second", ""),
    ("timeline", "Events", "wide"),
    ("events", "Latest events", "wide"),
    ("workers", "Workers", "wide"),
    ("servers", "Parameter servers", "wide"),
    ("tables", "Tables of rows", "wide"),
)


@final
class Page:
    """Models of one document, updated from views."""

    def __init__(self, view: ClusterView) -> None:
        silence(MISSING_RENDERERS)  # a cluster may have no servers, and a run nothing to draw yet
        self._source = ColumnDataSource({"time": []})
        self._generation = -1
        self._sent = 0
        self._plots = {"steps": _line_plot()}
        times = self._plots["steps"].x_range
        for name in ("staleness", "busy", "updates"):
            self._plots[name] = _line_plot(percent=name == "busy", x_range=times)
        self._bars = ColumnDataSource({"worker": [], **{phase: [] for phase in PHASES}})
        self._phases = self._phase_plot()
        self._events = ColumnDataSource({"time": [], "name": [], "text": [], "colour": []})
        self._timeline = _figure(y_range=FactorRange(), x_axis_type="datetime", x_range=times)
        self._timeline.scatter(
            "time", "name", source=self._events, size=11, color="colour", marker="diamond"
        )
        self._timeline.add_tools(HoverTool(tooltips=[("", "@text")]))
        self._scalars = _Scalars()
        self._texts = {
            name: _div() for name in ("summary", "advice", "events", "workers", "servers", "tables")
        }
        self.update(view)

    @property
    def roots(self) -> list[Any]:
        """Models to add to a document, in the order of the cards."""
        phases = [_div(markup.legend(_PHASE_COLOURS)), self._phases]
        models = {
            **self._texts,
            **self._plots,
            "phases": Column(children=phases, sizing_mode="stretch_width"),
            "timeline": self._timeline,
            "scalars": self._scalars.layout,
        }
        found = []
        for name, _, _ in CARDS:
            models[name].name = name
            found.append(models[name])
        return found

    def update(self, view: ClusterView) -> None:
        """Show a view; only changes are sent to the browser."""
        self._draw_lines(view)
        self._stream(view)
        workers = view.workers[:BARS]
        names = [canvas_text(one.name) + (" ⚠" if one.is_straggler else "") for one in workers]
        self._bars.data = {
            "worker": names,
            **{phase: [one.phases.get(phase, 0.0) for one in workers] for phase in PHASES},
        }
        if list(self._phases.y_range.factors) != names[::-1]:
            self._phases.y_range.factors = names[::-1]
        self._show_events(view)
        self._scalars.update(view.scalars)
        texts = {
            "summary": markup.summary(view),
            "advice": markup.advice_list(view),
            "events": markup.event_list(view.events),
            "workers": markup.table(view_tables.worker_rows(view), without=("time",)),
            "servers": markup.table(view_tables.server_rows(view)),
            "tables": markup.table(view_tables.table_rows(view)),
        }
        for name, shown in texts.items():
            if self._texts[name].text != shown:
                self._texts[name].text = shown

    def _stream(self, view: ClusterView) -> None:
        """Send the new points, or everything if the columns or earlier points have changed."""
        series = view.series
        count = len(series.times)
        is_new = series.generation != self._generation or count < self._sent
        is_new = is_new or {"time", *series.columns} != set(self._source.data)
        new = slice(0 if is_new else self._sent, count)
        data = {name: list(values[new]) for name, values in series.columns.items()}
        data["time"] = _milliseconds(series.times[new])
        if is_new:
            self._source.data = data
        elif data["time"]:
            self._source.stream(data, rollover=_POINTS)
        self._generation, self._sent = series.generation, count

    def _draw_lines(self, view: ClusterView) -> None:
        """Add lines for curves that are new."""
        for name in view.series.columns:
            if name not in self._source.data:
                self._source.data[name] = [math.nan] * len(self._source.data["time"])
        servers = [one.name for one in view.servers[:LINES]]
        self._lines("steps", ["total", *(one.name for one in view.workers[:LINES])])
        self._lines("staleness", ["mean", "p99"])
        self._lines("busy", servers)
        self._lines("updates", servers)

    def _lines(self, group: str, names: Sequence[str]) -> None:
        plot = self._plots[group]
        drawn = {renderer.name for renderer in plot.renderers}
        for name in names:
            column = f"{group}/{name}"
            if column in drawn or column not in self._source.data:
                continue
            colour = _COLOURS[len(drawn) % len(_COLOURS)]
            width = 2.5 if name == "total" else 1.5
            line = plot.line(
                "time", column, source=self._source, color=colour, line_width=width, name=column
            )
            item = LegendItem(label={"value": canvas_text(name)}, renderers=[line])
            plot.legend[0].items.append(item)
            drawn.add(column)

    def _phase_plot(self) -> Any:
        plot = _figure(y_range=FactorRange(), x_range=(0, 1))
        plot.hbar_stack(
            list(PHASES),
            y="worker",
            height=0.7,
            source=self._bars,
            color=[_PHASE_COLOURS[phase] for phase in PHASES],
        )
        plot.add_tools(
            HoverTool(tooltips=[("worker", "@worker"), ("use", "$name"), ("share", "@$name{0 %}")])
        )
        plot.xaxis.formatter = NumeralTickFormatter(format="0 %")
        return plot

    def _show_events(self, view: ClusterView) -> None:
        if len(self._events.data["time"]) == len(view.events):
            return
        names = [canvas_text(event.name.replace("_", " "))[:40] for event in view.events]
        known = list(dict.fromkeys(names))[-10:]
        self._timeline.y_range.factors = known
        self._events.data = {
            "time": _milliseconds(event.time_s for event in view.events),
            "name": names,
            "text": [canvas_text(view_tables.event_text(event)) for event in view.events],
            "colour": [
                _COLOURS[known.index(n) % len(_COLOURS)] if n in known else _GREY for n in names
            ],
        }


@final
class _Scalars:
    """One plot for each logged name."""

    def __init__(self) -> None:
        self._hint = _div(markup.quiet("Log values with sg.metrics.log(name, value)."))
        self.layout = Column(children=[self._hint], sizing_mode="stretch_width")
        self._sources: dict[str, ColumnDataSource] = {}

    def update(self, scalars: Sequence[ScalarView]) -> None:
        for scalar in scalars[:SCALARS]:
            data = {
                "time": _milliseconds(time_s for time_s, _ in scalar.points),
                "value": [value for _, value in scalar.points],
            }
            source = self._sources.get(scalar.name)
            if source is None:
                self._add(scalar.name, data)
            elif len(source.data["time"]) + 1 == len(data["time"]):
                source.stream({name: values[-1:] for name, values in data.items()})
            elif len(source.data["time"]) != len(data["time"]):
                source.data = data

    def _add(self, name: str, data: dict[str, list[float]]) -> None:
        source = self._sources[name] = ColumnDataSource(data)
        plot = _figure(x_axis_type="datetime", height=180, title=canvas_text(name))
        plot.title.text_color = _GREY
        plot.line("time", "value", source=source, color=_COLOURS[0], line_width=2)
        plot.scatter("time", "value", source=source, color=_COLOURS[0], size=4)
        plots = [one for one in self.layout.children if one is not self._hint]
        self.layout.children = [*plots, plot]


def _div(text: str = "") -> Any:
    style = InlineStyleSheet(css=markup.STYLE)
    return Div(text=text, sizing_mode="stretch_width", stylesheets=[style])


def _line_plot(*, percent: bool = False, **more: Any) -> Any:
    """Return an empty plot of lines over time, with a legend above."""
    plot = _figure(x_axis_type="datetime", **more)
    legend = Legend(
        items=[],
        orientation="horizontal",
        background_fill_alpha=0.0,
        border_line_alpha=0.0,
        label_text_color=_GREY,
        label_text_font_size="12px",
        spacing=8,
        padding=0,
        ncols=3,
    )
    plot.add_layout(legend, "above")
    plot.y_range.start = 0
    plot.add_tools(HoverTool(tooltips=[("", "$name"), ("", "$y{0.[00]}")], mode="mouse"))
    plot.yaxis.formatter = NumeralTickFormatter(format="0 %" if percent else "0.[000] a")
    return plot


def _figure(*, height: int = 240, **more: Any) -> Any:
    """Return an empty plot in the style of the page."""
    plot = figure(
        height=height, sizing_mode="stretch_width", toolbar_location=None, tools="", **more
    )
    plot.background_fill_alpha = plot.border_fill_alpha = 0.0
    plot.outline_line_color = None
    plot.grid.grid_line_color = _GREY
    plot.grid.grid_line_alpha = 0.25
    for axis in plot.axis:
        axis.axis_line_color = axis.major_tick_line_color = _GREY
        axis.minor_tick_line_color = None
        axis.major_label_text_color = _GREY
    if more.get("x_axis_type") == "datetime":
        seconds = dict.fromkeys(("milliseconds", "seconds", "minsec"), "%H:%M:%S")
        minutes = dict.fromkeys(("minutes", "hourmin", "hours"), "%H:%M")
        plot.xaxis.formatter = DatetimeTickFormatter(**seconds, **minutes)
    return plot


def _milliseconds(times: Iterable[float]) -> list[float]:
    """Return times as Bokeh draws them: milliseconds since 1970, in local time like the event list."""
    return [1000.0 * (one + time.localtime(one).tm_gmtoff) for one in times]


def write_report(view: ClusterView, path: str | os.PathLike[str], *, title: str) -> Path:
    """Write the page of a view to a file, with everything that a browser needs; return the path."""
    document = Document(title=title)
    for root in Page(view).roots:
        document.add_root(root)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = file_html(
        document, INLINE, title, template=TEMPLATE, template_variables={"cards": CARDS}
    )
    target.write_text(text, encoding="utf-8")
    return target
