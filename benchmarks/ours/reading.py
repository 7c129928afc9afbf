"""The rows that read files, on our side: `sg.data` as the input page shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import torch

import stratagem as sg
from benchmarks import reading


class OurReading(reading.Reading):
    """Dicts of 40 tensors."""

    def dataset(self) -> sg.data.Dataset:
        raise NotImplementedError

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__(size)
        self._dataset = self.dataset()

    def epoch(self) -> Iterator[Any]:
        return iter(self._dataset)

    def total(self, batch: Any) -> float:
        return float(sum(int(batch[name].sum()) for name in reading.INTEGERS))


class Parquet(OurReading):
    """Parquet files with two row groups each."""

    def write(self, folder: Path) -> list[str]:
        paths = []
        for number, part in enumerate(reading.parts(self.size)):
            paths.append(str(folder / f"{number}.parquet"))
            group = max(1, len(part["label"]) // 2)
            pa.parquet.write_table(pa.table(part), paths[-1], row_group_size=group)
        return paths

    def dataset(self) -> sg.data.Dataset:
        return sg.data.Dataset.from_parquet(self.paths, batch_size=self.size["batch"])


class Csv(OurReading):
    """CSV files."""

    def write(self, folder: Path) -> list[str]:
        return reading.write_csv(folder, self.size)

    def dataset(self) -> sg.data.Dataset:
        return sg.data.Dataset.from_csv(self.paths, batch_size=self.size["batch"])


class TFRecord(OurReading):
    """TFRecord files of Examples."""

    def write(self, folder: Path) -> list[str]:
        paths = []
        for number, part in enumerate(reading.parts(self.size)):
            paths.append(str(folder / f"{number}.tfrecord"))
            sg.data.write_tfrecords(paths[-1], list(reading.examples(part)))
        return paths

    def dataset(self) -> sg.data.Dataset:
        features = dict.fromkeys(reading.FLOATS, torch.float32) | dict.fromkeys(
            reading.INTEGERS, torch.int64
        )
        return sg.data.Dataset.from_tfrecord(self.paths, features, self.size["batch"])
