"""A progress bar for long saves and restores, shown only on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from stratagem._ps.blocks.block_file import Progress

_PATIENCE_S: Final = 1.0
"""Shorter operations show no bar."""


@contextmanager
def shown_progress(label: str, total: int) -> Iterator[Progress | None]:
    """Show how much of `total` bytes is done while the block runs; yields the function to call.

    Where standard error is no terminal, yields None.
    """
    if not sys.stderr.isatty():
        yield None
        return
    bar = _LateBar(label, total)
    try:
        yield bar.advance
    finally:
        bar.stop()


class _LateBar:
    """A bar that appears after a second. Reader threads advance it side by side."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._done = 0
        self._bar: Any = None
        self._task: Any = None

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._bar is None and time.monotonic() - self._since > _PATIENCE_S:
                self._start()
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)

    def _start(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._label, total=self._total)
        self._bar.start()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
