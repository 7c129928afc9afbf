"""Tables of README and of docs/performance.md, made from the results of a run.

``python -m benchmarks --pages FILE…`` makes them again from files. A page has a block for each table, between ``<!-- name:begin -->`` and
``<!-- name:end -->``. A block changes only if the run has its rows, so it keeps the figures, and the date, of the last run that had them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report, rows
from benchmarks.curves import CURVES
from benchmarks.results import Measurement, Results, lines
from benchmarks.row import Row

_BY_NAME = {row.name: row for row in CURVES}
_CURVES = tuple(
    row
    for row in CURVES
    if row.name
    in {"workers", "servers", "table", "hot_table", "variables", "message", "loader", "wire"}
)
_WORDS = (
    "The systems in each row take turns. Figures: median ± half the range. *Limit*: bare PyTorch on one thread, memcpy and `add_`; "
    "*bound*: the bare work on all cores at once, without communication; *bare program*: the same processes or threads with plain sockets, "
    "shared memory or barriers, and nothing else. –: not measured."
)


class Block(NamedTuple):
    """A table of a page."""

    page: str
    name: str
    make: Callable[[Results], str]


def write(root: Path, results: Results) -> list[str]:
    """Put every table that the results can fill into its page; return the places."""
    places = []
    for block in BLOCKS:
        text = block.make(results)
        if not text:
            continue
        if report.include(root / block.page, f"{text}\n\n{report.when(results)}", block.name):
            places.append(f"{block.page}, {block.name}")
    return places


def front(results: Results) -> str:
    """Return README's table."""
    chosen = [row for row in rows.TABLE if row.front and results.of(row.name)]
    without = ("limit", "bound", "bare program")
    words = (
        "The systems in each row take turns. Figures: median ± half the range. *Limit*: bare PyTorch on one thread, memcpy and `add_`; *bare*: the same "
        "processes or threads without Stratagem. –: not measured."
    )
    return f"{report.markdown(chosen, results, without=without)}\n\n{words}" if chosen else ""


def whole(results: Results) -> str:
    """Return all rows of the table, a table for each section."""
    found = report.sections(rows.TABLE, results)
    took = f"The run took {results.seconds / 60:.0f} minutes."
    return f"{found}\n\n{_WORDS} {took}" if found else ""


def processor(results: Results) -> str:
    """Return processor time by role and bytes per step of the parameter-server rows."""
    names = [row.name for row in rows.TABLE if row.section in (rows.ON_ONE_HOST, rows.OVER_SOCKETS)]
    kinds = ("ours", "peer", "bare")
    body = report.processor(
        [m for name in names for m in results.of(name) if m.kind in kinds and m.samples]
    )
    return report.markdown_table(report.PROCESSOR_HEAD, body, left=2) if body else ""


def curves(results: Results) -> str:
    """Return the points of the curves."""
    found = [row for row in _CURVES if results.of(row.name)]
    return report.markdown(found, results) if found else ""


def torch_programs(results: Results) -> str:
    """Return our figures beside those of other PyTorch programs."""
    head = ("work", "program", "steps/s", "Stratagem ÷ it", "processor (ms per step)", "bytes sent")
    body = []
    for row in _present(results, "mlp_torch", "embedding_torch"):
        ours = next(m for m in results.of(row.name) if m.kind == "ours")
        for one in results.of(row.name):
            sent, used = one.wire_bytes, one.processor_ms()
            ratio = (ours.median or 0.0) / one.median if one.median else None
            body.append(
                (
                    row.title,
                    one.label,
                    report.cell(one),
                    "–" if ratio is None or one is ours else f"{ratio:.2f}",
                    report.number(sum(used.values())) if used else "–",
                    "–" if sent is None else report.number(sent),
                )
            )
    return report.markdown_table(head, body, left=2) if body else ""


def narrow_types(results: Results) -> str:
    """Return speed, bytes and quality with 16 bits on the wire."""
    head = ("work", "on the wire", "value", "of float32", "processor (ms per step)", "bytes sent")
    body: list[Sequence[str]] = []
    for row in _present(results, "mlp_16", "embedding_16"):
        plain = _of_type(results, row, "float32")
        for one in results.of(row.name):
            sent, used = one.wire_bytes, one.processor_ms()
            ratio = one.median / plain.median if one.median and plain.median else None
            body.append(
                (
                    f"{row.title} ({row.unit})",
                    one.label,
                    report.cell(one),
                    "–" if ratio is None else f"{ratio:.2f}",
                    report.number(sum(used.values())) if used else "–",
                    "–" if sent is None else report.number(sent),
                )
            )
    for row in _present(results, "quality_16"):
        plain = _of_type(results, row, "float32")
        for one in results.of(row.name):
            title = f"{row.title} (AUC, mean of {len(one.samples)} seeds)"
            mean = f"{statistics.mean(one.samples):.4f}" if one.samples else "missing"
            body.append((title, one.label, mean, _difference(one, plain), "–", "–"))
    return report.markdown_table(head, body, left=2) if body else ""


def _difference(one: Measurement, plain: Measurement) -> str:
    """Return the mean difference of samples with the same seed, and its standard error."""
    if one is plain or len(one.samples) != len(plain.samples) or len(one.samples) < 2:
        return "–"
    each = [a - b for a, b in zip(one.samples, plain.samples, strict=True)]
    error = statistics.stdev(each) / len(each) ** 0.5
    return f"{statistics.mean(each):+.4f} ± {error:.4f}"


def closures(results: Results) -> str:
    """Return the effect of several steps in one function."""
    head = (
        "steps in one function",
        "steps/s",
        "coordinator (ms per step)",
        "worker (ms)",
        "server (ms)",
        "plain PyTorch (steps/s)",
    )
    body = []
    for line in lines(_present(results, "closures"), results):
        used = line.ours.processor_ms_by_role() if line.ours is not None else {}
        cells = [
            report.number(used[role]) if role in used else "–" for role in ("main", "worker", "ps")
        ]
        body.append((line.point, report.cell(line.ours), *cells, report.cell(line.limit)))
    return report.markdown_table(head, body) if body else ""


def backups(results: Results) -> str:
    """Return the price of backups and the time of a failover."""
    head = ("work", "backups", "value", "workers (ms)", "servers (ms)", "all (ms)")
    body = []
    for line in lines(_present(results, "mlp_backups", "embedding_backups", "failover"), results):
        used = line.ours.processor_ms_by_role() if line.ours is not None else {}
        body.append(
            (
                f"{line.row.title} ({line.row.unit})",
                line.point or "1",
                report.cell(line.ours),
                *(
                    report.number(used[role]) if role in used and len(used) > 1 else "–"
                    for role in ("worker", "ps")
                ),
                report.number(sum(used.values())) if len(used) > 1 else "–",
            )
        )
    return report.markdown_table(head, body, left=2) if body else ""


def quality(results: Results) -> str:
    """Return the AUC of asynchronous workers."""
    head = ("training", "AUC", "log loss", "seconds", "staleness mean / 90 % / 99 %")
    body = []
    best = 0.0
    for one in results.of("quality"):
        if not one.samples:
            continue
        extra: dict[str, Any] = one.extra[0]
        last, best = extra["curve"][-1], extra["best_auc"]
        keys = ("staleness_mean", "staleness_p90", "staleness_p99")
        stale = " / ".join(f"{extra[key]:.1f}" for key in keys) if keys[0] in extra else "–"
        body.append(
            (
                one.point,
                f"{last['auc']:.4f}",
                f"{last['loss']:.4f}",
                f"{last['seconds']:.1f}",
                stale,
            )
        )
    table = report.markdown_table(head, body)
    return f"{table}\n\nThe best possible AUC is {best:.4f}." if body else ""


def _present(results: Results, *names: str) -> list[Row]:
    return [_BY_NAME[name] for name in names if results.of(name)]


def _of_type(results: Results, row: Row, label: str) -> Measurement:
    return next(m for m in results.of(row.name) if m.label == label)


_PAGE = "docs/performance.md"
BLOCKS = (
    Block("README.md", "bench", front),
    Block(_PAGE, "bench", whole),
    Block(_PAGE, "processor", processor),
    Block(_PAGE, "curves", curves),
    Block(_PAGE, "torch", torch_programs),
    Block(_PAGE, "narrow", narrow_types),
    Block(_PAGE, "closures", closures),
    Block(_PAGE, "backups", backups),
    Block(_PAGE, "quality", quality),
)
