"""Background threads of a coordinator: heartbeats, closures, parameter servers, and the resolver.

They report events to the engine. The first thread never waits for another process: otherwise a worker that
hangs in the middle of a large message would delay the heartbeats to the others.
"""

from __future__ import annotations

import functools
import io
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from stratagem.errors import ParameterServerLost

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine

_log = logging.getLogger("stratagem.coordinator")

TICK_S = 0.1  # how often the threads look: bounds how long a closure waits behind a long one


@final
class WatchThreads:
    """The watch threads of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"stratagem-watch-{name}", daemon=True)
            for name, run in (
                ("heartbeats", self._watch_heartbeats),
                ("closures", self._watch_closures),
                ("servers", self._watch_servers),
                ("membership", self._watch_membership),
            )
        ]
        self._progress_at = time.monotonic()
        self._finished = 0
        self._no_worker_since: float | None = None
        self._out_of_reach_since: dict[str, float] = {}

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float) -> None:
        """End the threads. May be called again."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout_s)

    def _watch_heartbeats(self) -> None:
        sent_at = 0.0
        while not self._stop.wait(TICK_S):
            if self._engine.abandoned.is_set():
                self._engine.close()
                return
            now = time.monotonic()
            due = now - sent_at >= self._engine.options.heartbeat_s
            if due:
                sent_at = now
            for link in list(self._engine.links.values()):
                self._guard(functools.partial(link.watch, now, send_heartbeat=due))
            self._check_workers(now)
            self._check_progress(now)

    def _watch_closures(self) -> None:
        while not self._stop.wait(TICK_S):
            self._guard(self._engine.tick)

    def _watch_servers(self) -> None:
        options = self._engine.options
        while not self._stop.wait(min(TICK_S, options.heartbeat_s)):
            self._guard(lambda: self._engine.views.servers.check_servers(options))
            self._guard(self._engine.recoveries.repair_backups)
            self._guard(self._check_paths)

    def _watch_membership(self) -> None:
        check, every_s = self._engine.check_membership, self._engine.options.membership_s
        while check is not None and every_s > 0 and not self._stop.wait(every_s):
            self._guard(check)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ParameterServerLost as error:
            if not self._stop.is_set():
                self._engine.server_lost(error)
        except Exception:  # noqa: BLE001 - the thread must survive any error
            if not self._stop.is_set():
                _log.exception("a check of the coordinator failed")

    def _check_paths(self) -> None:
        """Raise the error of a server that a majority of the workers has not reached for too long."""
        now = time.monotonic()
        errors = self._engine.servers_out_of_reach()
        since = {task: self._out_of_reach_since.get(task, now) for task in errors}
        self._out_of_reach_since = since
        for task, error in errors.items():
            if now - since[task] > self._engine.options.partition_limit_s:
                del since[task]
                raise error

    def _check_workers(self, now: float) -> None:
        """Report closures that have waited too long for any worker."""
        queue = self._engine.queue
        with self._engine.lock:
            waits = queue.waits_for_workers
        if not waits:
            self._no_worker_since = None
        elif self._no_worker_since is None:
            self._no_worker_since = now
        elif now - self._no_worker_since > self._engine.options.worker_wait_s:
            self._engine.no_workers(now - self._no_worker_since)
            self._no_worker_since = None

    def _check_progress(self, now: float) -> None:
        """Log the stacks of all threads when no closure has finished for too long (WDG-1)."""
        limit_s = self._engine.options.watchdog_s
        with self._engine.lock:
            finished = self._engine.closures.finished
            busy = not self._engine.queue.idle
            state = repr(self._engine.queue)
        if limit_s <= 0 or finished != self._finished or not busy:
            self._finished = finished
            self._progress_at = now
        elif now - self._progress_at >= limit_s:
            _log.warning(
                "no closure finished for %g s: %s%s", now - self._progress_at, state, _all_stacks()
            )
            self._progress_at = now


def _all_stacks() -> str:
    text = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        text.write(f"\nThread {names.get(ident, ident)}:\n")
        traceback.print_stack(frame, file=text)
    return text.getvalue()
