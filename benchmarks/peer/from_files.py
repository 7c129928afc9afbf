"""Training from files in TensorFlow: the embedding row's model, fed by tf.data on the workers.

TensorFlow has no reader of Parquet, so it reads the same rows from its own format. Runs in the peer's environment only.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks import reading
from benchmarks.peer import models
from benchmarks.peer.cluster import ClusterWork


class FromRecords(reading.FromFiles, ClusterWork):
    """Every worker reads all files again and again."""

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        self._folder = tempfile.TemporaryDirectory()
        paths = []
        for number, part in enumerate(reading.parts(self.size)):
            paths.append(str(Path(self._folder.name) / f"{number}.tfrecord"))
            with tf.io.TFRecordWriter(paths[-1]) as writer:
                for record in reading.examples(part):
                    writer.write(record)
        with self.strategy.scope():
            model = models.Table(self.size, self.strategy)
        names, batch = self.id_columns(), self.size["batch"]
        features = {name: tf.io.FixedLenFeature([], tf.int64) for name in ("label", *names)}

        def parse(records: Any) -> tuple[Any, Any]:
            found = tf.io.parse_example(records, features)
            ids = tf.stack([found[name] for name in names], axis=1)
            return ids, tf.cast(found["label"], tf.float32)[:, None]

        def dataset() -> Any:
            records = tf.data.TFRecordDataset(paths).batch(batch, drop_remainder=True).repeat()
            return records.map(parse, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)

        @tf.function
        def step(iterator: Any) -> None:
            model.adagrad(*next(iterator))

        return step, (iter(self.coordinator.create_per_worker_dataset(dataset)),)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()
