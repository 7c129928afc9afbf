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
    DataRange1d,
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

from stratagem._monitor import markup
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
        self._steps = _plot(hover=True)
        self._staleness = _plot(hover=True, times=self._steps.x_range)
        self._busy = _plot(hover=True, percent=True, times=self._steps.x_range)
        self._updates = _plot(hover=True, times=self._steps.x_range)
        self._bars = ColumnDataSource({"worker": [], **{phase: [] for phase in PHASES}})
        self._phases = self._phase_plot()
        self._events = ColumnDataSource({"time": [], "name": [], "text": [], "colour": []})
        self._timeline = self._event_plot()
        self._scalars = _Scalars()
        self._texts = {
            name: Div(
                text="",
                sizing_mode="stretch_width",
                stylesheets=[InlineStyleSheet(css=markup.STYLE)],
            )
            for name in ("summary", "advice", "events", "workers", "servers", "tables")
        }
        self.update(view)

    @property
    def roots(self) -> list[Any]:
        """Models to add to a document, in the order of the cards."""
        plots = {
            "steps": self._steps,
            "phases": Column(
                children=[self._phase_legend(), self._phases], sizing_mode="stretch_width"
            ),
            "staleness": self._staleness,
            "busy": self._busy,
            "updates": self._updates,
            "timeline": self._timeline,
            "scalars": self._scalars.layout,
        }
        found = []
        for name, _, _ in CARDS:
            model = self._texts.get(name) or plots[name]
            model.name = name
            found.append(model)
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
            "workers": markup.worker_table(view.workers),
            "servers": markup.server_table(view.servers),
            "tables": markup.table_table(view),
        }
        for name, shown in texts.items():
            if self._texts[name].text != shown:
                self._texts[name].text = shown

    def _stream(self, view: ClusterView) -> None:
        """Send the new points, or everything if the columns or earlier points have changed."""
        series = view.series
        columns = {name: list(values) for name, values in series.columns.items()}
        known = set(self._source.data) - {"time"}
        count = len(series.times)
        if series.generation != self._generation or set(columns) != known or count < self._sent:
            self._source.data = {"time": _milliseconds(series.times), **columns}
        elif count > self._sent:
            new = slice(self._sent, count)
            self._source.stream(
                {
                    "time": _milliseconds(series.times[new]),
                    **{name: values[new] for name, values in columns.items()},
                },
                rollover=_POINTS,
            )
        self._generation, self._sent = series.generation, count

    def _draw_lines(self, view: ClusterView) -> None:
        """Add lines for curves that are new."""
        for name in view.series.columns:
            if name not in self._source.data:
                self._source.data[name] = [math.nan] * len(self._source.data["time"])
        self._lines(self._steps, "steps", ["total", *(one.name for one in view.workers[:LINES])])
        self._lines(self._staleness, "staleness", ["mean", "p99"])
        names = [one.name for one in view.servers[:LINES]]
        self._lines(self._busy, "busy", names)
        self._lines(self._updates, "updates", names)

    def _lines(self, plot: Any, group: str, names: Sequence[str]) -> None:
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
            plot.legend[0].items.append(_legend_item(canvas_text(name), line))
            drawn.add(column)

    def _phase_plot(self) -> Any:
        plot = figure(
            height=240,
            sizing_mode="stretch_width",
            y_range=FactorRange(),
            x_range=(0, 1),
            toolbar_location=None,
            tools="",
        )
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
        _style(plot)
        return plot

    @staticmethod
    def _phase_legend() -> Any:
        return Div(
            text=markup.legend(_PHASE_COLOURS),
            sizing_mode="stretch_width",
            stylesheets=[InlineStyleSheet(css=markup.STYLE)],
        )

    def _event_plot(self) -> Any:
        plot = figure(
            height=240,
            sizing_mode="stretch_width",
            x_axis_type="datetime",
            x_range=self._steps.x_range,
            y_range=FactorRange(),
            toolbar_location=None,
            tools="",
        )
        plot.scatter("time", "name", source=self._events, size=11, color="colour", marker="diamond")
        plot.add_tools(HoverTool(tooltips=[("", "@text")]))
        _style(plot)
        plot.xaxis.formatter = _time_formatter()
        return plot

    def _show_events(self, view: ClusterView) -> None:
        if len(self._events.data["time"]) == len(view.events):
            return
        names = [canvas_text(event.name.replace("_", " "))[:40] for event in view.events]
        known = list(dict.fromkeys(names))[-10:]
        shown = [(name, event) for name, event in zip(names, view.events, strict=True)]
        self._timeline.y_range.factors = known
        self._events.data = {
            "time": _milliseconds(event.time_s for _, event in shown),
            "name": [name for name, _ in shown],
            "text": [canvas_text(markup.event_text(event)) for _, event in shown],
            "colour": [
                _COLOURS[known.index(n) % len(_COLOURS)] if n in known else _GREY for n in names
            ],
        }


@final
class _Scalars:
    """One plot for each logged name."""

    def __init__(self) -> None:
        self._hint = Div(
            text='<div class="quiet">Log values with sg.metrics.log(name, value).</div>',
            stylesheets=[InlineStyleSheet(css=markup.STYLE)],
        )
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
        plot = _plot(hover=False)
        plot.title = canvas_text(name)
        plot.title.text_color = _GREY
        plot.height = 180
        plot.line("time", "value", source=source, color=_COLOURS[0], line_width=2)
        plot.scatter("time", "value", source=source, color=_COLOURS[0], size=4)
        plot.legend.visible = False
        plots = [one for one in self.layout.children if one is not self._hint]
        self.layout.children = [*plots, plot]


def _plot(*, hover: bool, percent: bool = False, times: Any = None) -> Any:
    """Return an empty plot over time, with a legend above; `times`: the range of another plot."""
    plot = figure(
        x_range=DataRange1d() if times is None else times,
        height=240,
        sizing_mode="stretch_width",
        x_axis_type="datetime",
        toolbar_location=None,
        tools="",
    )
    plot.add_layout(_legend(), "above")
    if hover:
        plot.y_range.start = 0
        plot.add_tools(HoverTool(tooltips=[("", "$name"), ("", "$y{0.[00]}")], mode="mouse"))
    plot.xaxis.formatter = _time_formatter()
    plot.yaxis.formatter = NumeralTickFormatter(format="0 %" if percent else "0.[000] a")
    _style(plot)
    return plot


def _legend() -> Any:
    return Legend(
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


def _legend_item(label: str, renderer: Any) -> Any:
    return LegendItem(label={"value": label}, renderers=[renderer])


def _style(plot: Any) -> None:
    plot.background_fill_alpha = plot.border_fill_alpha = 0.0
    plot.outline_line_color = None
    plot.grid.grid_line_color = _GREY
    plot.grid.grid_line_alpha = 0.25
    for axis in plot.axis:
        axis.axis_line_color = axis.major_tick_line_color = _GREY
        axis.minor_tick_line_color = None
        axis.major_label_text_color = _GREY


def _time_formatter() -> Any:
    return DatetimeTickFormatter(
        milliseconds="%H:%M:%S",
        seconds="%H:%M:%S",
        minsec="%H:%M:%S",
        minutes="%H:%M",
        hourmin="%H:%M",
        hours="%H:%M",
    )


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
