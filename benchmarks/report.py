"""Output of results: a table on the terminal, a JSON file, and Markdown tables. ``pages.py`` puts them into pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import Line, Measurement, Results, lines
from benchmarks.row import Row

_HEAD = (
    "work",
    "TF 2.21",
    "limit",
    "bound",
    "bare program",
    "Stratagem",
    "× TF",
    "of limit",
    "of bare",
    "target",
)
_VERDICTS = {"reached": "✓", "missed": "missed", "missing": "not measured"}


def number(value: float) -> str:
    """Format with about three significant figures and thousands separators."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def cell(measurement: Measurement | None) -> str:
    """Return median and spread of one side as text; *missing* if it gave no number."""
    if measurement is None:
        return "–"
    middle, spread = measurement.median, measurement.spread
    if middle is None:
        return "missing"
    return number(middle) if spread is None else f"{number(middle)} ±{spread:.0%}"


def cells(line: Line) -> tuple[str, ...]:
    """Return one line of the table as texts."""
    title = line.row.title + (f": {line.point}" if line.point else "") + f" ({line.row.unit})"
    peers = [
        cell(peer) + (f" {peer.label.removeprefix('TF, ')}" if len(line.peers) > 1 else "")
        for peer in line.peers
    ]
    targets = [f"{one} {_VERDICTS[line.verdict(one)]}" for one in line.row.targets]
    return (
        title,
        ", ".join(peers) or "–",
        cell(line.limit),
        cell(line.bound)
        + ("" if line.highest_ratio is None else f" = {line.highest_ratio:.1f} × TF"),
        cell(line.bare),
        cell(line.ours),
        "–" if line.ratio is None else f"{line.ratio:.1f}",
        "–" if line.fraction is None else f"{line.fraction:.2f}",
        "–" if line.of_bare is None else f"{line.of_bare:.2f}",
        ", ".join(targets),
    )


def show(console: Console, rows: Sequence[Row], results: Results) -> None:
    """Print the table, reasons for missing sides, the checks, and processor time."""
    table = Table(
        title="Stratagem, TensorFlow and the limit, measured in turns: median ± half range"
    )
    for index, name in enumerate(_HEAD):
        table.add_column(name, justify="left" if index == 0 else "right")
    for line in lines(rows, results):
        table.add_row(*cells(line))
    console.print(table)
    for measurement in results.measurements:
        if measurement.missing is not None:
            where = f"{measurement.row} {measurement.point}".strip()
            console.print(
                f"missing: {where}, {measurement.label}: {measurement.missing}", markup=False
            )
    for check in results.checks:
        mark = "same work" if check.passed else "NOT THE SAME WORK"
        console.print(f"{mark}: {check.row}: {check.text}", markup=False)
    _show_processor(console, results)


def _show_processor(console: Console, results: Results) -> None:
    body = processor(results.measurements)
    if body:
        table = Table(title="Processor milliseconds and bytes sent over TCP, per step")
        for name in PROCESSOR_HEAD:
            table.add_column(name)
        for line in body:
            table.add_row(*line)
        console.print(table)


PROCESSOR_HEAD = (
    "row",
    "side",
    "coordinator (ms)",
    "workers (ms)",
    "servers (ms)",
    "all (ms)",
    "bytes sent",
)
_ROLES = ("main", "worker", "ps")


def processor(measurements: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """Return lines with processor time by role and bytes per step, for every side with several processes."""
    body = []
    for one in measurements:
        used = one.processor_ms_by_role()
        if len(one.processor_ms()) < 2:
            continue
        sent = one.wire_bytes
        cells = [number(used[role]) if role in used else "–" for role in _ROLES]
        body.append(
            (
                f"{one.row} {one.point}".strip(),
                one.label,
                *cells,
                number(sum(used.values())),
                "–" if sent is None else number(sent),
            )
        )
    return body


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table in Markdown without the columns that have no figure; the first ``left`` columns are text."""
    used = [
        place
        for place in range(len(head))
        if place < left or any(line[place] not in ("", "–") for line in body)
    ]
    rules = ["---" if place < left else "--:" for place in used]
    lines = [[head[place] for place in used], rules]
    lines += [[line[place] for place in used] for line in body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(rows: Sequence[Row], results: Results, *, without: Sequence[str] = ()) -> str:
    """Return the table of some rows, ``without`` the columns of these names."""
    places = [place for place, name in enumerate(_HEAD) if name not in without]
    body = [cells(line) for line in lines(rows, results)]
    head = [_HEAD[place] for place in places]
    return markdown_table(head, [[line[place] for place in places] for line in body])


def sections(rows: Sequence[Row], results: Results) -> str:
    """Return a table for each section of the rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if results.of(row.name):
            found.setdefault(row.section, []).append(row)
    return "\n\n".join(
        f"### {section}\n\n{markdown(part, results)}" for section, part in found.items()
    )


def when(results: Results) -> str:
    """Return the sentence about date and machine of a run."""
    return when_on(results.machine, results.began[:10])


def when_on(machine: dict[str, Any], date: str) -> str:
    """Return the sentence about date and machine of a measurement."""
    return (
        f"Measured {date} on {machine['cores']} cores ({machine['processor']}), load average before the run "
        f"{machine.get('load_before', 0.0):.1f}."
    )


def include(page: Path, table: str, name: str) -> bool:
    """Put a table between the markers of this name in a page; False if the page has none."""
    if not page.exists():
        return False
    text = page.read_text()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in text or end not in text:
        return False
    head, _, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    page.write_text(f"{head}{begin}\n{table}\n{end}{tail}")
    return True


def path_of(
    folder: Path, results: Results, *, part: bool, every: bool = False, unfinished: bool = False
) -> Path:
    """Return the file of a run's results.

    ``<date>-<machine>.json`` is a run of the whole table, ``<date>-<machine>-all.json`` (``every``) a run of all rows; a later one of the
    same day replaces it. A partial run (some rows, tiny sizes, no peer) has its time of day in its name and replaces nothing. A
    complete run in progress is ``…-unfinished.json``.
    """
    name = f"{results.began[:10]}-{results.machine['name']}"
    if every and not part:
        name += "-all"
    if part:
        name += f"-part-{results.began[11:19].replace(':', '')}"
    elif unfinished:
        name += "-unfinished"
    return folder / f"{name}.json"


def save(path: Path, results: Results) -> None:
    """Write the results atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(results.to_json(), indent=1, ensure_ascii=False) + "\n")
    beside.replace(path)


def load(path: Path) -> Results:
    """Read results written by `save`."""
    return Results.from_json(json.loads(path.read_text()))
