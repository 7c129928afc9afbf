"""``python -m benchmarks``: measure, print and write results. ``make bench [ONLY=row,row]`` calls this."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import plots, report, rows
from benchmarks.curves import CURVES
from benchmarks.peer import environment
from benchmarks.results import Results
from benchmarks.row import Row, tiny
from benchmarks.runner import Plan, run

ROOT = Path(__file__).resolve().parent.parent
ALL = (*rows.TABLE, *CURVES)


def choose(only: str | None) -> tuple[Row, ...]:
    """Return the rows named in ``only``, or all rows.

    Raises:
        ValueError: a name that no row has.
    """
    if only is None:
        return ALL
    known = {row.name: row for row in ALL}
    named = [name.strip() for name in only.split(",") if name.strip()]
    for name in named:
        if name not in known:
            raise ValueError(f"no row is called {name!r}; the rows are {', '.join(known)}")
    return tuple(known[name] for name in named)


def find_peer(console: Console, *, wanted: bool) -> Path | str:
    """Return the peer's Python, or the reason why its rows will be missing."""
    if not wanted:
        return "left out by --no-peer"
    try:
        with console.status("making the peer's environment (once)"):
            return environment.prepare()
    except environment.PeerMissing as error:
        return str(error)


def measure(console: Console, plan: Plan, folder: Path, *, part: bool) -> Results | None:
    """Run a plan and write the results after each row; return None if Ctrl-C ended it."""
    kept: Path | None = None

    def keep(results: Results) -> None:
        nonlocal kept
        kept = report.path_of(folder, results, part=part, unfinished=True)
        report.save(kept, results)

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
    path = report.path_of(folder, results, part=part)
    report.save(path, results)
    if kept is not None and kept != path:
        kept.unlink()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if all sides did the same work and ours was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", help="rows to run, separated by commas")
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
    given = parser.parse_args(arguments)
    console = Console()
    if given.list:
        for row in ALL:
            console.print(f"{row.name:<12} {row.title}", markup=False)
        return 0
    try:
        chosen = choose(given.only)
    except ValueError as error:
        parser.error(str(error))
    if given.tiny:
        chosen = tuple(tiny(row) for row in chosen)
    part = given.only is not None or given.tiny or given.no_peer
    peer = find_peer(console, wanted=not given.no_peer)
    plan = Plan(rows=chosen, peer=peer, budget_s=given.budget_s)
    results = measure(console, plan, given.results, part=part)
    if results is None:
        return 130  # as a program that Ctrl-C ends
    report.show(console, chosen, results)
    path = report.path_of(given.results, results, part=part)
    table = report.markdown(chosen, results)
    path.with_suffix(".md").write_text(table + "\n")
    console.print(f"written: {path} and .md; took {results.seconds:.0f} s", markup=False)
    pictures = given.plots or (None if part else ROOT / "docs" / "images")
    if pictures is not None:
        for picture in plots.draw(results, pictures):
            console.print(f"drawn: {picture}", markup=False)
    if not part:
        for page in (ROOT / "README.md", ROOT / "docs" / "performance.md"):
            if report.include(page, report.markdown(rows.TABLE, results)):
                console.print(f"table put into {page.name}", markup=False)
    ours_missing = any(m.kind == "ours" and m.missing for m in results.measurements)
    return 1 if ours_missing or not all(check.passed for check in results.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
