"""Saving and restoring a table with Adagrad's state in TensorFlow. Runs in the peer's environment only.

`tf.train.CheckpointManager` as its documentation has it. TensorFlow checksums each tensor and does not flush to disk.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import tensorflow as tf

from benchmarks.protocol import Work
from benchmarks.scratch import make_scratch


class CheckpointWork(Work):
    """A table, its accumulators, and a manager that keeps one checkpoint."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.folder = make_scratch(size["place"])
        self.held = os.open(self.folder, os.O_RDONLY)  # in use, for tests that look for leaks
        shape = (size["rows"], size["width"])
        self.table = tf.Variable(tf.random.normal(shape))
        self.sums = tf.Variable(tf.ones(shape))
        self.gigabytes = 2 * 4 * shape[0] * shape[1] / 1e9
        self.checkpoint = tf.train.Checkpoint(table=self.table, sums=self.sums)
        self.manager = tf.train.CheckpointManager(self.checkpoint, str(self.folder), max_to_keep=1)
        self.save()

    def save(self) -> float:
        begin = time.perf_counter()
        self.manager.save()
        return time.perf_counter() - begin

    def steps(self, count: int) -> None:
        raise NotImplementedError("checkpoints are measured by sample()")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.held >= 0:
            os.close(self.held)
            self.held = -1


class Save(CheckpointWork):
    """One save."""

    def sample(self, seconds: float) -> dict[str, Any]:
        taken = self.save()
        return {"value": self.gigabytes / taken, "seconds": taken}


class Restore(CheckpointWork):
    """One restore into the live variables."""

    def sample(self, seconds: float) -> dict[str, Any]:
        before = float(tf.reduce_sum(self.table))
        self.table.assign(tf.zeros_like(self.table))
        begin = time.perf_counter()
        self.checkpoint.restore(self.manager.latest_checkpoint).assert_consumed()
        taken = time.perf_counter() - begin
        assert float(tf.reduce_sum(self.table)) == before
        return {"value": self.gigabytes / taken, "seconds": taken}
