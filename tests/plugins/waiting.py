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

import pytest

LOOK_S = 0.01


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


def pass_gate(path: str, timeout_s: float = 200.0) -> None:
    """Wait until a `Gate` is open, in any process."""
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        opened, _, _ = select.select([end], [], [], timeout_s)
    finally:
        os.close(end)
    if not opened:
        raise TimeoutError(f"gate {path} was not opened within {timeout_s:g} s")


class Gate:
    """A gate at which functions on workers wait (`pass_gate`) until the test opens it for good.

    It is a named pipe: the gate is open when the pipe holds a byte, which is never read.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Kept open in both directions: a pipe without readers and writers loses its bytes.
        self._pipe = os.open(path, os.O_RDWR)

    def open(self) -> None:
        os.write(self._pipe, b"!")

    def close(self) -> None:
        """Release all waiting functions, also after a failed test."""
        self.open()
        os.unlink(self.path)
        os.close(self._pipe)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A closed gate."""
    made = Gate(tmp_path / "gate")
    yield made
    made.close()
