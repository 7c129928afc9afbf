"""Output of results: a table on the terminal, a JSON file, and the Markdown table of README."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.results import Line, Measurement, Results, lines
from benchmarks.row import Row

BEGIN = "<!-- bench:begin -->"
END = "<!-- bench:end -->"
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
    title = f"{line.row.title} {line.point}".strip() + f" ({line.row.unit})"
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


def show(console: Console, rows: tuple[Row, ...], results: Results) -> None:
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
    table = Table(title="Processor seconds per 1,000 steps, and bytes sent over TCP per step")
    for name in ("row", "side", "processes", "bytes"):
        table.add_column(name)
    for measurement in results.measurements:
        used = measurement.processor_per_1000()
        if len(used) > 1:
            words = ", ".join(f"{name} {seconds:.2f}" for name, seconds in used.items())
            where = f"{measurement.row} {measurement.point}".strip()
            sent = f"{statistics.median(measurement.wire):,.0f}" if measurement.wire else "–"
            table.add_row(where, measurement.label, words, sent)
    if table.row_count:
        console.print(table)


def markdown(rows: tuple[Row, ...], results: Results) -> str:
    """Return the table for README and docs."""
    text = ["| " + " | ".join(_HEAD) + " |", "|---" + "|--:" * (len(_HEAD) - 1) + "|"]
    text += ["| " + " | ".join(cells(line)) + " |" for line in lines(rows, results)]
    machine = results.machine
    text.append("")
    text.append(
        f"Measured {results.began[:10]} on {machine['cores']} cores ({machine['processor']}) in one run of `make bench`. "
        "The systems in each row take turns. Figures: median ± half the range. *Limit*: bare PyTorch on one thread, memcpy and "
        "`add_`. *Bound*: the bare work on all cores at once, without communication. *Bare program*: the same processes or threads with plain "
        "sockets, shared memory or barriers, and nothing else. *Missing*: not measured."
    )
    return "\n".join(text)


def include(page: Path, table: str, name: str = "bench") -> bool:
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


def path_of(folder: Path, results: Results, *, part: bool, unfinished: bool = False) -> Path:
    """Return the file of a run's results.

    ``<date>-<machine>.json`` is a complete run; a later one of the same day replaces it. A partial run (some rows,
    tiny sizes, no peer) has its time of day in its name and replaces nothing. A complete run in progress is
    ``…-unfinished.json``.
    """
    name = f"{results.began[:10]}-{results.machine['name']}"
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
