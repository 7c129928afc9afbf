"""Training from Parquet files, on our side: the embedding row's model, fed by `Dataset.from_parquet` on the workers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import torch
import torch.nn.functional as F

import stratagem as sg
from benchmarks import models, reading, work
from benchmarks.ours.cluster import Embedding


class FromParquet(reading.FromFiles, Embedding):
    """Every worker reads all files again and again."""

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self.loss = F.binary_cross_entropy_with_logits
        self._folder = tempfile.TemporaryDirectory()
        paths = []
        for number, part in enumerate(reading.parts(self.size)):
            paths.append(str(Path(self._folder.name) / f"{number}.parquet"))
            pa.parquet.write_table(pa.table(part), paths[-1])
        with self.strategy.scope():
            model = models.Table(self.size)
            optimizer = torch.optim.Adagrad(
                model.parameters(), work.EMBEDDING_LEARNING_RATE, eps=work.EMBEDDING_EPSILON
            )
        columns = {"ids": list(self.id_columns()), "label": ["label"]}
        batch, loss_of = self.size["batch"], self.loss

        def dataset() -> Any:
            return sg.data.Dataset.from_parquet(paths, columns, batch_size=batch).repeat()

        def step(iterator: Any) -> None:
            found = next(iterator)
            optimizer.zero_grad()
            loss_of(model(found["ids"]), found["label"].float()).backward()
            optimizer.step()

        return step, (iter(self.coordinator.create_per_worker_dataset(dataset)),)

    def check(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        super().close()
        self._folder.cleanup()
