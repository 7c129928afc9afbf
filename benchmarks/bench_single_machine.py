"""One machine, one run: bare PyTorch, one device, central storage and mirrored on the same MLP step.

Sides are measured in turns, round after round, so that other load slows all of them; each side's best
round counts. Ratios to bare PyTorch are of the same run. ``make bench`` compares with TensorFlow
(`ours/single.py`); this is a quick check while working on `_core`.

Run: ``PYTHONPATH=src python benchmarks/bench_single_machine.py``. Prints a table; with ``--json`` one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable

import torch
from torch import nn

import stratagem as sg

BATCH, FEATURES, HIDDEN, CLASSES = 64, 784, 256, 10


def mlp_step(strategy: sg.Strategy | None, *, idle_modules: int = 0) -> Callable[[], object]:
    """One call is one training step of the MLP.

    ``idle_modules`` adds modules the step never touches: they must not cost anything.
    """
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
        idle = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(idle_modules))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if strategy is None:
        return lambda: step(x, y)
    size = strategy.num_replicas_in_sync
    parts = tuple(
        each if size == 1 else sg.PerReplica(list(torch.tensor_split(each, size)))
        for each in (x, y)
    )
    return lambda keep=idle: strategy.run(step, args=parts)


def best_rates(sides: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Return the calls per second of each side in its best round."""
    best = dict.fromkeys(sides, 0.0)
    for call in sides.values():
        for _ in range(10):
            call()
    for _ in range(rounds):
        for name, call in sides.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            best[name] = max(best[name], calls / (time.perf_counter() - start))
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="torch's intra-op threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    one = sg.OneDeviceStrategy("cpu:0")
    with (
        sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as central,
        sg.MirroredStrategy(["cpu:0", "cpu:1"]) as mirrored,
    ):
        steps = {
            "bare PyTorch": mlp_step(None),
            "one device": mlp_step(one),
            "central storage, 2 replicas": mlp_step(central),
            "central storage, 500 idle modules": mlp_step(central, idle_modules=500),
            "mirrored, 2 replicas": mlp_step(mirrored),
        }
        rates = best_rates(steps, options.rounds, options.calls)
        empty = best_rates(
            {
                "run(nothing), one device": lambda: one.run(_nothing),
                "run(nothing), 2 replicas": lambda: central.run(_nothing),
            },
            options.rounds,
            options.calls * 5,
        )
    if options.json:
        print(json.dumps({"steps_per_s": rates, "calls_per_s": empty}))
        return
    bare = rates["bare PyTorch"]
    for name, rate in rates.items():
        print(f"{name:36s} {rate:8.0f} steps/s   {rate / bare:5.2f} × bare")
    for name, rate in empty.items():
        print(f"{name:36s} {1e6 / rate:8.1f} µs")


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
