"""Background threads of a coordinator: heartbeats, closures, parameter servers, and the resolver.

They report events to the engine. The first thread never waits for another process: otherwise a worker that
hangs in the middle of a large message would delay the heartbeats to the others.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
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
        self._threads: list[threading.Thread] = []
        self._heartbeat_at = 0.0
        self._progress_at = time.monotonic()
        self._finished = 0
        self._no_worker_since: float | None = None
        self._out_of_reach_since: dict[str, float] = {}

    def start(self) -> None:
        """Start the threads."""
        engine, options = self._engine, self._engine.options
        servers = engine.views.servers
        checks: dict[str, tuple[float, list[Callable[[], None]]]] = {
            "heartbeats": (TICK_S, [self._check_links, self._check_workers, self._check_progress]),
            "closures": (TICK_S, [engine.tick]),
            "servers": (
                min(TICK_S, options.heartbeat_s),
                [
                    lambda: servers.check_servers(options),
                    engine.recoveries.repair_backups,
                    self._check_paths,
                ],
            ),
        }
        if engine.check_membership is not None and options.membership_s > 0:
            checks["membership"] = options.membership_s, [engine.check_membership]
        for name, what in checks.items():
            thread = threading.Thread(
                target=self._run, args=what, name=f"stratagem-watch-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self, timeout_s: float) -> None:
        """End the threads. May be called again."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout_s)

    def _run(self, every_s: float, checks: Sequence[Callable[[], None]]) -> None:
        while not self._stop.wait(every_s):
            for check in checks:
                try:
                    check()
                except ParameterServerLost as error:
                    if not self._stop.is_set():
                        self._engine.server_lost(error)
                except Exception:  # noqa: BLE001 - the thread must survive any error
                    if not self._stop.is_set():
                        _log.exception("a check of the coordinator failed")

    def _check_links(self) -> None:
        """Send heartbeats, and find workers that are silent; end an engine that nothing refers to."""
        if self._engine.abandoned.is_set():
            self._engine.close()
            return
        now = time.monotonic()
        due = now - self._heartbeat_at >= self._engine.options.heartbeat_s
        if due:
            self._heartbeat_at = now
        for link in list(self._engine.links.values()):
            link.watch(now, send_heartbeat=due)

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

    def _check_workers(self) -> None:
        """Report closures that have waited too long for any worker."""
        now, queue = time.monotonic(), self._engine.queue
        with self._engine.lock:
            waits = queue.waits_for_workers
        if not waits:
            self._no_worker_since = None
        elif self._no_worker_since is None:
            self._no_worker_since = now
        elif now - self._no_worker_since > self._engine.options.worker_wait_s:
            self._engine.no_workers(now - self._no_worker_since)
            self._no_worker_since = None

    def _check_progress(self) -> None:
        """Log the stacks of all threads when no closure has finished for too long (WDG-1)."""
        now, limit_s = time.monotonic(), self._engine.options.watchdog_s
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
