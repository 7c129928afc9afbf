"""Control connections: pings beside the data, and their end."""

from __future__ import annotations

import threading

import pytest

from stratagem._ps.client.server_connection import Membership, ServerConnection
from stratagem._ps.client.server_liveness import ControlConnections
from stratagem._ps.server.loop import ParameterServer
from stratagem.config import ClusterOptions


def control_of(server: ParameterServer) -> ControlConnections:
    membership = Membership(session="", task="")
    return ControlConnections(
        [ServerConnection("/job:ps/task:0", server.address, membership)], key=None
    )


def test_checks_after_close_open_nothing() -> None:
    """A watching thread may be about to check when its coordinator is forgotten."""
    with ParameterServer("127.0.0.1:0").start() as server:
        control = control_of(server)
        control.await_answers(ClusterOptions(), of=[0])
        assert repr(control) == "<ControlConnections 1 of 1 open>"
        control.close()
        control.close()
        control.check_all(ClusterOptions())
        assert repr(control) == "<ControlConnections 0 of 1 open>"


def test_close_may_come_before_a_thread_that_connects_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The garbage collector closes a deleted strategy in any thread, while a watching thread connects again."""
    start = threading.Thread.start

    def close_and_start(thread: threading.Thread) -> None:
        if thread.name.startswith("stratagem-connect"):
            control.close()
        start(thread)

    with ParameterServer("127.0.0.1:0").start() as server:
        control = control_of(server)
        monkeypatch.setattr(threading.Thread, "start", close_and_start)
        control.await_answers(ClusterOptions(), of=[0])
        assert repr(control) == "<ControlConnections 0 of 1 open>"
