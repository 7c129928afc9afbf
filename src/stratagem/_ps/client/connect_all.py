"""Reaching every parameter server at the start: whoever is late is waited for, by name.

Workers make one attempt: when they come, the servers are there. The session's owner waits (PSS-3), since the servers may just be
starting; but it says for whom, and does not wait where waiting is of no use. A name that nobody knows may be known in a moment (behind Kubernetes' headless
services, when its pod is ready): it is waited for as a server that refuses is.
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

TELL_AFTER_S: Final = 2.0
"""Silence that a person at a terminal begins to wonder about; servers of a script are up by then."""

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


def reach_all(links: Sequence[ServerConnection], *, timeout_s: float, patient: bool) -> None:
    """Opens every link.

    Args:
        links: to the servers.
        timeout_s: for all of them together if patient, else for each.
        patient: servers that do not answer are tried again until the time is over.

    Raises:
        ValueError: an address that is none.
        ParameterServerLost: servers that cannot be reached, all of them named.
        AuthenticationError, ProtocolError: one is not of ours, or of another cluster.
    """
    if not patient:
        for link in links:
            try:
                link.open(timeout_s=timeout_s)
            except (ConnectionLost, DeadlineExceeded) as error:
                raise link.declare_lost(f"cannot be reached: {reason(error)}") from error
        return
    _refuse_impossible(links)
    _Wait(links, timeout_s).run()


class _Wait:
    """Rounds of attempts at the servers that have not answered yet."""

    def __init__(self, links: Sequence[ServerConnection], timeout_s: float) -> None:
        self._missing: dict[ServerConnection, WireError | None] = dict.fromkeys(links)
        self._count = len(links)
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._told = False

    def run(self) -> None:
        pause_s, attempt_s = _FIRST_PAUSE_S, _FIRST_ATTEMPT_S
        while True:
            for link in list(self._missing):
                self._try(link, attempt_s)
            if not self._missing:
                break
            if time.monotonic() + pause_s >= self._deadline:
                self._give_up()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, _LONGEST_PAUSE_S)
            attempt_s = min(attempt_s * 1.3, _LONGEST_ATTEMPT_S)
        if self._told:
            waited_s = time.monotonic() - self._began
            _log.warning("all %d parameter servers answer after %.1f s", self._count, waited_s)

    def _try(self, link: ServerConnection, attempt_s: float) -> None:
        left_s = self._deadline - time.monotonic()
        try:
            link.open(timeout_s=max(0.1, min(attempt_s, left_s)))
        except (ConnectionLost, DeadlineExceeded) as error:
            self._missing[link] = error
            if not self._told and time.monotonic() - self._began >= TELL_AFTER_S:
                self._told = True
                _log.warning(
                    "waiting for %s, up to %g s (%s)", self._who(), self._timeout_s, _SETTING
                )
        except (AuthenticationError, ProtocolError) as error:  # it answered: it will again
            raise type(error)(f"{link.task} at {link.address!r}: {error}") from error
        else:
            del self._missing[link]

    def _who(self) -> str:
        return "; ".join(
            f"{link.task} at {link.address!r}: {'not tried yet' if error is None else reason(error)}"
            for link, error in self._missing.items()
        )

    def _give_up(self) -> NoReturn:
        first, error = next(iter(self._missing.items()))
        missing = f"{len(self._missing)} of {self._count}" if self._count > 1 else "the one"
        hint = _NAMES_HINT if any(map(is_unknown_name, self._missing.values())) else ""
        raise ParameterServerLost(
            f"{missing} parameter server{'s' if self._count > 1 else ''} did not answer within "
            f"{self._timeout_s:g} s: {self._who()}. Start them, or correct their addresses in the "
            f"cluster specification; {_SETTING} changes how long they are waited for.{hint}",
            task=first.task,
        ) from error


def _refuse_impossible(links: Sequence[ServerConnection]) -> None:
    """Finds at once what no waiting will mend."""
    for link in links:
        try:
            check_destination(link.address)
        except ValueError as error:
            raise ValueError(f"the address of {link.task} is wrong: {error}.") from error
