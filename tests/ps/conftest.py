"""What tests of parameter servers share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from warm_start import Program

from stratagem._ps.server.loop import ParameterServer


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    """One server."""
    with ParameterServer("127.0.0.1:0", task="/job:ps/task:0").start() as running:
        yield running


SERVER = """
import sys
from stratagem._ps.server.loop import ParameterServer
server = ParameterServer("127.0.0.1:0", task="/job:ps/task:0")
print(server.address, flush=True)
server.serve()
"""


@pytest.fixture
def server_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    child = Program([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.communicate(timeout=120.0)
