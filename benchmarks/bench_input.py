"""Input pipelines: rows per second, cost of distributing, gain from reading ahead.

Run: ``PYTHONPATH=src python benchmarks/bench_input.py``. Prints a table; with ``--json`` one JSON line.
Every figure is a ratio of things measured in turns in one run, best of several rounds each, so that
a busy machine slows both sides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

ROWS, COLUMNS, BATCH = 1_000_000, 26, 1024


def _seconds_per_call(work: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


def _in_turns(works: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, float]:
    """Return the best seconds per call of each function, measured in turns."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, (work, calls) in works.items():
            best[name] = min(best[name], _seconds_per_call(work, calls))
    return best


def rows_per_second(rows: int = ROWS, rounds: int = 5) -> dict[str, float]:
    """Shuffle + repeat + batch(1024) of 26 int64 columns and a label, against a DataLoader."""
    ids, labels = torch.randint(0, 1000, (rows, COLUMNS)), torch.rand(rows)
    dataset = sg.data.Dataset.from_tensor_slices((ids, labels)).shuffle().repeat().batch(BATCH)
    loader = DataLoader(TensorDataset(ids, labels), batch_size=BATCH, shuffle=True)
    forever = itertools.chain.from_iterable(itertools.repeat(loader))
    ours = iter(dataset)
    per_epoch = max(1, rows // BATCH)
    next(ours), next(forever)
    # A whole epoch of ours, so that shuffling is included.
    best = _in_turns(
        {
            "ours": (lambda: next(ours), per_epoch),
            "loader": (lambda: next(forever), max(1, per_epoch // 20)),
        },
        rounds,
    )
    ours.close()
    return {
        "ours_rows_per_s": BATCH / best["ours"],
        "loader_rows_per_s": BATCH / best["loader"],
        "ratio": best["loader"] / best["ours"],
    }


def price_of_distributing(rows: int = 200_000, rounds: int = 200) -> dict[str, float]:
    """Microseconds a step over two CPU replicas beyond making the batch and slicing it."""
    ids, labels = torch.randint(0, 1000, (rows, COLUMNS)), torch.rand(rows)
    dataset = sg.data.Dataset.from_tensor_slices((ids, labels)).shuffle().repeat().batch(BATCH)
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        plain, sliced = iter(dataset), iter(dataset)
        distributed = iter(strategy.distribute_dataset(dataset))

        def slice_by_hand() -> list[Any]:
            return [torch.split(leaf, BATCH // 2) for leaf in next(sliced)]

        best = _in_turns(
            {
                "plain": (lambda: next(plain), 10),
                "sliced": (slice_by_hand, 10),
                "distributed": (lambda: next(distributed), 10),
            },
            rounds,
        )
        distributed.close()
    return {
        "plain_us": best["plain"] * 1e6,
        "slicing_us": (best["sliced"] - best["plain"]) * 1e6,
        "distributing_us": (best["distributed"] - best["sliced"]) * 1e6,
    }


def reading_ahead(steps: int = 60, work_s: float = 0.005, rounds: int = 3) -> dict[str, float]:
    """Return the speed-up by reading ahead when a map is as slow as the step.

    Both wait (as a disk read and an accelerator do), so that the figure is about the pipeline and
    not about the number of cores.
    """

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(work_s)
        return x

    dataset = sg.data.Dataset.range(steps).batch(1).map(slow)

    def epoch(steps_of: Callable[[], Iterator[Any]]) -> None:
        for _ in steps_of():
            time.sleep(work_s)

    with sg.OneDeviceStrategy("cpu:0") as strategy:
        now = strategy.distribute_dataset(dataset, sg.InputOptions(per_replica_buffer_size=0))
        ahead = strategy.distribute_dataset(dataset)
        best = _in_turns(
            {
                "without": (lambda: epoch(lambda: iter(now)), 1),
                "ahead": (lambda: epoch(lambda: iter(ahead)), 1),
            },
            rounds,
        )
    return {
        "without_s": best["without"],
        "ahead_s": best["ahead"],
        "ratio": best["without"] / best["ahead"],
    }


def measure(*, tiny: bool = False) -> dict[str, dict[str, float]]:
    """Return all figures."""
    torch.set_num_threads(1)
    if tiny:
        return {
            "rows": rows_per_second(rows=20_000, rounds=1),
            "distributing": price_of_distributing(rows=5_000, rounds=2),
            "ahead": reading_ahead(steps=8, rounds=1),
        }
    return {
        "rows": rows_per_second(),
        "distributing": price_of_distributing(),
        "ahead": reading_ahead(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: tries the machinery only")
    given = parser.parse_args()
    found = measure(tiny=given.tiny)
    if given.json:
        print(json.dumps(found))
        return
    rows, price, ahead = found["rows"], found["distributing"], found["ahead"]
    print(
        f"shuffle + repeat + batch(1024), 26 int64 columns  {rows['ours_rows_per_s'] / 1e6:8.2f} M rows/s"
    )
    print(
        f"DataLoader(batch_size=1024, shuffle=True)         {rows['loader_rows_per_s'] / 1e6:8.2f} M rows/s"
    )
    print(f"  ratio (to reach: 5)                             {rows['ratio']:8.1f}")
    print(
        f"distributing over 2 CPU replicas, beyond slicing  {price['distributing_us']:8.1f} µs (limit: 50)"
    )
    print(
        f"reading ahead of a map as slow as the step        {ahead['ratio']:8.2f} × (to reach: 1.7)"
    )


if __name__ == "__main__":
    main()
