"""Guardian: end all processes of a test session when the session ends, even by SIGKILL.

A killed session (time limit, out of memory) runs no fixture teardown, and its servers would go on. A small
process waits for the session's end and kills every process that has the session's mark in its environment
(`police.MARK`). Loaded by the root ``conftest.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from police import MARK

# Runs in an interpreter without packages: it starts in 20 ms and takes 8 MB.
_WATCH = """
import os, select, signal, sys, time
from pathlib import Path

session, mark = int(sys.argv[1]), sys.argv[2].encode()
try:
    select.select([os.pidfd_open(session)], [], [])
except ProcessLookupError:
    pass

def left_over():
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\\0"):
                    yield int(entry)
            except OSError:
                pass

quiet = 0
while quiet < 3:  # a process that is just starting may have no environment yet
    found = list(left_over())
    quiet = 0 if found else quiet + 1
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    time.sleep(0.1)
"""

_guardians: list[subprocess.Popen[bytes]] = []


def pytest_configure(config: pytest.Config) -> None:
    """Watch this process: pytest itself, or one of its workers."""
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    _guardians.append(
        subprocess.Popen(
            [sys.executable, "-IS", "-c", _WATCH, str(os.getpid()), f"{MARK}={os.environ[MARK]}"],
            env=unmarked,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end the guardian
        )
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the guardian: the session ends normally, and the police has checked that tests cleaned up."""
    while _guardians:
        guardian = _guardians.pop()
        guardian.kill()
        guardian.wait(10.0)
