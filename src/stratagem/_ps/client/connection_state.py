"""Pure state machine of one connection to a parameter server.

::

    NEW ──opened──▶ OPEN ──broken──▶ BROKEN ──opened, same server──▶ OPEN
                      │                 │
                      └──────lost───────┴──opened, server without the variables──▶ LOST

A broken connection is made again by the next request. A lost one is not, since the server that held the
variables is gone, unless the coordinator restores them on another one (`restored`). `closed` leads from every state to CLOSED. `server_connection.py` does what the state says.
"""

from __future__ import annotations

import enum
from typing import Final, final

from typing_extensions import override

SURVIVAL: Final = (
    " A run survives the loss of a server with backups=1, or with a CheckpointManager that has saved to a directory "
    "that the servers may use (--checkpoint-dir)."
)
"""In the coordinator's error about a server that cannot be restored."""


class Phase(enum.Enum):
    """Phase in the life cycle of a connection."""

    NEW = "new"
    OPEN = "open"
    BROKEN = "broken"
    LOST = "lost"
    CLOSED = "closed"


@final
class ConnectionState:
    """Phase of a connection, and why it is not open.

    Attributes:
        phase: see the module's docstring.
        reason: why the connection is broken or lost, worded to follow the server's name.
        server: identity of the server process that holds the variables; empty before the first connection.

    Example:
        >>> state = ConnectionState()
        >>> state.opened("a")
        >>> state.broken("did not reply within 60 s")
        >>> state.opened("a")
        >>> state.phase
        <Phase.OPEN: 'open'>
        >>> state.broken("is gone")
        >>> state.opened("b")
        >>> state
        <ConnectionState lost: was restarted and has lost its variables>
    """

    __slots__ = ("phase", "reason", "server")

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self.reason = ""
        self.server = ""

    @property
    def is_usable(self) -> bool:
        """True if a request may be sent, if need be on a new connection."""
        return self.phase in (Phase.OPEN, Phase.BROKEN)

    def opened(self, server: str) -> None:
        """Note a connection to the server process with this identity."""
        if self.phase in (Phase.LOST, Phase.CLOSED):
            return
        if self.server not in ("", server):
            self.lost("was restarted and has lost its variables")
            return
        self.server = server
        self.phase, self.reason = Phase.OPEN, ""

    def broken(self, reason: str) -> None:
        """Note that the connection ended, or that the server did not answer on it."""
        if self.phase in (Phase.NEW, Phase.OPEN, Phase.BROKEN):
            self.phase, self.reason = Phase.BROKEN, reason

    def lost(self, reason: str) -> None:
        """Note that the server, or its part of the session, is gone for good."""
        if self.phase is not Phase.CLOSED:
            self.phase, self.reason = Phase.LOST, reason

    def restored(self, server: str) -> None:
        """Note that another server process has the variables now; the next request connects to it."""
        if self.phase is not Phase.CLOSED:
            self.server = server
            self.phase, self.reason = Phase.BROKEN, "was restored"

    def closed(self) -> None:
        """Note that this process closed the connection."""
        self.phase, self.reason = Phase.CLOSED, "was closed by this process"

    @override
    def __repr__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"<ConnectionState {self.phase.value}{why}>"
