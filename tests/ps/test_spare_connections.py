"""Connections that a save leaves for the next one (`_ps/client/server_replacement.py`)."""

import threading
from types import SimpleNamespace
from typing import Any

from stratagem._ps.client.server_replacement import ServerReplacement

WAIT_S = 30.0


class Connection:
    """A connection that notes its end."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class SlowDict(dict[int, Any]):
    """A dict whose owner is called by another thread after a look into it."""

    def __init__(self, meanwhile: Any) -> None:
        super().__init__()
        self._meanwhile = meanwhile
        self.thread: threading.Thread | None = None

    def __contains__(self, key: object) -> bool:
        self.thread = threading.Thread(target=self._meanwhile)
        self.thread.start()
        self.thread.join(0.2)  # ends in this time, unless it waits for its turn
        return super().__contains__(key)


def replacement() -> Any:
    nothing: Any = SimpleNamespace()
    return ServerReplacement([], nothing, nothing, nothing, nothing)


def test_a_connection_that_is_kept_while_the_client_ends_is_closed() -> None:
    client, connection = replacement(), Connection()
    client._spare = slow = SlowDict(client.close_spare)
    client.keep_spare(0, connection)
    assert slow.thread is not None
    slow.thread.join(WAIT_S)
    assert not slow.thread.is_alive()
    assert connection.is_closed


def test_after_the_end_no_connection_is_kept() -> None:
    client, first, second = replacement(), Connection(), Connection()
    client.keep_spare(0, first)
    client.close_spare()
    client.keep_spare(1, second)
    assert first.is_closed
    assert second.is_closed
    assert client.take_spare(0) is None
