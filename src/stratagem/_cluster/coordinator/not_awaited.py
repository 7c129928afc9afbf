"""Log the scheduled functions and the errors that a program did not wait for."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine

_log = logging.getLogger("stratagem.coordinator")

_running: weakref.WeakSet[Engine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_running.clear)  # a forked child does not own the engines


def log_at_exit(engine: Engine) -> None:
    """Log what the end of the program loses, if the engine is not closed before."""
    _running.add(engine)


def locked_not_awaited(engine: Engine) -> list[str]:
    """Return one sentence for an error that no call has raised, and one for functions that have not finished."""
    found, results = [], engine.result_condition
    if results.error is not None and not results.error_delivered:
        found.append(
            f"no call has raised this error of a scheduled function or a task: {results.error!r}. Call "
            "join() first, which raises it"
        )
    if not engine.queue.idle:
        found.append(
            f"not all scheduled functions have finished ({engine.queue!r}); the others are cancelled. "
            "Call join() first, which waits for them"
        )
    return found


@atexit.register
def _log_not_awaited() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # Python has printed the error that ended the program
    for engine in list(_running):
        with engine.lock:
            found = [] if engine.closed else locked_not_awaited(engine)
        for text in found:
            _log.warning("the program ends: %s", text)
