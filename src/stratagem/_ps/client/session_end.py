"""End a coordinator's session: all servers free its variables."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from stratagem._ps.client.server_connection import Membership, Pending, ServerConnection
from stratagem._wire import messages
from stratagem.errors import CoordinatorReplaced, ParameterServerLost

_log = logging.getLogger("stratagem.ps")


def end_session(connections: Sequence[ServerConnection], membership: Membership) -> None:
    """Ask every server to free the variables; wait for all together, for the heartbeat limit."""
    calls: list[tuple[ServerConnection, Pending]] = []
    for connection in connections:
        if connection.is_open:  # else the server is gone, and its variables with it
            pending = Pending(messages.CloseSession(session=membership.session), ())
            try:
                connection.send(pending, later=True)
            except CoordinatorReplaced as error:  # it was cut off, and connected again
                _log.debug("%s: %s", connection.task, error)
                continue
            connection.flush()
            calls.append((connection, pending))
    limit_s = max((connection.closing_limit_s() for connection, _ in calls), default=0.0)
    deadline = time.monotonic() + limit_s
    for connection, pending in calls:
        try:
            connection.collect(pending, timeout_s=max(0.0, deadline - time.monotonic()))
        except CoordinatorReplaced as error:
            _log.debug("%s: %s", connection.task, error)
        except ParameterServerLost as error:
            _log.warning(
                "%s did not confirm the end of the session; it frees the variables %g s after "
                "the connection has ended: %s",
                connection.task,
                membership.lease_s,
                error,
            )
