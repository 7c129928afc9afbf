"""Control connections: pings beside the data, and their end."""

from __future__ import annotations

import pytest

from stratagem._ps.client.server_liveness import ControlConnections
from stratagem._ps.server.loop import ParameterServer
from stratagem.errors import ParameterServerLost


def test_requests_during_and_after_close_open_nothing() -> None:
    """A watching thread may be about to ping when its coordinator is forgotten."""
    with ParameterServer("127.0.0.1:0").start() as server:
        control = ControlConnections([("/job:ps/task:0", server.address)], key=None)
        assert control.ping(0, timeout_s=60.0).busy_s == 0.0
        control.close()
        control.close()
        with pytest.raises(ParameterServerLost, match="closed by this process"):
            control.ping(0, timeout_s=60.0)
        assert repr(control) == "<ControlConnections 0 of 1 open>"
