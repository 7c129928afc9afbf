"""The input row in TensorFlow: tf.data in its fastest reasonable form. Runs in the peer's environment only.

Row numbers are shuffled and batched, and each batch of rows is then gathered at once; shuffling the rows themselves
costs several times as much.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks import work
from benchmarks.protocol import Work


class Input(Work):
    """Rows of an in-memory dataset, shuffled over the whole, repeated, in batches."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.amount_per_step = size["batch"] / 1e6
        self.batch = size["batch"]
        self.rows = rows = tf.constant(work.input_rows(size))
        count = len(rows)
        numbers = tf.data.Dataset.range(count).shuffle(count, seed=1).repeat().batch(self.batch)
        dataset = numbers.map(lambda index: tf.gather(rows, index), num_parallel_calls=1)
        self.iterator = iter(dataset.prefetch(tf.data.AUTOTUNE))

    def steps(self, count: int) -> None:
        for _ in range(count):
            next(self.iterator)

    def check(self) -> dict[str, Any]:
        batches = len(self.rows) // self.batch
        total = sum(float(tf.reduce_sum(next(self.iterator))) for _ in range(batches))
        return {"sum": total, "expected": float(tf.reduce_sum(self.rows))}
