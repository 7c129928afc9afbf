"""Guardian: what a test session has started does not outlive it, however the session ends.

A session killed by SIGKILL (a time limit, the kernel out of memory) runs no fixture to its end, and servers it
had started would go on. So a small process beside it waits for its end, and then kills whatever carries the session's mark
in its environment (`police.MARK`): children, and theirs. Loaded by the root ``conftest.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from police import MARK

# In a fresh interpreter without packages: it is there in 20 ms, and takes 8 MB.
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
while quiet < 3:  # one that is just being started may have no environment yet
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
    """Begins to watch this process: pytest itself, or one of its workers."""
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    _guardians.append(
        subprocess.Popen(
            [sys.executable, "-IS", "-c", _WATCH, str(os.getpid()), f"{MARK}={os.environ[MARK]}"],
            env=unmarked,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the session
        )
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """The session ends by itself, and its tests have cleaned up: the police has seen to that."""
    while _guardians:
        guardian = _guardians.pop()
        guardian.kill()
        guardian.wait(10.0)
