"""``python -m benchmarks``: measure, print and write results. ``make bench [ONLY=row,row]`` and ``make bench-all`` call this."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import pages, plots, report, rows
from benchmarks.curves import CURVES
from benchmarks.peer import environment
from benchmarks.results import Results, lines, merged
from benchmarks.row import Row, tiny
from benchmarks.runner import Plan, run
from benchmarks.scratch import remove_scratch

ROOT = Path(__file__).resolve().parent.parent
ALL = (*rows.TABLE, *CURVES, *rows.ON_REQUEST)


def choose(only: str | None, *, every: bool) -> tuple[Row, ...]:
    """Return the rows named in ``only``, and those that they take figures of; without names the table, or every row but
    those that take too long.

    Raises:
        ValueError: a name that no row has.
    """
    if only is None:
        return tuple(row for row in ALL if row not in rows.ON_REQUEST) if every else rows.TABLE
    known = {row.name: row for row in ALL}
    named = [name.strip() for name in only.split(",") if name.strip()]
    for name in named:
        if name not in known:
            raise ValueError(f"no row is called {name!r}; the rows are {', '.join(known)}")
    sources = [known[name].figure_of for name in named]
    needed = [source[0] for source in sources if source is not None]
    return tuple(known[name] for name in dict.fromkeys([*needed, *named]))


def find_peer(console: Console, *, wanted: bool) -> Path | str:
    """Return the peer's Python, or the reason why its rows will be missing."""
    if not wanted:
        return "left out by --no-peer"
    try:
        with console.status("making the peer's environment (once)"):
            return environment.prepare()
    except environment.PeerMissing as error:
        return str(error)


def measure(
    console: Console, plan: Plan, folder: Path, *, part: bool, every: bool
) -> Results | None:
    """Run a plan, write the results after each row and say how far it is; return None if Ctrl-C ended it."""
    kept: Path | None = None

    def keep(results: Results) -> None:
        nonlocal kept
        kept = report.path_of(folder, results, part=part, every=every, unfinished=True)
        report.save(kept, results)
        console.print(said(plan, results), markup=False, highlight=False, soft_wrap=True)

    plan.keep = keep
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=plan.ticks)
        plan.progress = lambda words: progress.update(task, advance=1, description=words)
        try:
            results = run(plan)
        except KeyboardInterrupt:
            console.print(f"interrupted; kept of the rows that were done: {kept}", markup=False)
            return None
    path = report.path_of(folder, results, part=part, every=every)
    report.save(path, results)
    if kept is not None and kept != path:
        kept.unlink()
    return results


def draw(console: Console, results: Results, folder: Path) -> None:
    """Draw the curves that the results have."""
    for picture in plots.draw(results, folder):
        console.print(f"drawn: {picture}", markup=False)


def publish(console: Console, results: Results, pictures: Path) -> None:
    """Put tables and pictures into the pages."""
    draw(console, results, pictures)
    for place in pages.write(ROOT, results):
        console.print(f"put into {place}", markup=False)


def said(plan: Plan, results: Results) -> str:
    """Return a line about the row that has just ended."""
    count = len(results.row_seconds)
    row = plan.rows[count - 1]
    found = [
        report.cell(line.ours) + ("" if line.ratio is None else f" = {line.ratio:.1f} × TF")
        for line in lines((row,), results)
    ]
    return (
        f"[{count} of {len(plan.rows)}] {row.name} ({row.unit}): {', '.join(found)}; "
        f"{results.row_seconds[row.name]:.0f} s, {results.seconds / 60:.0f} min in all"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if all sides did the same work and ours was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", help="rows to run, separated by commas")
    parser.add_argument(
        "--all", action="store_true", help="the table, and the rows that make bench-all adds"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave TensorFlow out")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: tries the machinery only")
    parser.add_argument(
        "--budget-s", type=float, default=Plan.budget_s, help="start no row after this many seconds"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--plots", type=Path, help="where to draw; by default a full run draws into docs/images"
    )
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    parser.add_argument(
        "--pages",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="write the pages again from results, and stop; a row of several files is taken from the last of them",
    )
    given = parser.parse_args(arguments)
    console = Console()
    if given.list:
        for row in ALL:
            asked = "" if row in rows.TABLE else " (make bench-all)"
            console.print(f"{row.name:<20} {row.title}{asked}", markup=False)
        return 0
    if given.pages is not None:
        try:
            results = merged([report.load(path) for path in given.pages])
        except ValueError as error:
            parser.error(str(error))
        publish(console, results, given.plots or ROOT / "docs" / "images")
        return 0
    try:
        chosen = choose(given.only, every=given.all)
    except ValueError as error:
        parser.error(str(error))
    if given.tiny:
        chosen = tuple(tiny(row) for row in chosen)
    part = given.only is not None or given.tiny or given.no_peer
    peer = find_peer(console, wanted=not given.no_peer)
    for left in remove_scratch():
        console.print(f"removed what a killed run had left: {left}", markup=False)
    plan = Plan(rows=chosen, peer=peer, budget_s=given.budget_s)
    results = measure(console, plan, given.results, part=part, every=given.all)
    if results is None:
        return 130  # as a program that Ctrl-C ends
    report.show(console, chosen, results)
    path = report.path_of(given.results, results, part=part, every=given.all)
    table = f"{report.markdown(chosen, results)}\n\n{report.when(results)}"
    path.with_suffix(".md").write_text(table + "\n")
    console.print(f"written: {path} and .md; took {results.seconds:.0f} s", markup=False)
    if not part:
        publish(console, results, given.plots or ROOT / "docs" / "images")
    elif given.plots is not None:
        draw(console, results, given.plots)
    ours_missing = any(m.kind == "ours" and m.missing for m in results.measurements)
    return 1 if ours_missing or not all(check.passed for check in results.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
