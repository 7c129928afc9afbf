"""Checkpoints of parameter servers while they train, and the recovery of servers and coordinators: our side."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem as sg
from benchmarks.ours.cluster import JOIN_TIMEOUT_S, ClusterWork
from benchmarks.protocol import Work
from benchmarks.scratch import make_scratch

AHEAD = 8
"""Closures scheduled ahead, so that no worker waits."""

BATCH = 4096

LOOK_S = 0.02
"""How often the memory of the servers is read: it takes as long as part of a step."""

LIMIT_S = 300.0


class TableOnServers(ClusterWork):
    """A table on all servers, trained by Adagrad on ids that follow a power law, and a manager."""

    def __init__(self, size: dict[str, Any]) -> None:
        self.folder = make_scratch(size["place"])
        self.held = os.open(self.folder, os.O_RDONLY)  # in use, for tests that look for leaks
        super().__init__(size)
        self.steps(4)
        self.manager = sg.CheckpointManager(
            self.checkpoint,
            self.folder / "saves",
            max_to_keep=2,
            full_every=size.get("full_every", 1),
        )
        self.saves = 0

    def partitioner(self) -> Any:
        return sg.partitioners.FixedShardsPartitioner(self.size["servers"])

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        rows, width = self.size["rows"], self.size["width"]
        with self.strategy.scope():
            self.table = nn.Embedding(rows, width)
            optimizer = torch.optim.Adagrad(self.table.parameters(), lr=0.1)
        self.gigabytes = 2 * 4 * rows * width / 1e9
        self.checkpoint = sg.Checkpoint(model=self.table, optimizer=optimizer)
        table = self.table

        def step() -> None:
            # Rank r of a Zipf distribution has a probability of about 1 / r: ids are exp(uniform).
            ids = (rows ** torch.rand(BATCH)).long().clamp_(max=rows) - 1
            optimizer.zero_grad()
            table(ids).square().mean().backward()
            optimizer.step()

        return step, ()

    def save(self, *, final: bool = False) -> Any:
        self.saves += 1
        return self.manager.save(self.saves, final=final).wait(LIMIT_S)

    def close(self) -> None:
        self.manager.close()
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.held >= 0:
            os.close(self.held)
            self.held = -1


class SaveWhileTraining(TableOnServers):
    """Steps without and during a save: the longest gap between two steps, and further figures."""

    def sample(self, seconds: float) -> dict[str, Any]:
        alone = self._train(lambda began: time.perf_counter() - began > seconds)
        self.saves += 1
        before = self._memory()
        peak, looked = [before], [0.0]
        handle = self.manager.save(self.saves)

        def is_done(began: float) -> bool:
            now = time.perf_counter()
            if now - looked[0] > LOOK_S:
                looked[0] = now
                peak[0] = max(peak[0], self._memory())
            return handle.done

        during = self._train(is_done)
        handle.wait(LIMIT_S)
        figures = {
            "gap_ms": 1e3 * max(during["gap_s"], handle.paused_s),
            "gap_without_ms": 1e3 * alone["gap_s"],
            "slowdown_percent": 100 * max(0.0, 1 - during["rate"] / alone["rate"]),
            "memory_percent": 100 * (peak[0] - before) / before,
            "save_s": handle.seconds,
        }
        return {
            "value": figures["gap_ms"],
            "seconds": handle.seconds,
            "figures": figures,
        }

    def _train(self, is_over: Callable[[float], bool]) -> dict[str, float]:
        """Run steps until the end; return the rate and the longest gap between two steps."""
        ends: list[float] = []
        running: list[Any] = []
        began = time.perf_counter()
        while not is_over(began):
            while len(running) < AHEAD:
                value = self.coordinator.schedule(self.step)
                value.add_done_callback(lambda _: ends.append(time.perf_counter()))
                running.append(value)
            running.pop(0).fetch(timeout_s=JOIN_TIMEOUT_S)
        over = time.perf_counter()
        self.coordinator.join(timeout_s=JOIN_TIMEOUT_S)
        inside = [began, *(end for end in sorted(ends) if end <= over)]
        gaps = [late - early for early, late in itertools.pairwise(inside)]
        return {"rate": len(gaps) / (over - began), "gap_s": max(gaps, default=over - began)}

    def _memory(self) -> float:
        """Return the resident bytes of all servers."""
        total = 0
        for index in range(self.size["servers"]):
            status = Path(f"/proc/{self.cluster.pid('ps', index)}/status").read_text()
            total += int(status.split("VmRSS:")[1].split()[0]) * 1024
        return total


class SaveEveryMinute(TableOnServers):
    """Steps of a long run with regular saves; the rate outside of saves says how many there would be without."""

    def sample(self, seconds: float) -> dict[str, Any]:
        running: list[Any] = []
        ends: list[float] = []
        saves: list[tuple[float, float]] = []
        began = last = time.perf_counter()
        handle: Any = None
        while time.perf_counter() - began < self.size["long_s"]:
            while len(running) < AHEAD:
                value = self.coordinator.schedule(self.step)
                value.add_done_callback(lambda _: ends.append(time.perf_counter()))
                running.append(value)
            running.pop(0).fetch(timeout_s=JOIN_TIMEOUT_S)
            now = time.perf_counter()
            if handle is None and now - last > self.size["every_s"]:
                last = now
                self.saves += 1
                handle = self.manager.save(self.saves)
            elif handle is not None and handle.done:
                handle.wait()
                saves.append((last, now))
                handle = None
        over = time.perf_counter()
        if handle is not None:
            handle.wait(LIMIT_S)
            saves.append((last, over))
        self.coordinator.join(timeout_s=JOIN_TIMEOUT_S)
        saving_s = sum(end - begin for begin, end in saves)
        count = sum(end <= over for end in ends)
        outside = sum(
            end <= over and not any(low <= end <= high for low, high in saves) for end in ends
        )
        total_s = over - began
        lost = 1 - (count / total_s) / (outside / (total_s - saving_s))
        figures = {"saves": len(saves), "saving_s": saving_s, "steps": count}
        return {"value": max(0.0, 100 * lost), "seconds": total_s, "figures": figures}


class Delta(TableOnServers):
    """A full save, training, and a delta."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__({**size, "full_every": 100})

    def sample(self, seconds: float) -> dict[str, Any]:
        full = self.save(final=True)  # such a save is always full
        began = time.perf_counter()
        count = 0
        while time.perf_counter() - began < self.size["delta_s"]:
            self.steps(50)
            count += 50
        delta = self.save()
        figures = {"full_bytes": full.bytes, "delta_bytes": delta.bytes, "steps": count}
        return {"value": delta.bytes / full.bytes, "seconds": 0.0, "figures": figures}


class RestoreOnOthers(TableOnServers):
    """A checkpoint of these servers, restored on one server more."""

    def sample(self, seconds: float) -> dict[str, Any]:
        saved = self.manager.latest or self.save()
        with sg.LocalCluster(workers=1, ps=self.size["servers"] + 1) as cluster:
            partitioner = sg.partitioners.FixedShardsPartitioner(self.size["servers"] + 1)
            with sg.ParameterServerStrategy(cluster.resolver, partitioner) as strategy:
                with strategy.scope():
                    table = nn.Embedding(self.size["rows"], self.size["width"])
                    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
                checkpoint = sg.Checkpoint(model=table, optimizer=optimizer)
                begin = time.perf_counter()
                checkpoint.restore(saved.path)
                taken = time.perf_counter() - begin
                row = torch.tensor([self.size["rows"] - 1])
                assert torch.equal(table(row), self.table(row))
        return {"value": self.gigabytes / taken, "seconds": taken}


class ServerRecovery(TableOnServers):
    """Kill server 0 after a save, and wait for the next step."""

    def sample(self, seconds: float) -> dict[str, Any]:
        self.save()
        self.steps(10)
        count = len(self.coordinator.recoveries)
        self.cluster.kill_ps(0)
        begin = time.perf_counter()
        self.steps(1)
        taken = time.perf_counter() - begin
        if len(self.coordinator.recoveries) != count + 1:
            raise RuntimeError("the server was not restored")
        return {"value": taken, "seconds": taken}


SCRIPT = """
import json, sys
import torch
import stratagem as sg

spec, key, folder = json.loads(sys.argv[1])
resolver = sg.cluster_resolver.SimpleClusterResolver(sg.ClusterSpec(spec), cluster_key=key)
strategy = sg.ParameterServerStrategy(resolver, job="bench")
with strategy, sg.ClusterCoordinator(strategy) as coordinator:
    with strategy.scope():
        total = sg.Variable(torch.zeros(()), name="total")

    def step():
        total.assign_add(torch.ones(()))

    with sg.CheckpointManager(sg.Checkpoint(total=total), folder) as manager:
        first = manager.restore_or_initialize()
        for number in range(first, 10**9):
            coordinator.schedule(step).fetch()
            manager.step(number + 1)
            print(number, flush=True)
"""


class CoordinatorRecovery(Work):
    """Kill the script of a named job, start it again, and wait for its first step."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.folder = str(make_scratch(size["place"]))
        self.held = os.open(self.folder, os.O_RDONLY)  # in use, for tests that look for leaks
        self.cluster = sg.LocalCluster(workers=size["workers"], ps=size["servers"])
        spec = self.cluster.cluster_spec.as_dict()
        key = self.cluster.resolver.cluster_key_text()
        self.words = json.dumps([spec, key, self.folder])
        self.script = self.start()

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, self.words]
        script = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert script.stdout is not None
        if not script.stdout.readline():
            raise RuntimeError("the script ended before its first step")
        return script

    def steps(self, count: int) -> None:
        raise NotImplementedError("recovery is measured by sample()")

    def end(self) -> None:
        self.script.kill()
        self.script.communicate()

    def sample(self, seconds: float) -> dict[str, Any]:
        self.script.kill()
        begin = time.perf_counter()
        before = self.script
        self.script = self.start()
        taken = time.perf_counter() - begin
        before.communicate()
        return {"value": taken, "seconds": taken}

    def close(self) -> None:
        self.end()
        self.cluster.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.held >= 0:
            os.close(self.held)
            self.held = -1
