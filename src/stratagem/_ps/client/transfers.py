"""Wait for a parameter server that writes or reads its rows of a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from stratagem import config
from stratagem._ps.client.server_connection import ServerConnection
from stratagem._wire import messages
from stratagem.errors import CheckpointCorrupt, CheckpointError

Urgent: TypeAlias = Callable[[], bool]
"""Returns whether a caller waits for a transfer; the server then writes without rests."""

_FIRST_POLL_S: Final = 0.002
_LONGEST_POLL_S: Final = 0.05
"""Between two questions."""


def read_stall_s() -> float:
    """Return how long a server that reads a checkpoint may get no data: five times ``STRATAGEM_WIRE_TIMEOUT_S``."""
    return 5 * config.wire_timeout_s()


def always() -> bool:
    """Return that a caller waits."""
    return True


def follow(
    connection: ServerConnection,
    progress: Callable[[int], None] | None = None,
    stall_s: float = math.inf,
    urgent: Urgent = always,
) -> messages.Transfer:
    """Wait until a server has written or read its rows; return its report.

    Args:
        connection: to the server.
        progress: gets the number of bytes that were written or read since it was last called.
        stall_s: how long this number may be 0. To flush a file to disk may take any time.
        urgent: whether a caller waits; called repeatedly.

    Raises:
        CheckpointCorrupt: a file is missing or damaged.
        CheckpointError: it failed.
    """
    pause_s, moved = _FIRST_POLL_S, 0
    moved_at = time.monotonic()
    while True:
        answer = connection.request(messages.AskTransfer(hurry=urgent())).message
        assert isinstance(answer, messages.Transfer)
        if progress is not None:
            progress(answer.moved - moved)
        if answer.moved != moved:
            moved, moved_at = answer.moved, time.monotonic()
        if answer.damaged:
            raise CheckpointCorrupt(answer.failure, path=answer.damaged)
        if answer.failure:
            raise CheckpointError(f"{connection.task} failed: {answer.failure}")
        if answer.done:
            return answer
        if time.monotonic() - moved_at > stall_s:
            raise CheckpointError(
                f"{connection.task} has read {moved} bytes of its rows, and no more for {stall_s:g} s: the "
                "disk of the checkpoint does not answer. Repair it and restore again, or raise "
                "STRATAGEM_WIRE_TIMEOUT_S (the limit is five times this)."
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
