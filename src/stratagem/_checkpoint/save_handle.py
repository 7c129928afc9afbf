"""`SaveHandle`: a save that a thread is writing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final, final

from stratagem._checkpoint.directory import SavedCheckpoint
from stratagem.errors import CheckpointTimeout

SAVE_LIMIT_S: Final = 3600.0
"""Limit of every wait for a save: enough for 100 GB on a slow network disk."""


@final
class SaveHandle:
    """A save on its way to the disk.

    Attributes:
        step: the training step.
        paused_s: seconds that the caller waited while the state was copied.
    """

    def __init__(self, step: int, *, is_urgent: bool = False) -> None:
        self.step = step
        self.paused_s = 0.0
        self._began = time.monotonic()
        self._seconds = 0.0
        self._ended = threading.Event()
        self._saved: SavedCheckpoint | None = None
        self._error: BaseException | None = None
        self._seen = False
        self._urgent = is_urgent

    @property
    def done(self) -> bool:
        """True when the save has succeeded or failed."""
        return self._ended.is_set()

    @property
    def path(self) -> Path | None:
        """The checkpoint; None until it is complete."""
        return None if self._saved is None else self._saved.path

    @property
    def seconds(self) -> float:
        """Duration of the save, so far or in all."""
        return self._seconds or time.monotonic() - self._began

    @property
    def bytes(self) -> int:
        """Size of the checkpoint; 0 until it is complete."""
        return 0 if self._saved is None else self._saved.bytes

    def wait(self, timeout_s: float = SAVE_LIMIT_S) -> SavedCheckpoint:
        """Wait until the checkpoint is complete, and return it.

        Raises:
            CheckpointError: the save failed.
            CheckpointTimeout: it did not end within the limit; it goes on.
        """
        if not self._wait(timeout_s):
            raise CheckpointTimeout(
                f"the save of step {self.step} has not ended after {self.seconds:.1f} s (the limit is "
                f"{timeout_s:g} s). It continues: wait again, or check the disk."
            )
        if self._error is not None:
            self._seen = True
            raise self._error
        assert self._saved is not None
        return self._saved

    def _wait(self, timeout_s: float) -> bool:
        """Wait for the end of the save; return whether it has come."""
        self._urgent = True
        return self._ended.wait(timeout_s)

    def _is_urgent(self) -> bool:
        """Return whether a caller waits; parameter servers then write without rests."""
        return self._urgent

    def _end(self, saved: SavedCheckpoint | None, error: BaseException | None) -> None:
        self._seconds = time.monotonic() - self._began
        self._saved, self._error = saved, error
        self._ended.set()

    def _unseen_error(self) -> BaseException | None:
        """Return the error of a save that ended badly, the first time."""
        if not self.done or self._seen:
            return None
        self._seen = True
        return self._error

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "complete" if self.done else "running"
        return f"<SaveHandle step {self.step}, {state}, {self.seconds:.2f} s>"
