"""Thread that samples a cluster once a second and keeps the latest view."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final, Self, final

from typing_extensions import override

from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.history import ClusterHistory
from stratagem._monitor.sample_sources import SampleSource
from stratagem._monitor.tensorboard_scalars import TensorBoardScalars
from stratagem._owner import Owner

_log = logging.getLogger("stratagem.monitor")

EVERY_S: Final = 1.0  # workers report once a second
_CLOSE_S: Final = 10.0  # longer than a sample of servers that do not answer


@final
class Monitor(Owner):
    """Latest view of a cluster.

    Args:
        source: of the samples; the monitor closes it.
        every_s: seconds between samples.
        tensorboard: directory for TensorBoard; by default none is written.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        every_s: float = EVERY_S,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        self._scalars = None if tensorboard is None else TensorBoardScalars(tensorboard)
        self._source = source
        self._every_s = every_s
        self._history = ClusterHistory()
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
            self._view = view = self._history.add(self._source.sample())
            if self._scalars is not None:
                self._scalars.write(view)
        return view

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
        if self._scalars is not None:
            self._scalars.close()
