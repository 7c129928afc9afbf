"""Wait for a parameter server that writes or reads its rows of a checkpoint."""

from __future__ import annotations

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

SAVE_STALL_S: Final = 3600.0
"""How long a server that writes a checkpoint may write no data: flushing 100 GB to a slow network disk takes that long."""


def read_stall_s() -> float:
    """Return how long a server that reads a checkpoint may get no data: five times ``STRATAGEM_WIRE_TIMEOUT_S``."""
    return 5 * config.wire_timeout_s()


def always() -> bool:
    """Return that a caller waits."""
    return True


def follow(
    connection: ServerConnection,
    progress: Callable[[int], None] | None = None,
    stall_s: float = SAVE_STALL_S,
    urgent: Urgent = always,
) -> messages.Transfer:
    """Wait until a server has written or read its rows; return its report.

    Args:
        connection: to the server.
        progress: gets the number of bytes that were written or read since it was last called.
        stall_s: how long this number may be 0.
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
            hint = ""
            if stall_s == read_stall_s():
                hint = ", or raise STRATAGEM_WIRE_TIMEOUT_S (a restore may wait five times as long)"
            raise CheckpointError(
                f"{connection.task} has transferred {moved} bytes of the checkpoint, and no more for {stall_s:g} s: "
                f"its disk does not answer. Repair it and try again{hint}."
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
