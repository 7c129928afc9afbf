"""The least that a save and a restore must do: copy, write or read the same bytes."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from typing import Any

import torch

from benchmarks.limits.cores import EveryCore
from benchmarks.protocol import Work
from benchmarks.scratch import make_scratch

_PIECE_BYTES = 4 << 20


class BytesWork(Work):
    """As many bytes as a table and its optimizer's state, in memory and in one file."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        self.folder = make_scratch(size["place"])
        self.held = os.open(self.folder, os.O_RDONLY)  # in use, for tests that look for leaks
        count = 2 * 4 * size["rows"] * size["width"]
        self.gigabytes = count / 1e9
        self.here = torch.randint(0, 255, (count,), dtype=torch.uint8)
        self.there = torch.zeros(count, dtype=torch.uint8)

    def steps(self, count: int) -> None:
        raise NotImplementedError("bytes are measured by sample()")

    def work(self) -> None:
        """Do it once."""
        raise NotImplementedError

    def sample(self, seconds: float) -> dict[str, Any]:
        begin = time.perf_counter()
        self.work()
        taken = time.perf_counter() - begin
        return {"value": self.gigabytes / taken, "seconds": taken}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.held >= 0:
            os.close(self.held)
            self.held = -1


class Copy(BytesWork):
    """From memory to memory that is in use already."""

    def work(self) -> None:
        self.there.copy_(self.here)


class Write(BytesWork):
    """Into a new file, piece after piece, flushed to disk; the file before is deleted, as a manager does."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__(size)
        self.number = 0
        self.work()

    def work(self) -> None:
        self.number += 1
        data = memoryview(self.here.numpy())
        with (self.folder / str(self.number)).open("xb", buffering=0) as file:
            for start in range(0, len(data), _PIECE_BYTES):
                file.write(data[start : start + _PIECE_BYTES])
            os.fsync(file.fileno())
        (self.folder / str(self.number - 1)).unlink(missing_ok=True)


class Read(Write):
    """From a file into memory that is in use already."""

    def work(self) -> None:
        if not self.number:
            super().work()
            return
        into = memoryview(self.there.numpy())
        with (self.folder / str(self.number)).open("rb", buffering=0) as file:
            done = 0
            while done < len(into):
                done += file.readinto(into[done : done + _PIECE_BYTES])


class ReadShareIntoNewMemory(BytesWork):
    """One server's share: from a file into new memory, half of it shared. Every second step frees the memory."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__({**size, "rows": size["rows"] // (size["servers"] + 1)})
        self.amount_per_step = self.gigabytes
        self.path = self.folder / "share"
        self.path.write_bytes(memoryview(self.here.numpy()))
        self.held_memory: list[mmap.mmap] = []

    def steps(self, count: int) -> None:
        if self.held_memory:
            self.held_memory.clear()
            return
        half = len(self.here) // 2
        shared = os.memfd_create("bench")
        os.ftruncate(shared, half)
        apart = mmap.mmap(-1, half, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        apart.madvise(mmap.MADV_HUGEPAGE)  # as servers do for optimizer state
        self.held_memory = [mmap.mmap(shared, half), apart]
        os.close(shared)
        with self.path.open("rb", buffering=0) as file:
            for memory in self.held_memory:
                into, done = memoryview(memory), 0
                while done < half:
                    done += file.readinto(into[done : done + _PIECE_BYTES])
                into.release()


class ReadIntoNewMemory(EveryCore):
    """As many processes as the row has servers: new memory is what a restore on new servers needs."""

    def __init__(self, size: dict[str, Any]) -> None:
        count = size["servers"] + 1
        super().__init__(ReadShareIntoNewMemory, size, cores=count, amount=count)

    def sample(self, seconds: float) -> dict[str, Any]:
        begin = time.perf_counter()
        self.steps(1)
        taken = time.perf_counter() - begin
        self.steps(1)
        return {"value": self.amount_per_step / taken, "seconds": taken}
