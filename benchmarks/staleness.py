"""Measure speed, staleness and quality of the click model for each value of `staleness`, and draw them.

``python -m benchmarks.staleness`` trains in turns (4 minutes on two idle cores), puts a table into docs/parameter-servers.md and draws
docs/images/staleness.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")  # benchmarks run without a screen

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt

import stratagem as sg
from benchmarks import report
from benchmarks.runner import machine
from benchmarks.sides import ROOT
from stratagem._demo.clicks import Clicks, ClickWorld, WideAndDeep, auc

SETTINGS: tuple[int | None, ...] = (None, 8, 4, 2, 1, 0)
WORKERS, SERVERS = 4, 2
STEPS, BATCH, TEST_ROWS = 1200, 256, 20_000
WARM_UP = 40
TURNS = 2
LEARNING_RATE = 0.05
JOIN_TIMEOUT_S = 600.0


class Result(NamedTuple):
    """Figures of one training."""

    steps_per_s: float
    mean: float
    maximum: float
    auc: float


Found = dict[int | None, list[Result]]


def measure(*, turns: int, steps: int) -> tuple[Found, float]:
    """Train every setting in turns; return the results and the best possible AUC."""
    world = ClickWorld(seed=1)
    train, test = world.sample(steps * BATCH, seed=2), world.sample(TEST_ROWS, seed=3)
    found: Found = {setting: [] for setting in SETTINGS}
    for turn in range(turns):
        for setting in SETTINGS:
            # Metrics are those of processes: each training has its own.
            with sg.LocalCluster(workers=WORKERS, ps=SERVERS) as cluster:
                result = _train(cluster.resolver, setting, world, train, test, steps)
            found[setting].append(result)
            print(f"turn {turn + 1} of {turns}, staleness={setting}: {result}", flush=True)
    return found, test.best_auc()


def medians(found: Found) -> dict[int | None, Result]:
    """Return the medians over the turns."""
    return {
        setting: Result(*(statistics.median(column) for column in zip(*results, strict=True)))
        for setting, results in found.items()
    }


def table(found: Found, best: float, *, steps: int) -> str:
    """Return the table for the page."""
    head = ("`staleness`", "steps/s", "of `None`", "staleness mean / largest", "AUC, all turns")
    body = []
    for setting, one in medians(found).items():
        results = found[setting]
        # Ratios within one turn: the speed of the machine changes between turns.
        ratio = statistics.median(
            mine.steps_per_s / plain.steps_per_s
            for mine, plain in zip(results, found[None], strict=True)
        )
        largest = max(result.maximum for result in results)
        aucs = ", ".join(f"{result.auc:.4f}" for result in results)
        body.append(
            (
                f"`{setting}`",
                f"{one.steps_per_s:.0f}",
                f"{ratio:.2f}",
                f"{one.mean:.2f} / {largest:.0f}",
                aucs,
            )
        )
    here = machine()
    words = (
        f"Click model of the demonstration, Adagrad, {WORKERS} workers and {SERVERS} servers, {steps:,} steps of {BATCH} rows, every setting in "
        f"{len(found[None])} turns; speed and staleness are medians. The best possible AUC is {best:.4f}. Measured {datetime.now(UTC):%Y-%m-%d} on "
        f"{here['cores']} cores ({here['processor']}), load average at the end {os.getloadavg()[0]:.1f}, with `python -m benchmarks.staleness`."
    )
    return f"{report.markdown_table(head, body)}\n\n{words}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each training")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "parameter-servers.md")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "staleness.png")
    given = parser.parse_args(arguments)
    found, best = measure(turns=given.turns, steps=given.steps)
    text = table(found, best, steps=given.steps)
    print(f"\n{text}")
    if report.include(given.page, text, "staleness"):
        print(f"\nput into {given.page.name}")
    draw(medians(found), best, given.picture)
    print(f"drawn: {given.picture}")
    return 0


def _train(
    resolver: Any,
    staleness: int | None,
    world: ClickWorld,
    train: Clicks,
    test: Clicks,
    steps: int,
) -> Result:
    with (
        sg.ParameterServerStrategy(resolver, staleness=staleness) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        torch.manual_seed(4)
        with strategy.scope():
            model = WideAndDeep(
                num_categories=world.num_categories,
                num_fields=len(world.vocabulary),
                num_dense=train.dense.shape[1],
            )
            optimizer = torch.optim.Adagrad(model.parameters(), LEARNING_RATE)

        def step(ids: torch.Tensor, dense: torch.Tensor, label: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(ids, dense), label).backward()
            optimizer.step()

        def run(numbers: range) -> None:
            for number in numbers:
                rows = slice(number * BATCH, (number + 1) * BATCH)
                coordinator.schedule(step, (train.ids[rows], train.dense[rows], train.label[rows]))
            coordinator.join(timeout_s=JOIN_TIMEOUT_S)

        run(range(WARM_UP))
        before = _staleness(coordinator, 0)
        began = time.perf_counter()
        run(range(WARM_UP, steps))
        seconds = time.perf_counter() - began
        seen = _staleness(coordinator, before.count + steps - WARM_UP - 1)
        with torch.no_grad():
            score = model(test.ids, test.dense)
        count = seen.count - before.count
        mean = (seen.total - before.total) / max(1, count)
        return Result((steps - WARM_UP) / seconds, mean, seen.maximum, auc(score, test.label))


def _staleness(coordinator: sg.ClusterCoordinator, at_least: int) -> Any:
    """Return the distribution once the workers have reported so many steps; they report every second."""
    deadline = time.monotonic() + 10
    while True:
        time.sleep(1.5)
        found = coordinator.worker_metrics.distributions["ps.staleness"]
        if found.count >= at_least or time.monotonic() > deadline:
            return found


def draw(middle: dict[int | None, Result], best: float, path: Path) -> None:
    """Draw speed, staleness and AUC for each setting."""
    labels = ["none" if setting is None else str(setting) for setting in middle]
    panels = (
        ("steps per second", [one.steps_per_s for one in middle.values()]),
        ("mean staleness", [one.mean for one in middle.values()]),
        ("AUC", [one.auc for one in middle.values()]),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4))
    for axis, (title, values) in zip(axes, panels, strict=True):
        axis.bar(labels, values, color="#1f6feb")
        axis.set_title(title)
        axis.set_xlabel("staleness=")
    axes[2].axhline(best, color="#6b7280", linestyle="--", linewidth=1, label="best possible")
    axes[2].set_ylim(min(panels[2][1]) - 0.01, best + 0.005)
    axes[2].legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
