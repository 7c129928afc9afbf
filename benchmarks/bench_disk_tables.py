"""Rows of a table in memory and on disk, in turns: what a parameter server does for a lookup and an Adagrad step.

Run ``python -m benchmarks.bench_disk_tables``. One process, one thread. Before every step of the last side the kernel is asked to drop 90 % of
the pages of rows and state from memory; ids are uniform, so that 90 % of the rows are read from disk. The files are in
``STRATAGEM_TABLE_DIRECTORY``.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time

import torch

from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import Gradient, GroupSpec
from stratagem._wire import shm

PAGEOUT = 21  # MADV_PAGEOUT, Linux 5.4; the mmap module lacks the name
SIDES = ("memory", "disk, all hot", "disk, 10 % hot")


class Side:
    """A table of one kind, with Adagrad's state."""

    def __init__(self, name: str, rows: int, width: int) -> None:
        self.name = name
        before = set(shm._on_disk)
        self.store = VariableStore()
        kind = "reserved" if name == "memory" else "disk"
        self.store.create(1, "table", (rows, width), torch.float32, kind=kind).fill_(1.0)
        self.store.create_optimizer(
            1, "torch.optim.Adagrad", [GroupSpec((1,), {})], defaults={"lr": 0.01}
        )
        self.store.tensor_of(1, 1, "sum").fill_(0.1)
        self.mapped = [shm._on_disk[start] for start in set(shm._on_disk) - before]

    def cool(self) -> None:
        """Drop 90 % of the pages from memory, if this side is so."""
        if self.name == SIDES[2]:
            for memory in self.mapped:
                hot = len(memory) // 10 // mmap.PAGESIZE * mmap.PAGESIZE
                memory.flush()  # only clean pages are dropped at once
                memory.madvise(PAGEOUT, hot, len(memory) - hot)

    def step(self, ids: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
        """Return the seconds of the lookup and of the step."""
        self.cool()
        began = time.perf_counter()
        self.store.read_rows(1, ids)
        read = time.perf_counter()
        self.store.push(1, [Gradient(variable=1, ids=ids, values=values)])
        return read - began, time.perf_counter() - read


def main() -> None:
    """Measure the sides in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=26_624)
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sides = [Side(name, asked.rows, asked.width) for name in SIDES]
    random = torch.Generator().manual_seed(1)
    values = torch.randn(asked.batch, asked.width, generator=random)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    for _ in range(asked.steps):
        ids = torch.randint(0, asked.rows, (asked.batch,), generator=random).unique()
        for side in sides:
            found[side.name].append(side.step(ids, values[: ids.numel()]))
    size = asked.rows * asked.width * 4 / 1e6
    print(f"{asked.rows:,} rows, {size:,.0f} MB and as much state, {asked.batch:,} ids a step")
    for name, times in found.items():
        read, step = (statistics.median(one) for one in zip(*times[2:], strict=True))
        print(
            f"{name:16} lookup {read * 1e3:8.2f} ms, step {step * 1e3:8.2f} ms,"
            f" {asked.batch / (read + step):12,.0f} rows/s"
        )


if __name__ == "__main__":
    main()
