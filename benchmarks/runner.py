"""Runs the rows: sets up all sides of a point, compares their work, then measures them in turns.

Knows sides and rows, but not what they compute. Called by ``__main__.py`` and by the tests.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checks import Facts, compare
from benchmarks.results import Measurement, Results
from benchmarks.row import Point, Row, Side
from benchmarks.sides import SideFailed, SideProcess

SETUP_TIMEOUT_S = 180.0
CHECK_TIMEOUT_S = 180.0
SAMPLE_TIMEOUT_S = 240.0

Progress = Callable[[str], None]


@dataclass(kw_only=True)
class Plan:
    """Rows to run, and how.

    Args:
        rows: the rows, in order.
        peer: the peer's Python, or the reason why there is none.
        budget_s: no point starts after this time; points left out are shown as missing. The default is about
            twice what all rows take on two cores.
    """

    rows: tuple[Row, ...]
    peer: Path | str
    budget_s: float = 5400.0
    progress: Progress = field(default=lambda _: None)
    #: called with what is known after each row, so that a run that ends early keeps it
    keep: Callable[[Results], None] = field(default=lambda _: None)

    @property
    def ticks(self) -> int:
        """Number of calls of ``progress``."""
        return sum(
            len(row.points) * (1 if row.figure_of is not None else 2 + row.repetitions)
            for row in self.rows
        )


def run(plan: Plan) -> Results:
    """Run every row of a plan."""
    begin = time.monotonic()
    results = Results(machine=machine(), began=datetime.now(UTC).isoformat(timespec="seconds"))
    for row in plan.rows:
        row_began = time.monotonic()
        for point in row.points:
            if time.monotonic() - begin > plan.budget_s:
                reason = f"left out: the run's {plan.budget_s:g} s were over"
                results.measurements += [_empty(row, point, side, reason) for side in row.sides]
            else:
                run_point = _run_point if row.figure_of is None else _take_figure
                run_point(plan, row, point, results)
        results.seconds = time.monotonic() - begin
        results.row_seconds[row.name] = time.monotonic() - row_began
        plan.keep(results)
    return results


def machine() -> dict[str, Any]:
    """Describe the machine."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "name": platform.node(),
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        # Other load makes every number worse, so it is recorded.
        "load_before": os.getloadavg()[0],
    }


def _empty(row: Row, point: Point, side: Side, reason: str | None = None) -> Measurement:
    return Measurement(
        row=row.name, point=point.label, kind=side.kind, label=side.label, missing=reason
    )


def _run_point(plan: Plan, row: Row, point: Point, results: Results) -> None:
    where = f"{row.title} {point.label}".strip()
    taken = {side.label: _empty(row, point, side) for side in row.sides}
    results.measurements += taken.values()
    with ExitStack() as stack:
        plan.progress(f"{where}: setting up")
        live = _set_up(plan, row, point, taken, stack)
        plan.progress(f"{where}: checking")
        if row.checked:
            facts = _ask_facts(live, taken)
            # The program is the same at a row's other points; only sizes differ.
            wanted = row.parity is not None and point is row.points[0]
            parity = _parity(row, point, stack) if wanted else None
            within = row.last_loss if point is row.points[0] else None
            results.checks += compare(row.name, facts, parity, within=within)
        for repetition in range(row.repetitions):
            plan.progress(f"{where}: {repetition + 1} of {row.repetitions}")
            # Turns begin with another side each time, so that no side always follows the same one.
            labels = list(live)
            first = repetition % len(labels) if labels else 0
            for label in labels[first:] + labels[:first]:
                _sample(row, live, taken[label])


def _take_figure(plan: Plan, row: Row, point: Point, results: Results) -> None:
    """Fill a row with a figure of another row's samples."""
    assert row.figure_of is not None
    source, figure = row.figure_of
    plan.progress(f"{row.title}: from {source}")
    for side in row.sides:
        taken = _empty(row, point, side)
        found = [m for m in results.of(source) if m.label == side.label]
        if found and found[0].samples:
            taken.samples = [each["figures"][figure] for each in found[0].extra]
        else:
            taken.missing = (found[0].missing if found else None) or f"row {source!r} was not run"
        results.measurements.append(taken)


def _set_up(
    plan: Plan, row: Row, point: Point, taken: dict[str, Measurement], stack: ExitStack
) -> dict[str, SideProcess]:
    """Start all sides of a point at the same time; record failures in their measurements."""

    def start(side: Side) -> SideProcess:
        if side.kind == "peer":
            if isinstance(plan.peer, str):
                raise SideFailed(plan.peer)
            process = SideProcess(side.kind, python=plan.peer)
        else:
            process = SideProcess(side.kind)
        stack.callback(process.close)
        size = {**point.size, **side.size}
        process.ask("setup", timeout_s=SETUP_TIMEOUT_S, row=row.name, size=size)
        return process

    live = {}
    with ThreadPoolExecutor(max_workers=len(row.sides)) as pool:
        futures = [(side, pool.submit(start, side)) for side in row.sides]
        for side, future in futures:
            try:
                live[side.label] = future.result()
            except SideFailed as error:
                taken[side.label].missing = str(error)
    return live


def _ask_facts(live: dict[str, SideProcess], taken: dict[str, Measurement]) -> dict[str, Facts]:
    facts = {}
    for label, process in list(live.items()):
        try:
            facts[label] = process.ask("check", timeout_s=CHECK_TIMEOUT_S)
        except SideFailed as error:
            taken[label].missing = str(error)
            live.pop(label)
    return facts


def _parity(row: Row, point: Point, stack: ExitStack) -> Facts | None:
    """Return our facts in the row's deterministic form; None if it cannot run."""
    size = {**point.size, **(row.parity or {})}
    process = SideProcess("ours")
    stack.callback(process.close)
    try:
        process.ask("setup", timeout_s=SETUP_TIMEOUT_S, row=row.name, size=size)
        facts = process.ask("check", timeout_s=CHECK_TIMEOUT_S)
    except SideFailed:
        return None
    process.close()
    return facts


def _sample(row: Row, live: dict[str, SideProcess], measurement: Measurement) -> None:
    process = live.get(measurement.label)
    if process is None:
        return
    before, sent_before = process.processor_seconds(), process.wire_bytes()
    try:
        answer = process.ask(
            "sample", timeout_s=SAMPLE_TIMEOUT_S + row.seconds, seconds=row.seconds
        )
    except SideFailed as error:
        # A side that fails during the measurement is missing; its samples are discarded.
        measurement.missing = str(error)
        measurement.samples.clear()
        live.pop(measurement.label)
        return
    after, sent = process.processor_seconds(), process.wire_bytes()
    measurement.samples.append(answer.pop("value"))
    steps = answer.get("steps")
    if steps:
        used = {name: after[name] - before.get(name, 0.0) for name in after if name in before}
        measurement.processor.append({name: s * 1000 / steps for name, s in used.items()})
        if sent is not None and sent_before is not None:
            measurement.wire.append((sent - sent_before) / steps)
    measurement.extra.append(answer)
