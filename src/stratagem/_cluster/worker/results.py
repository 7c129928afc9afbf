"""Hold results of closures until the servers have acknowledged the closures' writes.

Several results are sent together, for one system call and one wake-up of the coordinator. The working thread
flushes; the receiving thread does so while a closure runs for long (`coordinator_session.py`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from typing_extensions import override

from stratagem._cluster.contract import StrategyOnWorker
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.failures import failure_from
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Message
from stratagem.errors import ClosureInputError, DeadlineExceeded, ParameterServerLost

BATCH: Final = 32  # most results sent together; beyond it the saving is below 1 µs a closure
HOLD_S: Final = 0.01  # how long a result may wait for others while more closures wait
COPY_BYTES: Final = 1 << 14  # smaller results are copied and may wait; larger ones are sent at once

Report = messages.Finished | messages.Failed


class _Result(NamedTuple):
    message: Report
    buffers: Sequence[Buffer]
    written: int  # writes made when the closure ended: all of them must be acknowledged first


@final
class Results:
    """Results of one session, in the order the closures ran. `task`: the worker's name, for errors."""

    def __init__(self, channel: Channel, task: str) -> None:
        self._channel = channel
        self._task = task
        self._held: deque[_Result] = deque()
        self._held_since = 0.0
        self._flushing = threading.Lock()
        self.waited_s = 0.0
        """Time spent waiting for acknowledgements."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, message: Report, buffers: Sequence[Buffer], views: StrategyOnWorker) -> None:
        """Hold a result; send it now if it is too large to be copied."""
        size = 0
        if buffers:
            size = sum(memoryview(buffer).nbytes for buffer in buffers)
            if size <= COPY_BYTES:
                buffers = [bytes(buffer) for buffer in buffers]
        if not self._held:
            self._held_since = time.perf_counter()
        self._held.append(_Result(message, buffers, views.written()))
        if size > COPY_BYTES:
            self.flush(views)

    def is_due(self, now: float, next_takes_s: float = 0.0) -> bool:
        """Return whether to flush before a closure that takes this long."""
        held = len(self._held)
        return held >= BATCH or (held > 0 and now + next_takes_s - self._held_since > HOLD_S)

    def flush(self, views: StrategyOnWorker) -> None:
        """Wait until all writes are acknowledged, then send everything."""
        with self._flushing:
            began = time.perf_counter()
            acknowledged = views.acknowledged(wait=True)
            self.waited_s += time.perf_counter() - began
            self._send(views, acknowledged)

    def flush_ready(self, views: StrategyOnWorker) -> None:
        """Send the results whose writes are acknowledged. Never waits for the servers."""
        if self._flushing.acquire(blocking=False):
            try:
                self._send(views, views.acknowledged(wait=False))
            finally:
                self._flushing.release()

    def failure(
        self,
        closure: int,
        error: BaseException,
        views: StrategyOnWorker,
        *,
        lacks: bool = False,
        report: int = 0,
        ended: int = 0,
    ) -> messages.Failed:
        """Make the report of an error.

        `lacks`: an object that the closure needs must be sent again. `report`: number of its advances. `ended`: see
        `messages.Failed`.
        """
        blame = "user"
        if isinstance(error, ClosureInputError):
            blame = "input"
        elif isinstance(error, ParameterServerLost):
            blame = "server" if views.reaches(error.task) else "path"
        elif isinstance(error, DeadlineExceeded):
            blame = "deadline"
        failure = failure_from(error, task=self._task, with_pickle=True)
        return messages.Failed(
            closure=closure, failure=failure, blame=blame, lacks=lacks, report=report, ended=ended
        )

    def _send(self, views: StrategyOnWorker, acknowledged: int) -> None:
        batch: list[tuple[Message, Sequence[Buffer]]] = []
        held = self._held
        while held and held[0].written <= acknowledged:
            message, buffers, _ = held.popleft()
            late = views.late_failure(message.closure)
            if late is not None and isinstance(message, messages.Finished):
                failed = self.failure(message.closure, late, views, report=message.report)
                message, buffers = failed, ()
            batch.append((message, buffers))
        if batch:
            self._channel.notify_all(batch)

    @override
    def __repr__(self) -> str:
        return f"<Results of {self._task}: {len(self._held)} held>"
