"""How tests wait: for a condition, with a limit; and how they hold up a function on a worker.

Never by sleeping for as long as something is hoped to take.
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
    timeout_s: float = 30.0,
    *,
    tell: Callable[[], object] = lambda: "it is false",
) -> None:
    """Look again and again until a condition is true; fails after the limit, telling how it stands."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not as wanted within {timeout_s:g} s: {tell()}")
        pause.wait(LOOK_S)


def pass_gate(path: str, timeout_s: float = 50.0) -> None:
    """Wait for a `Gate`, in whichever process; returns at once when it is open already."""
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        opened, _, _ = select.select([end], [], [], timeout_s)
    finally:
        os.close(end)
    if not opened:
        raise TimeoutError(f"gate {path} was not opened within {timeout_s:g} s")


class Gate:
    """Functions on workers wait here, by `pass_gate`, until the test opens it; then it stays open.

    A named pipe: open means that there is a byte in it, which nobody takes out.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Held open for both ways: a pipe that nobody has open forgets its bytes.
        self._pipe = os.open(path, os.O_RDWR)

    def open(self) -> None:
        os.write(self._pipe, b"!")

    def close(self) -> None:
        """Lets go of whoever still waits, also after a test that failed."""
        self.open()
        os.unlink(self.path)
        os.close(self._pipe)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A closed gate."""
    made = Gate(tmp_path / "gate")
    yield made
    made.close()
