"""What recovery costs while nothing fails: a named job with a `CheckpointManager` against the same steps without, in turns."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import torch

import stratagem as sg
from benchmarks.ours import cluster
from benchmarks.protocol import Work
from benchmarks.scratch import make_scratch

TURNS = 4
"""Turns of each side in a sample: the load of the machine changes."""


class WithManager:
    """Steps of a cluster row, as a script with recovery makes them.

    No save becomes due: `save_slowdown` and `save_minutes` measure what saves cost.
    """

    def __init__(self, made: cluster.ClusterWork, place: str) -> None:
        self.made = made
        self.folder = make_scratch(place)
        self.held = os.open(self.folder, os.O_RDONLY)  # in use, for tests that look for leaks
        objects = {
            name: one
            for name, one in vars(made).items()
            if isinstance(one, torch.nn.Module | torch.optim.Optimizer | sg.Variable)
        }
        self.manager = sg.CheckpointManager(
            sg.Checkpoint(**objects), self.folder / "saves", every_s=3600
        )
        self.number = self.manager.restore_or_initialize()
        self.manager.save(self.number, wait=True)

    def steps(self, count: int) -> None:
        made = self.made
        for _ in range(count):
            made.coordinator.schedule(made.step, args=made.arguments)
            self.number += 1
            self.manager.step(self.number)
        made.coordinator.join(timeout_s=cluster.JOIN_TIMEOUT_S)

    def close(self) -> None:
        self.manager.close()
        self.made.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.held)


class RecoveryPrice(Work):
    """Two clusters, one of them with recovery; the value is the share of steps lost to it."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        work: Any = getattr(cluster, size["work"])
        self.without: cluster.ClusterWork = work(size)
        self.with_recovery = WithManager(work({**size, "job": "bench"}), size["place"])
        self.count = 0

    def steps(self, count: int) -> None:
        raise NotImplementedError("the price is measured by sample()")

    def sample(self, seconds: float) -> dict[str, Any]:
        sides: tuple[Any, Any] = self.without, self.with_recovery
        if not self.count:
            self.without._calibrate(seconds / TURNS)
            self.with_recovery.steps(self.without.scheduled)
            self.count = max(1, round(self.without._rate * seconds / TURNS))
        taken, used = [0.0, 0.0], [0.0, 0.0]
        for turn in range(TURNS):
            for index in (0, 1) if turn % 2 else (1, 0):
                pids = (self.without, self.with_recovery.made)[index].processes().values()
                before = sum(map(_processor_s, pids))
                begin = time.perf_counter()
                sides[index].steps(self.count)
                taken[index] += time.perf_counter() - begin
                used[index] += sum(map(_processor_s, pids)) - before
        lost = 100 * (1 - taken[0] / taken[1])
        figures = {
            "processor_percent": 100 * (used[1] / used[0] - 1),
            "steps_per_s": TURNS * self.count / taken[0],
        }
        return {"value": lost, "seconds": sum(taken), "figures": figures}

    def processes(self) -> dict[str, int]:
        with_recovery = self.with_recovery.made.processes()
        named = {f"{name}, recovery": pid for name, pid in with_recovery.items()}
        return {**named, **self.without.processes()}

    def close(self) -> None:
        self.with_recovery.close()
        self.without.close()


def _processor_s(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)
