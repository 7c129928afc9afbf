"""Replies that are sent from the memory of variables, and copied only if a write comes before they are sent."""

from __future__ import annotations

from typing import Final, final

from typing_extensions import override

from stratagem._ps.server.data_connection import DataConnection
from stratagem._wire import messages
from stratagem._wire.messages import Message

_READING: Final = frozenset(
    (
        messages.Read,
        messages.AskVersions,
        messages.FinishedClosures,
        messages.Ping,
        messages.AskStats,
    )
)
"""Messages that change no value. Before any other, lent memory is copied."""


@final
class LentReplies:
    """Connections with queued replies whose buffers are a session's own memory.

    One thread does everything that changes this memory, one message after another. A checkpoint that is being restored
    is the exception: another thread writes.
    """

    def __init__(self) -> None:
        self._connections: set[DataConnection] = set()

    def before(self, kind: type[Message]) -> None:
        """Copy what is not sent yet, unless a message of this kind changes no value."""
        if self._connections and kind not in _READING:
            for connection in self._connections:
                connection.channel.keep_unsent()
            self._connections.clear()

    def flush(self, connection: DataConnection) -> None:
        """Send what the socket takes now; the rest stays where it is.

        Raises:
            ConnectionLost: the client is gone.
        """
        if connection.channel.flush():
            return
        session = connection.session
        if session is None or session.is_checkpointing:
            connection.channel.keep_unsent()
        else:
            self._connections.add(connection)

    def forget(self, connection: DataConnection) -> None:
        """Note that a connection has ended."""
        self._connections.discard(connection)

    @override
    def __repr__(self) -> str:
        return f"<LentReplies of {len(self._connections)} connections>"
