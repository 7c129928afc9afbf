"""What a worker has to report: results of closures, held until everything they wrote is acknowledged.

Several results travel together, which costs one system call and one wake-up of the coordinator. The
working thread flushes; the line thread helps out while a closure runs long (`worker.py`).
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

BATCH: Final = 32
"""Results sent together at most; beyond it the saving is below 1 µs a closure."""

HOLD_S: Final = 0.006
"""How long a result may be held back for company while more closures wait."""

COPY_BYTES: Final = 1 << 14
"""Results up to this size are copied and may wait; larger ones are sent at once, uncopied."""


class _Result(NamedTuple):
    message: messages.Finished | messages.Failed
    buffers: Sequence[Buffer]
    written: int  # writes made when the closure ended: all of them must be acknowledged first


@final
class Results:
    """Results of one life, in the order the closures ran.

    Args:
        channel: to the coordinator.
        task: the worker's name, for errors.
    """

    def __init__(self, channel: Channel, task: str) -> None:
        self._channel = channel
        self._task = task
        self._held: deque[_Result] = deque()
        self._held_since = 0.0
        self._flushing = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self,
        message: messages.Finished | messages.Failed,
        buffers: Sequence[Buffer],
        views: StrategyOnWorker,
    ) -> None:
        """Puts a result in line; sends it now if its memory may not wait."""
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
        """Whether they should go before another closure is begun that takes so long."""
        held = len(self._held)
        return held >= BATCH or (held > 0 and now + next_takes_s - self._held_since > HOLD_S)

    def flush(self, views: StrategyOnWorker) -> None:
        """Waits for what is on its way to the servers, then sends everything."""
        with self._flushing:
            self._send(views, views.acknowledged(wait=True))

    def flush_ready(self, views: StrategyOnWorker) -> None:
        """Sends what need not wait any more, writes and results; never waits for the servers."""
        if self._flushing.acquire(blocking=False):
            try:
                self._send(views, views.acknowledged(wait=False))
            finally:
                self._flushing.release()

    def failure(
        self, closure: int, error: BaseException, *, lacks: bool = False
    ) -> messages.Failed:
        """The report of an error, and whose it is; `lacks`: what the closure needs is to be sent again."""
        blame = "user"
        if isinstance(error, ClosureInputError):
            blame = "input"
        elif isinstance(error, ParameterServerLost):
            blame = "server"
        elif isinstance(error, DeadlineExceeded):
            blame = "deadline"
        failure = failure_from(error, task=self._task, with_pickle=True)
        return messages.Failed(closure=closure, failure=failure, blame=blame, lacks=lacks)

    def _send(self, views: StrategyOnWorker, acknowledged: int) -> None:
        batch: list[tuple[Message, Sequence[Buffer]]] = []
        held = self._held
        while held and held[0].written <= acknowledged:
            message, buffers, _ = held.popleft()
            late = views.late_failure(message.closure)
            if late is not None and isinstance(message, messages.Finished):
                message, buffers = self.failure(message.closure, late), ()
            batch.append((message, buffers))
        if batch:
            self._channel.notify_all(batch)

    @override
    def __repr__(self) -> str:
        return f"<Results of {self._task}: {len(self._held)} held>"
