"""Three threads beside a coordinator's engine: for signs of life, for work, for the servers.

They only notice; what follows is decided by the engine. The first does nothing that can wait: a worker
that hangs in the middle of a large message would otherwise keep everybody from noticing, and from
telling the other workers that their coordinator lives. Sends that must not happen under the engine's
lock (recalls) are made by the second.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from typing_extensions import override

from stratagem._cluster.coordinator.closure_queue import RecallClosures
from stratagem._cluster.launch.fork_server import dump_stacks
from stratagem._wire import messages
from stratagem.errors import ParameterServerLost

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine

_log = logging.getLogger("stratagem.coordinator")

TICK_S = 0.1
"""How often workers and servers are looked after: bounds how long a closure waits behind a long one."""


@final
class WatchThreads:
    """The watching threads of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recalls: deque[RecallClosures] = deque()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch_life, name="stratagem-watch-life", daemon=True),
            threading.Thread(
                target=self._watch_workers, name="stratagem-watch-workers", daemon=True
            ),
            threading.Thread(
                target=self._watch_servers, name="stratagem-watch-servers", daemon=True
            ),
        ]
        self._idle_since = time.monotonic()
        self._seen = 0
        self._alone_since: float | None = None

    def start(self) -> None:
        """Begins to watch."""
        for thread in self._threads:
            thread.start()

    def recall(self, action: RecallClosures) -> None:
        """Asks a worker, soon, for what it has not started."""
        self._recalls.append(action)
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Ends the threads. May be called again."""
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout_s)

    def _watch_life(self) -> None:
        beat_at = 0.0
        while not self._stop.wait(TICK_S):
            if self._engine.abandoned:
                self._engine.close()
                return
            self._guard(self._engine.look_for_silence)
            now = time.monotonic()
            if now - beat_at >= self._engine.options.heartbeat_s:
                beat_at = now
                self._guard(self._engine.beat)
            self._look_for_workers(now)
            self._look_for_progress(now)

    def _watch_workers(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(TICK_S)
            self._wake.clear()
            while self._recalls:
                action = self._recalls.popleft()
                link = self._engine.links[action.worker]
                link.notify(messages.Recall(closures=action.closures))
            self._guard(self._engine.tick)

    def _watch_servers(self) -> None:
        options = self._engine.options
        while not self._stop.wait(min(TICK_S, options.heartbeat_s)):
            self._guard(lambda: self._engine.views.check_servers(options))

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ParameterServerLost as error:
            if not self._stop.is_set():
                self._engine.server_lost(error)
        except Exception:  # noqa: BLE001 - a watcher that ended would be missed by nobody, until it is needed
            if not self._stop.is_set():
                _log.exception("watching failed")

    def _look_for_workers(self, now: float) -> None:
        queue = self._engine.queue
        with self._engine.lock:
            alone = not queue.idle and queue.workers_up() == 0
        if not alone:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self._engine.options.worker_wait_s:
            self._engine.no_workers(now - self._alone_since)
            self._alone_since = None

    def _look_for_progress(self, now: float) -> None:
        """The watchdog (WDG-1): says what everybody does when nothing gets done."""
        limit_s = self._engine.options.watchdog_s
        finished = self._engine.finished
        with self._engine.lock:
            busy = not self._engine.queue.idle
            work = repr(self._engine.queue)
        if limit_s <= 0 or finished != self._seen or not busy:
            self._seen = finished
            self._idle_since = now
        elif now - self._idle_since >= limit_s:
            stacks = io.StringIO()
            dump_stacks(stacks)
            _log.warning(
                "no closure finished for %g s: %s%s",
                now - self._idle_since,
                work,
                stacks.getvalue(),
            )
            self._idle_since = now

    @override
    def __repr__(self) -> str:
        return f"<Watch [{'closed' if self._stop.is_set() else 'watching'}]>"
