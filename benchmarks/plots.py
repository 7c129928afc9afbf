"""Draw growing costs, and quality against time and examples, from a results file to PNG.

``python -m benchmarks.plots results.json docs/images`` draws without measuring.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # benchmarks run without a screen

from matplotlib import pyplot as plt

from benchmarks import report
from benchmarks.curves import CURVES
from benchmarks.results import Measurement, Results
from benchmarks.row import Row

_COLOURS = {"ours": "#1f6feb", "peer": "#d97706", "limit": "#6b7280"}


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw all curves that the results contain; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for row in CURVES:
        found = [m for m in results.of(row.name) if m.median is not None]
        if not found:
            continue
        if row.name == "quality":
            drawn.append(_quality(found, folder / "quality.png"))
        elif row.axis and not row.beside:
            drawn.append(_picture(row, results, folder / f"{row.name}.png"))
    return drawn


def _picture(row: Row, results: Results, path: Path) -> Path:
    """Draw a row's curve, and next to it its processor time or related rows."""
    found = [m for m in results.of(row.name) if m.median is not None]
    others = [other for other in CURVES if other.beside == row.name and results.of(other.name)]
    with_processor = row.name in {"workers", "servers", "closures"}
    panels = 1 + len(others) + with_processor
    width = 4.5 * panels if panels > 1 else 5.5
    figure, grid = plt.subplots(1, panels, figsize=(width, 3.6), squeeze=False, sharey=bool(others))
    axes = grid[0]
    _curve(axes[0], row, found)
    for place, other in enumerate(others, 1):
        measured = [m for m in results.of(other.name) if m.median is not None]
        _curve(axes[place], other, measured)
    axes[0].set_ylim(bottom=0)  # after all curves: panels share their scale, and this fixes it
    if with_processor:
        labels = [point.label for point in row.points]
        _processor(axes[1], labels, [m for m in found if m.kind == "ours"], row.axis)
    return _save(figure, path)


def _curve(axes: Any, row: Row, found: list[Measurement]) -> None:
    labels = [point.label for point in row.points]
    for kind in ("ours", "limit", "peer"):
        mine = {m.point: m for m in found if m.kind == kind}
        places = [index for index, label in enumerate(labels) if label in mine]
        if not places:
            continue
        chosen = [mine[labels[index]] for index in places]
        middle = [m.median or 0.0 for m in chosen]
        below = [mid - min(m.samples) for mid, m in zip(middle, chosen, strict=True)]
        above = [max(m.samples) - mid for mid, m in zip(middle, chosen, strict=True)]
        axes.errorbar(
            places,
            middle,
            yerr=[below, above],
            marker="o",
            capsize=3,
            color=_COLOURS[kind],
            label=chosen[0].label,
        )
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel(row.axis)
    axes.set_ylabel(row.unit)
    axes.set_title(row.title, fontsize=10)
    axes.legend()


def _processor(axes: Any, labels: list[str], found: list[Measurement], axis: str) -> None:
    """Draw processor milliseconds per step as bars, stacked by role."""
    jobs = ("main", "worker", "ps")
    bottoms = [0.0] * len(labels)
    for job, shade in zip(jobs, ("#1f6feb", "#60a5fa", "#9ca3af"), strict=True):
        heights = []
        for label in labels:
            used = next((m.processor_ms_by_role() for m in found if m.point == label), {})
            heights.append(used.get(job, 0.0))
        axes.bar(range(len(labels)), heights, bottom=bottoms, color=shade, label=job)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel(axis)
    axes.set_ylabel("processor ms per step")
    axes.set_title("where the processor time goes", fontsize=10)
    axes.legend()


def _quality(found: list[Measurement], path: Path) -> Path:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for measurement in found:
        curve = measurement.extra[0]["curve"][1:]
        scores = [point["auc"] for point in curve]
        axes[0].plot([point["examples"] for point in curve], scores, label=measurement.point)
        axes[1].plot([point["seconds"] for point in curve], scores, label=measurement.point)
    for each, axis in zip(axes, ("examples", "seconds"), strict=True):
        each.axhline(found[0].extra[0]["best_auc"], color="#9ca3af", linestyle="--", linewidth=1)
        each.set_xlabel(axis)
    axes[0].set_ylabel("AUC on rows not trained on")
    axes[0].set_title("dashed: the best any model can reach", fontsize=10)
    axes[1].legend(fontsize=8)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main(arguments: Sequence[str]) -> int:
    """Draw from a results file."""
    source, folder = arguments
    for path in draw(report.load(Path(source)), Path(folder)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
