"""Saving and restoring a table with Adagrad's state: our side."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import torch
from torch import nn

import stratagem as sg
from benchmarks.protocol import Work
from benchmarks.scratch import make_scratch


class CheckpointWork(Work):
    """A table, its optimizer, and a manager that keeps one checkpoint."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.folder = make_scratch(size["place"])
        self.held = os.open(self.folder, os.O_RDONLY)  # in use, for tests that look for leaks
        self.table = nn.Embedding(size["rows"], size["width"])
        optimizer = torch.optim.Adagrad(self.table.parameters())
        self.gigabytes = 2 * self.table.weight.nbytes / 1e9
        self.checkpoint = sg.Checkpoint(model=self.table, optimizer=optimizer)
        self.manager = sg.CheckpointManager(self.checkpoint, self.folder / "saves", max_to_keep=1)
        self.saves = 0
        self.save()  # loads torch's own checkpoint package

    def save(self) -> float:
        begin = time.perf_counter()
        self.saves += 1
        self.manager.save(self.saves, wait=True)
        return time.perf_counter() - begin

    def steps(self, count: int) -> None:
        raise NotImplementedError("checkpoints are measured by sample()")

    def close(self) -> None:
        self.manager.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.held >= 0:
            os.close(self.held)
            self.held = -1


class Save(CheckpointWork):
    """One save, waited for, checksums on; the pause of a save that is not waited for comes along."""

    def sample(self, seconds: float) -> dict[str, Any]:
        taken = self.save()
        self.saves += 1
        handle = self.manager.save(self.saves)
        handle.wait()
        figures = {"pause_ms": handle.paused_s * 1e3}
        return {"value": self.gigabytes / taken, "seconds": taken, "figures": figures}


class Restore(CheckpointWork):
    """One restore into the live model and optimizer, every byte verified."""

    def sample(self, seconds: float) -> dict[str, Any]:
        assert self.manager.latest is not None
        before = self.table.weight.detach().clone()
        nn.init.zeros_(self.table.weight)
        begin = time.perf_counter()
        self.checkpoint.restore(self.manager.latest.path)
        taken = time.perf_counter() - begin
        assert torch.equal(self.table.weight, before)
        return {"value": self.gigabytes / taken, "seconds": taken}
