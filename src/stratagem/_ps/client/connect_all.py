"""Connect to every parameter server when a client starts.

Workers make one attempt: when they start, the servers are up. The session's owner waits (PSS-3), since the
servers may just be starting. It logs which servers are late, and does not wait where waiting cannot help. A
host name that is unknown may become known, for instance behind a headless service of Kubernetes when its pod is
ready: such a server is waited for like one that refuses connections.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final, NoReturn

from stratagem._ps.client.server_connection import ServerConnection
from stratagem._wire.connecting import check_destination, is_unknown_name, reason
from stratagem.errors import (
    AuthenticationError,
    ConnectionLost,
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

_FIRST_ATTEMPT_S: Final = 2.0
_LONGEST_ATTEMPT_S: Final = 20.0
"""For one attempt at one server: one whose machine swallows everything must not hide the others."""

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
    if not patient:
        for connection in connections:
            try:
                connection.open(timeout_s=timeout_s)
            except (ConnectionLost, DeadlineExceeded) as error:
                raise connection.fail(f"cannot be reached: {reason(error)}") from error
        return
    _refuse_invalid_addresses(connections)
    _Wait(connections, timeout_s).run()


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
        pause_s, attempt_s = _FIRST_PAUSE_S, _FIRST_ATTEMPT_S
        while True:
            for connection in list(self._missing):
                self._try(connection, attempt_s)
            if not self._missing:
                break
            if time.monotonic() + pause_s >= self._deadline:
                self._give_up()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, _LONGEST_PAUSE_S)
            attempt_s = min(attempt_s * 1.3, _LONGEST_ATTEMPT_S)
        if self._has_logged:
            waited_s = time.monotonic() - self._began
            _log.warning("all %d parameter servers answer after %.1f s", self._count, waited_s)

    def _try(self, connection: ServerConnection, attempt_s: float) -> None:
        left_s = self._deadline - time.monotonic()
        try:
            connection.open(timeout_s=max(0.1, min(attempt_s, left_s)))
        except (ConnectionLost, DeadlineExceeded) as error:
            self._missing[connection] = error
            if not self._has_logged and time.monotonic() - self._began >= LOG_AFTER_S:
                self._has_logged = True
                _log.warning(
                    "waiting for %s, up to %g s (%s)", self._describe(), self._timeout_s, _SETTING
                )
        except (AuthenticationError, ProtocolError) as error:  # it would give the same answer again
            where = f"{connection.task} at {connection.last_address!r}"
            raise type(error)(f"{where}: {error}") from error
        else:
            del self._missing[connection]

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
