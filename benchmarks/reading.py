"""The rows that read files: what is read, and how it is measured. NumPy only: the peer imports this file too.

The unit is rows per second of processor time, all threads of the process counted, since a reader that keeps more
cores busy takes them from the training step.
"""

from __future__ import annotations

import itertools
import os
import struct
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.protocol import Work

FILES_SIZE: dict[str, Any] = {"batch": 1024, "batches": 64, "files": 2}
"""65,536 rows of 40 columns: a label, 13 floats and 26 integers."""

FLOATS = tuple(f"I{number}" for number in range(1, 14))
INTEGERS = ("label", *(f"C{number}" for number in range(1, 27)))
_WARM_UP = 4


def columns(size: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The columns of all rows, in the order of the files."""
    random = np.random.default_rng(7)
    rows = size["batch"] * size["batches"]
    found: dict[str, NDArray[Any]] = {"label": random.integers(0, 2, rows)}
    for name in FLOATS:
        found[name] = random.standard_normal(rows).astype(np.float32)
    for name in INTEGERS[1:]:
        found[name] = random.integers(0, size.get("rows", 100_000), rows)
    return found


def parts(size: dict[str, Any]) -> Iterator[dict[str, NDArray[Any]]]:
    """The columns of each file."""
    whole = columns(size)
    bounds = np.linspace(0, len(whole["label"]), size["files"] + 1, dtype=int)
    for begin, end in itertools.pairwise(bounds.tolist()):
        yield {name: column[begin:end] for name, column in whole.items()}


def write_csv(folder: Path, size: dict[str, Any]) -> list[str]:
    """Write the rows as CSV files."""
    paths = []
    for number, part in enumerate(parts(size)):
        texts = [
            [f"{value:.6g}" for value in column.tolist()]
            if name in FLOATS
            else list(map(str, column.tolist()))
            for name, column in part.items()
        ]
        lines = [",".join(part), *map(",".join, zip(*texts, strict=True))]
        path = folder / f"{number}.csv"
        path.write_text("\n".join(lines) + "\n")
        paths.append(str(path))
    return paths


def examples(part: dict[str, NDArray[Any]]) -> Iterator[bytes]:
    """The rows of a file as serialised `tf.train.Example`."""

    def field(number: int, payload: bytes) -> bytes:
        return bytes([number << 3 | 2]) + varint(len(payload)) + payload

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
        return bytes(out)

    names = {name: field(1, name.encode()) for name in part}
    lists = {name: column.tolist() for name, column in part.items()}
    for row in range(len(part["label"])):
        entries = bytearray()
        for name, values in lists.items():
            if name in FLOATS:
                feature = field(2, field(1, struct.pack("<f", values[row])))
            else:
                feature = field(3, field(1, varint(values[row])))
            entries += field(1, names[name] + field(2, feature))
        yield field(1, bytes(entries))


class FromFiles(Work):
    """Training from files; abstract. Counts thousands of rows per second; a figure per second of processor time of all processes."""

    size: dict[str, Any]

    def id_columns(self) -> tuple[str, ...]:
        """The columns that the model looks up."""
        return INTEGERS[1 : self.size["columns"] + 1]

    def sample(self, seconds: float) -> dict[str, Any]:
        if self._rate == 0.0:
            self._calibrate(
                seconds
            )  # now, so that it does not count as processor time of the sample
        before = self._processor_s()
        found = super().sample(seconds)
        used = self._processor_s() - before
        rows = found["steps"] * self.size["batch"] / 1e3
        figures = {"per_processor_s": rows / used}
        return {**found, "value": rows / found["seconds"], "figures": figures}

    def _processor_s(self) -> float:
        ticks = 0
        for pid in self.processes().values():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


class Reading(Work):
    """Batches of the rows of files, again and again."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self.paths = self.write(Path(self._folder.name))
        self._batches: Iterator[Any] | None = None

    @abstractmethod
    def write(self, folder: Path) -> list[str]:
        """Write the files."""

    @abstractmethod
    def epoch(self) -> Iterator[Any]:
        """Batches of all rows, once."""

    @abstractmethod
    def total(self, batch: Any) -> float:
        """The sum of all integers of a batch."""

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self._batches is None:
                self._batches = self.epoch()
            if next(self._batches, None) is None:
                self._batches = None

    def sample(self, seconds: float) -> dict[str, Any]:
        self.steps(_WARM_UP)
        steps = 0
        cpu, began = time.process_time(), time.perf_counter()
        while steps < self.size["batches"] // 4 or time.perf_counter() - began < seconds:
            self.steps(1)
            steps += 1
        taken = time.process_time() - cpu
        value = steps * self.size["batch"] / taken / 1e3
        return {"value": value, "steps": steps, "seconds": time.perf_counter() - began}

    def check(self) -> dict[str, Any]:
        expected = sum(
            int(each.sum()) for name, each in columns(self.size).items() if name in INTEGERS
        )
        return {"sum": sum(map(self.total, self.epoch())), "expected": float(expected)}

    def close(self) -> None:
        if self._batches is not None and hasattr(self._batches, "close"):
            self._batches.close()
        self._batches = None
        self._folder.cleanup()
