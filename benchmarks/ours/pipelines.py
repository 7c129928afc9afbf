"""Rows without training on our side: the input pipeline and the wire."""

from __future__ import annotations

from typing import Any

import torch

import stratagem as sg
from benchmarks import bench_input, bench_wire, work
from benchmarks.protocol import Work


class Input(Work):
    """Rows of an in-memory dataset, shuffled over the whole, repeated, in batches."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.amount_per_step = size["batch"] / 1e6
        columns = torch.from_numpy(work.input_rows(size))
        dataset = sg.data.Dataset.from_tensor_slices(columns).shuffle(None, seed=1).repeat()
        self.iterator = iter(dataset.batch(size["batch"]))
        self.rows, self.batch = columns, size["batch"]

    def steps(self, count: int) -> None:
        for _ in range(count):
            next(self.iterator)

    def check(self) -> dict[str, Any]:
        batches = len(self.rows) // self.batch
        total = sum(float(next(self.iterator).sum()) for _ in range(batches))
        return {"sum": total, "expected": float(self.rows.sum())}

    def close(self) -> None:
        self.iterator.close()


class Wire(Work):
    """Round trip of a small message between two processes, and further figures of the wire."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()

    def steps(self, count: int) -> None:
        raise NotImplementedError("the wire is measured by sample()")

    def sample(self, seconds: float) -> dict[str, Any]:
        figures = bench_wire.measure()
        return {"value": figures["round_trip_us"], "figures": figures}


class Loader(Work):
    """Our pipeline and torch's DataLoader, and the costs of distributing and reading ahead."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.tiny = size["tiny"]

    def steps(self, count: int) -> None:
        raise NotImplementedError("pipelines are measured by sample()")

    def sample(self, seconds: float) -> dict[str, Any]:
        figures = bench_input.measure(tiny=self.tiny)
        return {"value": figures["rows"]["ratio"], "figures": figures}
