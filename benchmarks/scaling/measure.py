"""Measurements of a cluster on this machine: rate, processor time by role, bytes, and how much other programs disturbed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from benchmarks.scaling.costs import ROLES, Cost
from benchmarks.scaling.findings import Sample
from benchmarks.sides import SideProcess

SETUP_TIMEOUT_S = 300.0
SAMPLE_TIMEOUT_S = 300.0
PRIORITY = "-19"


class Bench:
    """A cluster that does one kind of step.

    Args:
        row: work of our side (``ours/side.py``).
        size: its size.
        seconds: of one sample.
        samples: number of samples, of which the fastest one counts.
        priority: let the processes of the cluster go before other programs of this machine.
    """

    def __init__(
        self, row: str, size: dict[str, Any], *, seconds: float, samples: int, priority: bool
    ) -> None:
        self._side = SideProcess("ours")
        self._seconds, self._samples, self._priority = seconds, samples, priority
        try:
            with self._raised():
                self._side.ask("setup", timeout_s=SETUP_TIMEOUT_S, row=row, size=size)
                self.facts = self._side.ask("check", timeout_s=SETUP_TIMEOUT_S)
        except BaseException:
            self._side.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._side.close()

    def resize(self, workers: int) -> None:
        """Add workers up to this number."""
        with self._raised():
            self._side.ask("resize", timeout_s=SETUP_TIMEOUT_S, workers=workers)

    def measure(self) -> Sample:
        """Take samples; return the fastest one, which other programs disturbed least."""
        with self._raised():
            self._sample(self._seconds / 4)
            samples = [self._sample(self._seconds) for _ in range(self._samples)]
            return max(samples, key=lambda sample: sample.steps_per_s)

    def idle(self, seconds: float) -> dict[str, float]:
        """Return the processor seconds per second of each role while nothing is scheduled."""
        before = self._side.processor_seconds()
        time.sleep(seconds)
        after = self._side.processor_seconds()
        used = by_role({name: after[name] - before[name] for name in before})
        return {role: getattr(used, role) / seconds for role in ROLES}

    def _sample(self, seconds: float) -> Sample:
        side = self._side
        bytes_before, before = side.wire_bytes(), side.processor_seconds()
        busy_before, begin = busy_seconds(), time.perf_counter()
        answer = side.ask("sample", timeout_s=SAMPLE_TIMEOUT_S, seconds=seconds)
        elapsed, busy = time.perf_counter() - begin, busy_seconds() - busy_before
        after, bytes_after = side.processor_seconds(), side.wire_bytes()
        used = {name: after[name] - before[name] for name in before}
        steps = answer["steps"]
        sent = 0.0 if bytes_after is None or bytes_before is None else bytes_after - bytes_before
        return Sample(
            steps_per_s=answer["value"],
            cost=by_role(used) * (1 / steps),
            wire_bytes=sent / steps,
            others=max(0.0, busy - sum(used.values())) / elapsed,
        )

    @contextmanager
    def _raised(self) -> Iterator[None]:
        """Give all processes of the side a higher priority while they are measured or started."""
        if not self._priority:
            yield
            return
        ended = threading.Event()

        def repeat() -> None:
            while True:
                for pid in descendants(self._side.pid):
                    set_priority(pid, PRIORITY)
                if ended.wait(0.2):
                    return

        thread = threading.Thread(target=repeat, name="priority")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for pid in descendants(self._side.pid):
                set_priority(pid, "0")


def by_role(used: dict[str, float]) -> Cost:
    """Sum processor time by role; our side names its processes ``main``, ``worker 0``, ``ps 0``."""
    roles = {"main": "coordinator", "worker": "worker", "ps": "server"}
    total = Cost()
    for name, seconds in used.items():
        total += Cost(**{roles[name.split()[0]]: seconds})
    return total


def busy_seconds() -> float:
    """Return the processor time that all programs of this machine have used."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Return a process and all processes that it has started, directly or not."""
    found = [pid]
    for one in found:  # it grows
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue  # the thread has ended
    return found


def set_priority(pid: int, nice: str) -> None:
    """Set the priority of a process's session (autogroup, see sched(7)); an ended process is ignored."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(nice)
    except (FileNotFoundError, ProcessLookupError):
        pass
