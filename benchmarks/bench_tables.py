"""Embedding tables on parameter servers: one table, a dynamic one, and 26, in turns.

``python -m benchmarks.bench_tables`` puts its table into docs/performance.md; 2 workers and 2 servers on this host. Every side makes the same
lookups: batches of 1,024 rows with 26 ids each. Processor time is that of the processes of each role.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem as sg
from benchmarks import report
from benchmarks.runner import machine
from benchmarks.sides import ROOT

ROWS, WIDTH, BATCH, COLUMNS = 1_000_000, 16, 1024, 26
TARGET = 25_000
"""Rows per second of processor time."""
AIMED = ("26 tables", "DLRM 26 tables")


class OneTable(nn.Module):
    """All columns in one plain table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).flatten(1)


class OneDynamic(nn.Module):
    """All columns in one dynamic table; ids are spread over all int64 numbers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.table = sg.nn.DynamicEmbedding(WIDTH, max_rows=ROWS, **settings)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids * 0x9E3779B97F4A7C1).flatten(1)


class ManyTables(nn.Module):
    """One plain table for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(ROWS // COLUMNS, WIDTH, sparse=True) for _ in range(COLUMNS)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        columns = (ids % (ROWS // COLUMNS)).unbind(1)
        found = [table(column) for table, column in zip(self.tables, columns, strict=True)]
        return torch.cat(found, 1)


class ManyBags(nn.Module):
    """One pooled table for each column; two ids in a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS // COLUMNS, WIDTH, mode="sum", sparse=True) for _ in range(COLUMNS)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        columns = (ids % (ROWS // COLUMNS)).unbind(1)
        found = [
            table(torch.stack([column, (column + 7) % (ROWS // COLUMNS)], 1))
            for table, column in zip(self.tables, columns, strict=True)
        ]
        return torch.cat(found, 1)


class Dlrm(nn.Module):
    """DLRM: 13 numbers and 26 categories, interactions by dot products."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        pairs = (COLUMNS + 1) * COLUMNS // 2
        self.top = nn.Sequential(nn.Linear(pairs + WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.triu_indices(COLUMNS + 1, COLUMNS + 1, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        numbers = self.bottom(ids[:, :13].remainder(97).div(97.0))
        found = self.tables(ids).view(len(ids), COLUMNS, WIDTH)
        every = torch.cat([numbers.unsqueeze(1), found], 1)
        dots = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([numbers, dots], 1))


SIDES: dict[str, Callable[[], nn.Module]] = {
    "one table": OneTable,
    "dynamic": OneDynamic,
    "dynamic evicting": lambda: OneDynamic(evict="age"),
    "26 tables": ManyTables,
    "26 bags": ManyBags,
    "DLRM one table": lambda: Dlrm(OneTable()),
    "DLRM 26 tables": lambda: Dlrm(ManyTables()),
}


def cpu_s(pids: list[int]) -> float:
    """Return the processor time of processes."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


class Side:
    """A model on the cluster."""

    def __init__(self, coordinator: sg.ClusterCoordinator, make: Callable[[], nn.Module]) -> None:
        self.coordinator = coordinator
        with coordinator.strategy.scope():
            model = make()
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        random = torch.Generator().manual_seed(1)
        # A third of the lookups go to few rows, as in click data.
        hot = torch.randint(0, 1000, (40, BATCH, COLUMNS), generator=random)
        ids = torch.randint(0, ROWS, (40, BATCH, COLUMNS), generator=random)
        self.batches = list(torch.where(torch.rand(ids.shape, generator=random) < 0.33, hot, ids))

        def step(ids: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()

        self.step = step

    def run(self, steps: int) -> float:
        """Return the seconds of so many steps."""
        began = time.perf_counter()
        for number in range(steps):
            self.coordinator.schedule(self.step, args=(self.batches[number % 40],))
        self.coordinator.join()
        return time.perf_counter() - began


def main() -> None:
    """Measure all sides in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    asked = parser.parse_args()
    names = asked.sides.split(",")
    here = machine()
    partitioner = sg.partitioners.MinSizePartitioner(max_shards=2)
    with (
        sg.LocalCluster(workers=2, ps=2) as cluster,
        sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy,
        sg.ClusterCoordinator(strategy) as coordinator,
    ):
        pids = {role: [cluster.pid(role, n) for n in range(2)] for role in ("worker", "ps")}
        sides = {name: Side(coordinator, SIDES[name]) for name in names}
        for side in sides.values():
            side.run(80)
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
        for _ in range(asked.turns):
            for name, side in sides.items():
                before = {role: cpu_s(some) for role, some in pids.items()}
                spent = side.run(asked.steps)
                used = [(cpu_s(pids[role]) - before[role]) / asked.steps for role in pids]
                found[name].append((asked.steps / spent, *used))
    text = f"{table(found)}\n\n{report.when_on(here, f'{datetime.now(UTC):%Y-%m-%d}')}"
    print(text)
    if names == list(SIDES) and report.include(asked.page, text, "tables"):
        print(f"\nput into {asked.page.name}")


def table(found: dict[str, list[tuple[float, ...]]]) -> str:
    """Return a table of steps per second, processor milliseconds and rows per second of processor time."""
    head = ("model", "steps/s", "workers (ms)", "servers (ms)", "rows per CPU second", "target")
    body = []
    for name, rows in found.items():
        speed, worker, server = (statistics.median(one) for one in zip(*rows, strict=True))
        reached = BATCH / (worker + server)
        verdict = "✓" if reached >= TARGET else "missed"
        body.append(
            (
                name,
                report.number(speed),
                report.number(1e3 * worker),
                report.number(1e3 * server),
                f"{reached:,.0f}",
                f"≥ {TARGET:,} {verdict}" if name in AIMED else "–",
            )
        )
    return report.markdown_table(head, body)


if __name__ == "__main__":
    main()
