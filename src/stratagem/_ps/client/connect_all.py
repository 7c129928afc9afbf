"""Connect to every parameter server when a client starts, and end a coordinator's session on all of them.

Workers make one attempt: when they start, the servers are up. The session's owner waits (PSS-3), since the
servers may just be starting. It logs which servers are late, and does not wait where waiting cannot help. A
host name that is unknown may become known, for instance behind a headless service of Kubernetes when its pod is
ready: such a server is waited for like one that refuses connections.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NoReturn

from stratagem._ps.client.server_connection import Membership, Pending, ServerConnection
from stratagem._wire import messages
from stratagem._wire.connecting import check_destination, is_unknown_name, reason
from stratagem._wire.round_trip import attempt_limit_s
from stratagem.errors import (
    AuthenticationError,
    ConnectionLost,
    CoordinatorReplaced,
    DeadlineExceeded,
    ParameterServerLost,
    ProtocolError,
    WireError,
)

_log = logging.getLogger("stratagem.ps")

LOG_AFTER_S: Final = 2.0
"""Silence after which a person at a terminal begins to wonder; servers of a script are up by then."""

_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 1.0
"""Between two rounds of attempts."""

_AT_ONCE: Final = 32
"""Attempts at the same time."""

_SETTING: Final = "STRATAGEM_SERVER_WAIT_S"

_NAMES_HINT: Final = (
    " Names behind a headless service of Kubernetes are known while their pod is ready, or earlier with "
    "publishNotReadyAddresses."
)


def connect_all(
    connections: Sequence[ServerConnection], *, timeout_s: float, patient: bool
) -> None:
    """Open every connection.

    Args:
        connections: to the servers.
        timeout_s: for all of them together if patient, else for each.
        patient: try servers that do not answer again until the time is over.

    Raises:
        ValueError: an address is invalid.
        ParameterServerLost: servers cannot be reached; all of them are named.
        AuthenticationError, ProtocolError: a task of another kind or cluster answers.
    """
    if patient:
        _refuse_invalid_addresses(connections)
        _Wait(connections, timeout_s).run()
        return
    for connection, error in _open_side_by_side(connections, timeout_s).items():
        if isinstance(error, ConnectionLost | DeadlineExceeded):
            raise connection.fail(f"cannot be reached: {reason(error)}") from error
        if error is not None:
            raise error


def _open_side_by_side(
    connections: Sequence[ServerConnection], attempt_s: float
) -> dict[ServerConnection, Exception | None]:
    """Make one attempt at each server, all at the same time; return the errors.

    One whose machine discards every packet does not delay the others, and a slow network costs its round trips once.
    """
    stop = threading.Event()

    def attempt(connection: ServerConnection) -> Exception | None:
        try:
            connection.open(timeout_s=attempt_s, stopped=stop.is_set)
        except Exception as error:  # noqa: BLE001 - returned to the caller's thread
            return error
        return None

    if len(connections) == 1:
        return {connections[0]: attempt(connections[0])}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="stratagem-connect") as pool:
        try:
            return dict(zip(connections, pool.map(attempt, connections), strict=True))
        finally:
            stop.set()  # Ctrl-C


class _Wait:
    """Rounds of attempts at the servers that have not answered yet."""

    def __init__(self, connections: Sequence[ServerConnection], timeout_s: float) -> None:
        self._missing: dict[ServerConnection, WireError | None] = dict.fromkeys(connections)
        self._count = len(connections)
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._has_logged = False

    def run(self) -> None:
        pause_s, attempt_s = _FIRST_PAUSE_S, attempt_limit_s()
        while True:
            left_s = max(0.1, self._deadline - time.monotonic())
            found = _open_side_by_side(list(self._missing), min(attempt_s, left_s))
            for connection, error in found.items():
                self._note(connection, error)
            if not self._missing:
                break
            self._log_late()
            if time.monotonic() + pause_s >= self._deadline:
                self._give_up()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, _LONGEST_PAUSE_S)
        if self._has_logged:
            waited_s = time.monotonic() - self._began
            _log.warning("all parameter servers answer after %.1f s", waited_s)

    def _note(self, connection: ServerConnection, error: Exception | None) -> None:
        if error is None:
            del self._missing[connection]
        elif isinstance(error, ConnectionLost | DeadlineExceeded):
            self._missing[connection] = error
        elif isinstance(error, AuthenticationError | ProtocolError):  # it would answer the same
            where = f"{connection.task} at {connection.last_address!r}"
            raise type(error)(f"{where}: {error}") from error
        else:
            raise error

    def _log_late(self) -> None:
        if not self._has_logged and time.monotonic() - self._began >= LOG_AFTER_S:
            self._has_logged = True
            _log.warning(
                "waiting for %s, up to %g s (%s)", self._describe(), self._timeout_s, _SETTING
            )

    def _describe(self) -> str:
        return "; ".join(
            f"{one.task} at {one.last_address!r}: "
            f"{'not tried yet' if error is None else reason(error)}"
            for one, error in self._missing.items()
        )

    def _give_up(self) -> NoReturn:
        first, error = next(iter(self._missing.items()))
        missing = f"{len(self._missing)} of {self._count}" if self._count > 1 else "the one"
        hint = _NAMES_HINT if any(map(is_unknown_name, self._missing.values())) else ""
        raise ParameterServerLost(
            f"{missing} parameter server{'s' if self._count > 1 else ''} did not answer within "
            f"{self._timeout_s:g} s: {self._describe()}. Start them, or correct their addresses in the "
            f"cluster specification; {_SETTING} changes how long they are waited for.{hint}",
            task=first.task,
        ) from error


def _refuse_invalid_addresses(connections: Sequence[ServerConnection]) -> None:
    """Find at once what no waiting will mend."""
    for connection in connections:
        try:
            check_destination(connection.find_address())
        except ConnectionLost:
            continue  # the resolver may know the address later
        except ValueError as error:
            raise ValueError(f"the address of {connection.task} is wrong: {error}.") from error


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
