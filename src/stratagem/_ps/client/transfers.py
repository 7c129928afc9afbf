"""Waiting for a parameter server that writes or reads its rows of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from stratagem._ps.client.server_connection import ServerConnection
from stratagem._wire import messages
from stratagem.errors import CheckpointCorrupt, CheckpointError

_FIRST_POLL_S: Final = 0.002
_LONGEST_POLL_S: Final = 0.05
"""Between two questions."""


def follow(
    connection: ServerConnection, progress: Callable[[int], None] | None = None
) -> messages.Transfer:
    """Wait until a server has written or read its rows; return its report.

    Raises:
        CheckpointCorrupt: a file is missing or damaged.
        CheckpointError: it failed.
    """
    pause_s, moved = _FIRST_POLL_S, 0
    while True:
        answer = connection.request(messages.AskTransfer()).message
        assert isinstance(answer, messages.Transfer)
        if progress is not None:
            progress(answer.moved - moved)
        moved = answer.moved
        if answer.damaged:
            raise CheckpointCorrupt(answer.failure, path=answer.damaged)
        if answer.failure:
            raise CheckpointError(f"{connection.task} failed: {answer.failure}")
        if answer.done:
            return answer
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
