"""What tests of parameter servers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stratagem._ps.server.loop import ParameterServer


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    """One server."""
    with ParameterServer("127.0.0.1:0", task="/job:ps/task:0").start() as running:
        yield running
