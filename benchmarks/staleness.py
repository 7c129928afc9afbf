"""Measure speed, staleness and quality of the click model for each value of `staleness`, and draw them.

``python -m benchmarks.staleness docs/images/staleness.png`` trains in turns, prints a table and draws the picture.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")  # benchmarks run without a screen

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt

import stratagem as sg
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


def main(picture: Path) -> None:
    """Train every setting in turns; print medians and draw them."""
    world = ClickWorld(seed=1)
    train, test = world.sample(STEPS * BATCH, seed=2), world.sample(TEST_ROWS, seed=3)
    found: dict[int | None, list[Result]] = {setting: [] for setting in SETTINGS}
    for turn in range(TURNS):
        for setting in SETTINGS:
            # Metrics are those of processes: each training has its own.
            with sg.LocalCluster(workers=WORKERS, ps=SERVERS) as cluster:
                result = _train(cluster.resolver, setting, world, train, test)
            found[setting].append(result)
            print(f"turn {turn + 1}, staleness={setting}: {result}", flush=True)
    medians = {
        setting: Result(*(statistics.median(column) for column in zip(*results, strict=True)))
        for setting, results in found.items()
    }
    # Ratios within one turn: the speed of the machine changes between turns.
    ratios = {
        setting: statistics.median(
            one.steps_per_s / plain.steps_per_s
            for one, plain in zip(results, found[None], strict=True)
        )
        for setting, results in found.items()
    }
    print(f"\nbest AUC {test.best_auc():.4f}; {WORKERS} workers, {STEPS} steps of {BATCH} rows")
    print(
        "| `staleness` | steps/s | of `None` | staleness mean / largest | AUC |\n|---|--:|--:|--:|--:|"
    )
    for setting, one in medians.items():
        largest = max(result.maximum for result in found[setting])
        print(
            f"| `{setting}` | {one.steps_per_s:.0f} | {ratios[setting]:.2f} | {one.mean:.2f} / {largest:.0f} "
            f"| {one.auc:.4f} |"
        )
    draw(medians, test.best_auc(), picture)


def _train(
    resolver: Any, staleness: int | None, world: ClickWorld, train: Clicks, test: Clicks
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
        run(range(WARM_UP, STEPS))
        seconds = time.perf_counter() - began
        seen = _staleness(coordinator, before.count + STEPS - WARM_UP - 1)
        with torch.no_grad():
            score = model(test.ids, test.dense)
        count = seen.count - before.count
        mean = (seen.total - before.total) / max(1, count)
        return Result((STEPS - WARM_UP) / seconds, mean, seen.maximum, auc(score, test.label))


def _staleness(coordinator: sg.ClusterCoordinator, at_least: int) -> Any:
    """Return the distribution once the workers have reported so many steps; they report every second."""
    deadline = time.monotonic() + 10
    while True:
        time.sleep(1.5)
        found = coordinator.worker_metrics.distributions["ps.staleness"]
        if found.count >= at_least or time.monotonic() > deadline:
            return found


def draw(medians: dict[int | None, Result], best: float, path: Path) -> None:
    """Draw speed, staleness and AUC for each setting."""
    labels = ["none" if setting is None else str(setting) for setting in medians]
    panels = (
        ("steps per second", [one.steps_per_s for one in medians.values()]),
        ("mean staleness", [one.mean for one in medians.values()]),
        ("AUC", [one.auc for one in medians.values()]),
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
    main(Path(sys.argv[1]))
