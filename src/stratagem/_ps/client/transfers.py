"""Wait for a parameter server that writes or reads its rows of a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeAlias, final

from stratagem import config
from stratagem._ps.client.server_connection import ServerConnection
from stratagem._wire import messages
from stratagem.errors import CheckpointCorrupt, CheckpointError

Urgent: TypeAlias = Callable[[], bool]
"""Returns whether a caller waits for a transfer; the server then writes without rests."""

_POLLS_S: Final = (0.002, 0.05)
"""Shortest and longest time between two questions, which is otherwise a sixteenth of the time so far."""

SAVE_STALL_S: Final = 3600.0
"""How long a server that writes a checkpoint may write no data: flushing 100 GB to a slow network disk takes that long."""


@final
class TransferTurn:
    """The right to save to or restore from the servers of a strategy: a server has one cut, and one transfer, at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted = False

    @property
    def is_wanted(self) -> bool:
        """True if another save or restore waits for the one that has the turn."""
        return self._is_wanted

    def is_taken(self) -> bool:
        """Return whether a save or restore has the turn; it then hurries."""
        self._is_wanted = taken = self._lock.locked()
        return taken

    def take(self) -> None:
        """Wait for the turn. Another thread may give it back.

        Raises:
            CheckpointError: the one before has not ended within an hour.
        """
        if self._lock.acquire(blocking=False):
            return
        self._is_wanted = True
        if not self._lock.acquire(timeout=SAVE_STALL_S):
            raise CheckpointError(
                f"another save or restore of the same parameter servers has not ended within {SAVE_STALL_S:g} s: its disk "
                "does not answer. Repair the disk and try again."
            )
        self._is_wanted = False

    def give_back(self) -> None:
        """Let the next save or restore begin."""
        self._is_wanted = False
        self._lock.release()


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
    moved = 0
    began = moved_at = time.monotonic()
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
        shortest_s, longest_s = _POLLS_S
        time.sleep(min(longest_s, max(shortest_s, (time.monotonic() - began) / 16)))
