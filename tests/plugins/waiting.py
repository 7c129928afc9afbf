"""Waiting in tests: for a condition with a limit, and holding up a function on a worker.

Tests never sleep for a fixed time. Limits are generous: on a machine with a load average of 10 everything
takes five to ten times as long.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

LOOK_S = 0.01
ARRIVALS = ".arrivals"


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = 120.0,
    *,
    tell: Callable[[], object] = lambda: "it is false",
) -> None:
    """Wait until a condition is true; fail after the limit with the text of `tell`."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"the condition is not true after {timeout_s:g} s: {tell()}")
        pause.wait(LOOK_S)


def wait_until_halted(pid: int) -> None:
    """Wait until a process that got SIGKILL or SIGSTOP does nothing more: it may still answer requests when `kill` returns."""

    def states() -> set[str]:
        found = set()
        for task in Path(f"/proc/{pid}/task").glob("*/stat"):
            try:
                found.add(task.read_text().rpartition(") ")[2][0])
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
                continue
        return found

    wait_until(lambda: not states() - set("TtZX"), tell=states)


def pass_gate(path: str, timeout_s: float = 200.0) -> None:
    """Wait until a `Gate` is open, in any process; first tell the gate that this function is there."""
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    _tell(path)
    try:
        opened, _, _ = select.select([end], [], [], timeout_s)
    finally:
        os.close(end)
    if not opened:
        raise TimeoutError(f"gate {path} was not opened within {timeout_s:g} s")


def _tell(path: str) -> None:
    arrivals = os.open(path + ARRIVALS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(arrivals, b"!")
    finally:
        os.close(arrivals)


class Gate:
    """A gate at which functions on workers wait (`pass_gate`) until the test opens it for good.

    It is a named pipe: the gate is open when the pipe holds a byte, which is never read. A file beside it has one
    byte for each function that came to the gate. A test that acts "while the function runs" must first
    `wait_for_arrival`: on a slow machine a scheduled function has often not begun.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Kept open in both directions: a pipe without readers and writers loses its bytes.
        self._pipe = os.open(path, os.O_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def open(self) -> None:
        os.write(self._pipe, b"!")

    @property
    def arrivals(self) -> int:
        """How often a function came to the gate; a repeated closure counts again."""
        try:
            return os.stat(self.path + ARRIVALS).st_size
        except FileNotFoundError:
            return 0

    def wait_for_arrival(self, count: int = 1) -> None:
        """Wait until functions came to the gate `count` times."""
        wait_until(
            lambda: self.arrivals >= count, tell=lambda: f"{self.arrivals} came, not {count}"
        )

    def close(self) -> None:
        """Release all waiting functions, also after a failed test."""
        self.open()
        os.unlink(self.path)
        os.close(self._pipe)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A closed gate."""
    with Gate(tmp_path / "gate") as made:
        yield made
