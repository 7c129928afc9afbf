"""Thread that samples a cluster once a second and keeps the latest view."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Self, final

from typing_extensions import override

from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.history import ClusterHistory
from stratagem._monitor.sample_sources import SampleSource
from stratagem._owner import Owner
from stratagem.errors import DeadlineExceeded

_log = logging.getLogger("stratagem.monitor")

EVERY_S: Final = 1.0  # workers report once a second
_CLOSE_S: Final = 10.0  # longer than a sample of servers that do not answer


@final
class Monitor(Owner):
    """Latest view of a cluster.

    Args:
        source: of the samples; the monitor closes it.
        every_s: seconds between samples.
        listeners: called with every view, in the monitor's thread.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        every_s: float = EVERY_S,
        listeners: tuple[Callable[[ClusterView], None], ...] = (),
    ) -> None:
        self._source = source
        self._every_s = every_s
        self._listeners = listeners
        self._history = ClusterHistory()
        self._changed = threading.Condition()
        self._view = ClusterView(time_s=time.time())
        self._sampling = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stratagem-monitor", daemon=True)

    def start(self) -> Self:
        """Take the first sample and start the thread."""
        self.look()
        self._thread.start()
        return self

    @property
    def view(self) -> ClusterView:
        """The latest view."""
        return self._view

    def look(self) -> ClusterView:
        """Take a sample now and return the view."""
        with self._sampling:
            view = self._history.add(self._source.sample())
            for listener in self._listeners:
                listener(view)
        with self._changed:
            self._view = view
            self._changed.notify_all()
        return view

    def wait_for(self, condition: Callable[[ClusterView], bool], timeout_s: float) -> ClusterView:
        """Wait until a view fulfils a condition, and return that view.

        Raises:
            DeadlineExceeded: none did within `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self._view), timeout_s):
                last = self._view
                raise DeadlineExceeded(
                    f"no view of the cluster fulfilled the condition within {timeout_s:g} s; the last "
                    f"one: {last.health}, {last.steps} steps, {len(last.workers)} workers, "
                    f"{len(last.servers)} servers, {len(last.scalars)} logged values, {len(last.events)} events"
                )
            return self._view

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - the thread must survive any error
                if not self._stop.is_set():
                    _log.exception("sampling the cluster failed")

    @override
    def close(self) -> None:
        """End the thread and close the source. May be called again."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        self._source.close()
