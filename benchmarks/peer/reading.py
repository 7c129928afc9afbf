"""The rows that read files, in TensorFlow: batches of lines or records, decoded a batch at a time.

That is its fastest form: CsvDataset and make_csv_dataset, which decode single lines, take about three times as long.
It has no reader of Parquet, so it reads the same rows from its own format there. Runs in the peer's environment only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks import reading


class PeerReading(reading.Reading):
    """Dicts of 40 tensors."""

    def dataset(self) -> Any:
        raise NotImplementedError

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__(size)
        self._dataset = self.dataset().prefetch(tf.data.AUTOTUNE)

    def epoch(self) -> Iterator[Any]:
        return iter(self._dataset)

    def total(self, batch: Any) -> float:
        return float(sum(int(tf.reduce_sum(batch[name])) for name in reading.INTEGERS))


class Records(PeerReading):
    """TFRecord files of Examples."""

    def write(self, folder: Path) -> list[str]:
        paths = []
        for number, part in enumerate(reading.parts(self.size)):
            paths.append(str(folder / f"{number}.tfrecord"))
            with tf.io.TFRecordWriter(paths[-1]) as writer:
                for record in reading.examples(part):
                    writer.write(record)
        return paths

    def dataset(self) -> Any:
        features = {
            name: tf.io.FixedLenFeature([], tf.float32 if name in reading.FLOATS else tf.int64)
            for name in ("label", *reading.FLOATS, *reading.INTEGERS[1:])
        }
        records = tf.data.TFRecordDataset(self.paths).batch(self.size["batch"])
        return records.map(lambda batch: tf.io.parse_example(batch, features), num_parallel_calls=1)


class Csv(PeerReading):
    """CSV files."""

    def write(self, folder: Path) -> list[str]:
        return reading.write_csv(folder, self.size)

    def dataset(self) -> Any:
        names = ("label", *reading.FLOATS, *reading.INTEGERS[1:])
        kinds = [
            tf.constant([], tf.float32 if name in reading.FLOATS else tf.int64) for name in names
        ]
        files = tf.data.Dataset.from_tensor_slices(self.paths)
        lines = files.flat_map(lambda path: tf.data.TextLineDataset(path).skip(1))
        return lines.batch(self.size["batch"]).map(
            lambda batch: dict(zip(names, tf.io.decode_csv(batch, kinds), strict=True)),
            num_parallel_calls=1,
        )
