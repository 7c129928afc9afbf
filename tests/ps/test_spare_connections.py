"""Connections that saves and restores use in turn (`_ps/client/server_replacement.py`)."""

from types import SimpleNamespace
from typing import Any

import pytest

from stratagem._ps.client.server_replacement import ServerReplacement


class Connection:
    """A connection that notes its end."""

    def __init__(self, server: str = "process 1") -> None:
        self.server = server
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def replacement(monkeypatch: pytest.MonkeyPatch, made: list[Connection]) -> Any:
    nothing: Any = SimpleNamespace()
    known: Any = [Connection()]
    monkeypatch.setattr(ServerReplacement, "connect_beside", lambda *_: made.pop(0))
    return ServerReplacement(known, nothing, nothing, nothing, nothing)


def test_a_connection_is_used_again_until_its_server_is_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Connection(), Connection("process 2")
    client = replacement(monkeypatch, [first, second])
    assert client.beside(0) is client.beside(0) is first
    client._connections[0].server = "process 2"
    assert client.beside(0) is second
    assert first.is_closed


def test_a_connection_that_is_opened_while_the_client_ends_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Connection()
    client = replacement(monkeypatch, [])

    def ends(*_: object) -> Connection:
        client.close_beside()
        return connection

    monkeypatch.setattr(ServerReplacement, "connect_beside", ends)
    assert client.beside(0) is connection
    assert connection.is_closed
