"""The bound: all cores do the bare work at the same time, without communication.

A real system has the costs of messages, locks and servers on top. A target above the bound cannot be
reached on this machine.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.protocol import Work

START_LIMIT_S = 120.0
STEPS_LIMIT_S = 240.0
CLOSE_LIMIT_S = 10.0

Make = Callable[[dict[str, Any]], Work]


class EveryCore(Work):
    """The same work in one process per core; a step is one step in each process.

    Args:
        make: the work of one core; importable, because new processes import it.
        size: given to it.
        cores: how many.
        amount: what one step of all of them counts for, by that of one of them.
    """

    def __init__(self, make: Make, size: dict[str, Any], *, cores: int, amount: float) -> None:
        super().__init__()
        start = multiprocessing.get_context("spawn")
        self._processes = []
        self._lines: list[Connection] = []
        for _ in range(cores):
            here, there = start.Pipe()
            process = start.Process(target=_serve, args=(make, size, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._lines.append(here)
        self.amount_per_step = amount * sum(self._answers(START_LIMIT_S)) / cores

    def steps(self, count: int) -> None:
        for line in self._lines:
            line.send(count)
        self._answers(STEPS_LIMIT_S)

    def processes(self) -> dict[str, int]:
        return {
            f"core {index}": process.pid or os.getpid()
            for index, process in enumerate(self._processes)
        }

    def close(self) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(CLOSE_LIMIT_S)
            if process.is_alive():
                process.kill()
                process.join(CLOSE_LIMIT_S)

    def _answers(self, limit_s: float) -> list[float]:
        answers = []
        for index, line in enumerate(self._lines):
            if not line.poll(limit_s):
                raise TimeoutError(f"core {index} gave no answer in {limit_s:g} s")
            answers.append(float(line.recv()))
        return answers


def _serve(make: Make, size: dict[str, Any], line: Connection) -> None:
    """Run one core's process: report the value of a step, then run steps on request."""
    torch.set_num_threads(1)
    work = make(size)
    try:
        line.send(work.amount_per_step)
        while True:
            work.steps(line.recv())
            line.send(0.0)
    except (EOFError, BrokenPipeError):
        pass  # the other side has closed the connection
    finally:
        work.close()
