"""The rows that read files, in a few lines of pyarrow: what a user would write without a library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch

from benchmarks import reading


class PlainReading(reading.Reading):
    """Dicts of 40 tensors."""

    def total(self, batch: Any) -> float:
        return float(sum(int(batch[name].sum()) for name in reading.INTEGERS))


def tensors(batch: Any) -> dict[str, torch.Tensor]:
    """A record batch as tensors."""
    return {
        name: torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


class PlainParquet(PlainReading):
    """Parquet files, a batch at a time."""

    def write(self, folder: Path) -> list[str]:
        paths = []
        for number, part in enumerate(reading.parts(self.size)):
            paths.append(str(folder / f"{number}.parquet"))
            pa.parquet.write_table(pa.table(part), paths[-1])
        return paths

    def epoch(self) -> Iterator[Any]:
        for path in self.paths:
            for batch in pa.parquet.ParquetFile(path).iter_batches(self.size["batch"]):
                yield tensors(batch)


class PlainCsv(PlainReading):
    """CSV files: whole files, then slices of them."""

    def write(self, folder: Path) -> list[str]:
        return reading.write_csv(folder, self.size)

    def epoch(self) -> Iterator[Any]:
        for path in self.paths:
            table = pa.csv.read_csv(path).combine_chunks()
            for batch in table.to_batches(self.size["batch"]):
                yield tensors(batch)
