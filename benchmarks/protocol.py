"""Protocol between the harness and the program of one side: JSON lines, one reply per request.

Every side (ours, the peer, the limit) is a process with a ``Work`` object. It stays alive over all
repetitions, so that the sides can be measured in turns. This file uses only the standard library, because
the peer's environment contains nothing of the project. ``benchmarks.*.side`` serves, ``sides.py`` asks.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

# What a row is run with: the row's name, and its sizes.
MakeWork = Callable[[str, dict[str, Any]], "Work"]

# A first guess from few steps may be far off (caches, lazy set-up), so one sample may correct it this often.
_CALIBRATIONS = 3

WARM_UP = 12
"""Steps before the measurement."""


class Work(ABC):
    """Work of one row on one side: set up once, then measured repeatedly.

    A sample runs a number of steps that takes about ``seconds`` and waits until all of them are done.
    """

    #: what one step counts for in the row's unit: 1 for steps/s, gigabytes for GB/s
    amount_per_step: float = 1.0
    #: samples have a multiple of so many steps
    steps_together: int = 1
    #: samples are the time of a step, in this many seconds; None: amounts per second
    time_unit_s: float | None = None

    def __init__(self) -> None:
        self._rate = 0.0

    @abstractmethod
    def steps(self, count: int) -> None:
        """Run ``count`` steps and wait for the last one."""

    def check(self) -> dict[str, Any]:
        """Return facts about this side's work, for the comparison with other sides."""
        return {}

    def sample(self, seconds: float) -> dict[str, Any]:
        """Measure once, for about ``seconds``."""
        if self._rate == 0.0:
            self._calibrate(seconds)
        count = max(1, round(self._rate * seconds / self.steps_together)) * self.steps_together
        begin = time.perf_counter()
        self.steps(count)
        taken = time.perf_counter() - begin
        self._rate = count / taken
        value = count * self.amount_per_step / taken
        if self.time_unit_s is not None:
            value = taken / count / self.time_unit_s
        return {"value": value, "steps": count, "seconds": taken}

    def _calibrate(self, seconds: float) -> None:
        self.steps(WARM_UP)  # optimizers make their state, memory is touched for the first time
        count = 2
        for _ in range(_CALIBRATIONS):
            begin = time.perf_counter()
            self.steps(count)
            self._rate = count / (time.perf_counter() - begin)
            if count >= self._rate * seconds / 4:
                return
            count = max(2, round(self._rate * seconds / 4))

    def processes(self) -> dict[str, int]:
        """Return the names and ids of the processes that do this side's work."""
        return {"main": os.getpid()}

    def resize(self, workers: int) -> None:
        """Change the number of workers; most rows have a fixed number."""
        raise NotImplementedError(f"{type(self).__name__} has a fixed number of workers")

    def close(self) -> None:  # noqa: B027 - most rows hold nothing
        """Release everything. A second call does nothing."""


def serve(make_work: MakeWork) -> int:
    """Answer the harness until it closes the connection.

    Standard output is taken away from everybody else (libraries print there) and kept for the answers.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    work: Work | None = None
    try:
        for line in sys.stdin:
            question = json.loads(line)
            operation = question["op"]
            try:
                if operation == "setup":
                    work = make_work(question["row"], question["size"])
                    answer: dict[str, Any] = {"processes": work.processes()}
                elif operation == "check":
                    answer = _made(work).check()
                elif operation == "sample":
                    answer = _made(work).sample(question["seconds"])
                    answer["processes"] = _made(work).processes()
                elif operation == "resize":
                    _made(work).resize(question["workers"])
                    answer = {"processes": _made(work).processes()}
                elif operation == "close":
                    break
                else:
                    raise ValueError(
                        f"unknown operation {operation!r}; setup, check, sample, resize or close expected"
                    )
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                # The harness shows the sentence as the reason why the row is missing; the rest is in the log.
                traceback.print_exc()
                reply: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            else:
                reply = {"ok": answer}
            answers.write(json.dumps(reply) + "\n")
    finally:
        if work is not None:
            work.close()
    answers.write(json.dumps({"ok": {}}) + "\n")
    return 0


def _made(work: Work | None) -> Work:
    if work is None:
        raise RuntimeError("asked for work before 'setup'; the harness sends 'setup' first")
    return work
