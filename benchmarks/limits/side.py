"""Process of the limit (bare PyTorch on one thread, plain memory traffic) and of the bound.

Run by the harness: ``python -m benchmarks.limits.side``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models, work
from benchmarks.limits import bytes_on_disk
from benchmarks.limits.bare_memory import BareMemory
from benchmarks.limits.bare_sockets import ROWS, BareSockets
from benchmarks.limits.bare_threads import BareThreads
from benchmarks.limits.cores import EveryCore
from benchmarks.protocol import Work, serve


class Training(Work):
    """A model, its optimizer and its batches."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        super().__init__()
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.done = 0

    def steps(self, count: int) -> None:
        model, optimizer, loss, batches = self.model, self.optimizer, self.loss, self.batches
        for _ in range(count):
            inputs, labels = batches[self.done % len(batches)]
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
            self.done += 1


class Mlp(Training):
    """The MLP step."""

    def __init__(self, size: dict[str, Any]) -> None:
        model = models.Mlp(size)
        models.set_mlp(model, size)
        optimizer = torch.optim.SGD(model.parameters(), work.MLP_LEARNING_RATE)
        super().__init__(model, optimizer, F.cross_entropy)
        self.size = size
        self.batches = models.tensors(work.mlp_batches(size))

    def check(self) -> dict[str, Any]:
        batches = work.mlp_batches(self.size)
        before = models.mean_loss(self.model, self.loss, batches)
        self.steps(self.size["check_steps"])
        after = models.mean_loss(self.model, self.loss, batches)
        prints = models.fingerprints(self.model, self.size)
        return {"loss_before": before, "loss_after": after, "parameters": prints}


class TwoPasses(Work):
    """A step of many small layers that adds up the gradients of each half of the batch, as two replicas do."""

    time_unit_s = 1e-3

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.size = size
        self.model = models.Layers(size)
        models.set_layers(self.model, size)
        self.optimizer = torch.optim.SGD(self.model.parameters(), work.LAYERS_LEARNING_RATE)
        self.whole = torch.from_numpy(work.layers_inputs(size))
        self.parts = self.whole.chunk(size["replicas"])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            for part in self.parts:
                (self.model(part).square().mean() / len(self.parts)).backward()
            self.optimizer.step()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss of the whole batch."""
        return float(self.model(self.whole).square().mean())

    def check(self) -> dict[str, Any]:
        before = self.loss()
        self.steps(self.size["check_steps"])
        prints = models.fingerprints(self.model, self.size)
        return {"loss_before": before, "loss_after": self.loss(), "parameters": prints}


class Embedding(Training):
    """The table step with PyTorch's sparse gradients."""

    def __init__(self, size: dict[str, Any]) -> None:
        model = models.Table(size)
        models.set_table(model, size)
        optimizer = torch.optim.Adagrad(
            model.parameters(), work.EMBEDDING_LEARNING_RATE, eps=work.EMBEDDING_EPSILON
        )
        super().__init__(model, optimizer, F.binary_cross_entropy_with_logits)
        self.size = size
        self.batches = models.tensors(work.embedding_batches(size))

    def check(self) -> dict[str, Any]:
        batches = work.embedding_batches(self.size)
        before = models.mean_loss(self.model, self.loss, batches)
        self.steps(self.size["check_steps"])
        after = models.mean_loss(self.model, self.loss, batches)
        prints = models.fingerprints(self.model, self.size)
        return {"loss_before": before, "loss_after": after, "parameters": prints}


class Variables(Work):
    """A step over many parameters."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.model = models.Many(size)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-6)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model().backward()
            self.optimizer.step()


class Indexing(Work):
    """Batches of shuffled rows by bare indexing."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.rows = torch.from_numpy(work.input_rows(size))
        self.batch = size["batch"]
        self.amount_per_step = self.batch / 1e6
        self.order = torch.randperm(len(self.rows)).split(self.batch)
        self.done = 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            place = self.done % len(self.order)
            if place == 0:
                self.order = torch.randperm(len(self.rows)).split(self.batch)
            self.rows.index_select(0, self.order[place])
            self.done += 1


class Traffic(Work):
    """64 MB copied or added, on one thread."""

    def __init__(self, size: dict[str, Any], operation: Any) -> None:
        super().__init__()
        self.amount_per_step = work.gigabytes(size)
        shapes = work.byte_shapes(size)
        self.here = [torch.zeros(shape) for shape in shapes]
        self.there = [torch.ones(shape) for shape in shapes]
        self.operation = operation

    def steps(self, count: int) -> None:
        for _ in range(count):
            for here, there in zip(self.here, self.there, strict=True):
                self.operation(here, there)


class Adding(Traffic):
    """64 MB added to parameters, on one thread: the least that a write needs."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__(size, Tensor.add_)


class PythonStart(Work):
    """Start Python and import torch."""

    def steps(self, count: int) -> None:
        raise NotImplementedError("the start is measured by sample()")

    def sample(self, seconds: float) -> dict[str, Any]:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        taken = time.perf_counter() - begin
        return {"value": taken, "seconds": taken}


def bound(row: str, size: dict[str, Any]) -> Work:
    """Return the bound of a row: all cores, no communication."""
    if row == "mlp":
        return EveryCore(Mlp, size, cores=size["workers"], amount=size["workers"])
    if row == "embedding":
        from benchmarks.limits import bare_rows  # Stratagem is not needed elsewhere

        return EveryCore(bare_rows.BareRows, size, cores=size["workers"], amount=size["workers"])
    if row == "add":
        return EveryCore(Adding, size, cores=size["workers"], amount=size["workers"])
    if row == "central":
        replicas = size["replicas"]
        share = {**size, "batch": size["batch"] // replicas}
        return EveryCore(Mlp, share, cores=replicas, amount=1)
    raise ValueError(f"row {row!r} has no bound; do not list it among its sides")


def bare(row: str, size: dict[str, Any]) -> Work:
    """Return the bare program of a row."""
    if size.get("sockets"):
        return BareSockets(ROWS[row.removesuffix("_sockets")], size)
    if row == "mlp":
        return BareMemory(size)
    if row in {"central", "central_parallel"}:
        return BareThreads(size)
    raise ValueError(f"row {row!r} has no bare program; do not list it among its sides")


def make(row: str, size: dict[str, Any]) -> Work:
    """Return the limit of a row, or its bound."""
    if size.get("form") == "every core":
        return bound(row, size)
    if size.get("form") == "bare":
        return bare(row, size)
    if row in {
        "mlp", "one_device", "central", "central_parallel", "workers", "servers", "closures",
    }:  # fmt: skip
        return Mlp(size)
    if row == "replicas_layers":
        return TwoPasses(size)
    if row == "keras_fit":
        from benchmarks import keras_fit  # Keras is not needed elsewhere

        return keras_fit.KerasFit(size)
    if row in {"embedding", "table", "hot_table"}:
        return Embedding(size)
    if row == "variables":
        return Variables(size)
    if row == "input":
        return Indexing(size)
    if row in {"parquet", "csv"}:
        from benchmarks.limits import reading  # pyarrow is not needed elsewhere

        return reading.PlainParquet(size) if row == "parquet" else reading.PlainCsv(size)
    if row == "save":
        return bytes_on_disk.Copy(size) if size.get("form") == "copy" else bytes_on_disk.Write(size)
    if row == "save_disk":
        return bytes_on_disk.Write(size)
    if row == "coordinator_recovery":
        return PythonStart()
    if row == "restore_servers" and size.get("form") == "new memory":
        return bytes_on_disk.ReadIntoNewMemory(size)
    if row in {"restore", "restore_servers"}:
        return bytes_on_disk.Read(size)
    if row == "read":
        return Traffic(size, Tensor.copy_)
    if row in {"add", "message"}:
        return Adding(size)
    raise ValueError(f"row {row!r} has no limit; do not list 'limit' among its sides")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(serve(make))
