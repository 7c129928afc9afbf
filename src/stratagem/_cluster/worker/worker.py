"""A worker task: listens for coordinators, and serves one of them at a time.

The *receiving* thread accepts connections and receives messages. The caller's thread (`serve`, the main thread
of a worker process) runs closures. They meet in a `CoordinatorSession`.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import select
import threading
import time
from typing import Final, final

from typing_extensions import override

from stratagem import config
from stratagem._cluster.worker.coordinator_session import TICK_S, CoordinatorSession
from stratagem._cluster.worker.output import OutputForwarder
from stratagem._core import context
from stratagem._owner import Owner
from stratagem._ps.malloc import give_back_freed_memory
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.failures import failure_from
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.listener import Listener
from stratagem._wire.messages import Frame, Message
from stratagem.errors import (
    CoordinatorReplaced,
    ProtocolError,
    UnavailableError,
    WireError,
    WorkerBusy,
)

_log = logging.getLogger("stratagem.worker")

CLOSE_S: Final = 6.0  # how long `close` waits for the receiving thread, which may be sending
JOBS_KNOWN: Final = 64  # named jobs whose newest epoch is remembered
ANSWER_S: Final = 0.2  # limit of an answer to another coordinator; our own one waits meanwhile


@final
class Worker(Owner):
    """One worker task.

    Args:
        address: where to listen, ``host:port``; port 0 takes a free one.
        index: its task index.
        key: the cluster's key: a coordinator proves it before the worker runs anything.
        forward_output: whether the worker owns the process: prints and log records are sent to the
            coordinator, and memory is given back between coordinators.
    """

    def __init__(
        self,
        address: str,
        *,
        index: int,
        key: ClusterKey,
        forward_output: bool = False,
    ) -> None:
        self.index = index
        self.task = f"/job:worker/task:{index}"
        self.key = key
        self._listener = Listener(address, key=key, may_unpickle=True)
        self.address = self._listener.address
        self._closed = threading.Event()
        self._retiring = False  # ends when the present session has ended
        self._sessions: queue.SimpleQueue[CoordinatorSession | None] = queue.SimpleQueue()
        self._current: CoordinatorSession | None = None
        self._first_message_s = config.partition_limit_s()  # after the proof of the key
        self._epochs: dict[str, int] = {}  # of named jobs: instance → newest coordinator's epoch
        self._successor: tuple[Channel, Frame] | None = None  # a newer coordinator of the same job
        self._visitors: list[tuple[Channel, float]] = []  # no message yet; until when it may come
        self._output: OutputForwarder | None = None
        if forward_output:
            self.own_process(echo=False)
        self._receiver = threading.Thread(
            target=self._receive, name=f"stratagem-worker-{index}-receiver", daemon=True
        )
        self._receiver.start()

    def own_process(self, *, echo: bool) -> None:
        """Treat this process as the worker's own from now on.

        Args:
            echo: also print the lines that are sent to the coordinator.
        """
        if self._output is None:
            self._output = OutputForwarder(echo=echo)
            session = self._current
            if session is not None:
                self._output.attach(session.channel)

    @property
    def owns_process(self) -> bool:
        """True if nothing but the worker runs in this process."""
        return self._output is not None

    def serve(self) -> None:
        """Run closures on this thread until `close`, or until a peer has sent Retire."""
        with context.worker_index(self.index):
            while (session := self._sessions.get()) is not None:
                session.work()
                del session
                if self._output is not None:
                    self._output.detach()
                    # An idle worker holds nothing of its last coordinator. Models have reference
                    # cycles, which would keep memory in use that the servers have freed.
                    gc.collect()
                    give_back_freed_memory()

    @override
    def close(self) -> None:
        """Stop listening and serving; a running closure is not interrupted. May be called again."""
        if self._closed.is_set():
            return
        self._closed.set()
        session = self._current
        if session is not None:
            session.channel.close()
        self._sessions.put(None)
        if threading.current_thread() is not self._receiver:
            self._receiver.join(CLOSE_S)
        self._listener.close()
        if self._output is not None:
            self._output.close()

    def facts(self) -> dict[str, object]:
        """Return figures for `stratagem top`."""
        session = self._current
        return {
            "task": self.task,
            "pid": os.getpid(),
            "state": "idle" if session is None else "running",
            "incarnation": 0 if session is None else session.order.incarnation,
            "steps": 0 if session is None else session.steps,
            "waiting": 0 if session is None else session.waiting,
        }

    # ------------------------------------------------------------------ the receiving thread

    def _receive(self) -> None:
        while not (self._closed.is_set() or self._retiring):
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            for channel, _ in self._visitors:
                poll.register(channel, select.POLLIN)
            if self._successor is None:
                poll.poll(TICK_S * 1000.0)
            found, self._successor = self._successor or self._next_first_message(), None
            if found is None:
                continue
            channel, frame = found
            with channel:
                try:
                    self._serve_peer(channel, frame)
                except WireError as error:
                    if not self._closed.is_set():
                        _log.info("%s: the coordinator is gone: %s", self.task, error)
                except Exception:  # noqa: BLE001 - this thread must survive anything a peer sends
                    _log.exception("%s: serving a coordinator failed", self.task)
        for channel, _ in self._visitors:
            channel.close()
        if self._successor is not None:
            self._successor[0].close()
        self._sessions.put(None)

    def _next_first_message(self) -> tuple[Channel, Frame] | None:
        """Return a new peer and its first message, if one has arrived; close peers that are late. Never waits."""
        now = time.monotonic()
        for channel in self._listener.progress():
            self._visitors.append((channel, now + self._first_message_s))
        for visitor in list(self._visitors):
            channel, deadline = visitor
            frame = None
            try:
                frame = channel.receive(timeout_s=0.0)
            except Exception as error:  # noqa: BLE001 - the thread must survive anything a peer sends
                _log.info("%s dropped %s: %s", self.task, channel.peer, error)
                deadline = now
            if frame is not None:
                self._visitors.remove(visitor)
                return channel, frame
            if now >= deadline:
                self._visitors.remove(visitor)
                channel.close()
        return None

    def _serve_peer(self, channel: Channel, frame: Frame) -> None:
        """Serve a coordinator until it is gone; answer anyone else."""
        message = frame.message
        refusal = self._refusal(message)
        if not isinstance(message, messages.OpenWorker) or refusal is not None:
            self._answer(channel, frame, refusal)
            return
        if message.epoch:
            self._epochs[message.instance] = message.epoch
            while len(self._epochs) > JOBS_KNOWN:
                del self._epochs[next(iter(self._epochs))]
        session = CoordinatorSession(self, channel, frame)
        self._current = session
        if self._output is not None:
            self._output.attach(channel)
        self._sessions.put(session)
        try:
            session.listen(self._turn_away)
        finally:
            session.end()
            self._current = None

    def _turn_away(self) -> None:
        """Answer peers that connect during a session; refuse other coordinators."""
        while self._successor is None and (found := self._next_first_message()) is not None:
            channel, frame = found
            session, message = self._current, frame.message
            if isinstance(message, messages.OpenWorker) and session is not None:
                ours = session.order
                if message.instance == ours.instance and message.epoch > ours.epoch:
                    _log.warning("%s: a newer coordinator of its job takes over", self.task)
                    self._successor = found
                    session.end()
                    return
            with channel:
                try:
                    self._answer(channel, frame, self._refusal(message))
                except WireError as error:  # of that peer, not of the coordinator we serve
                    _log.info("%s turned away %s: %s", self.task, channel.peer, error)

    def _refusal(self, message: Message) -> Exception | None:
        """Return the error for a coordinator that cannot be served; None for one that can, and for other peers."""
        if not isinstance(message, messages.OpenWorker):
            return None
        if message.worker != self.index:
            return UnavailableError(
                f"this is {self.task}, the coordinator expects worker {message.worker} at "
                f"{self.address!r}: give every task the same cluster specification.",
                task=self.task,
            )
        if message.epoch < self._epochs.get(message.instance, 0):
            return CoordinatorReplaced(
                f"{self.task} has served a newer coordinator of the same job. This coordinator cannot write or "
                "schedule any more: end this process."
            )
        session = self._current
        if session is None:
            return None
        return WorkerBusy(
            f"{self.task} serves another coordinator: close that one first.",
            task=self.task,
            coordinator=session.order.coordinator,
            heard_s=time.monotonic() - session.heard_at,
        )

    def _answer(self, channel: Channel, frame: Frame, refusal: Exception | None) -> None:
        """Refuse a coordinator; answer a request for statistics or for the end of the task.

        Raises:
            ProtocolError: the peer looks for another kind of task.
        """
        reply: Message
        if refusal is not None:
            reply = failure_from(refusal, task=self.task, with_pickle=True)
        elif isinstance(frame.message, messages.AskStats):
            seen = None if self._current is None else self._current.metrics()
            reply = messages.Stats(facts=self.facts(), metrics=seen)
        elif isinstance(frame.message, messages.Retire):
            self._retiring = True
            reply = messages.Ok()
        else:
            error = ProtocolError(
                f"this is {self.task}, a worker, which does not know {type(frame.message).__name__}: give "
                f"every task the same cluster specification"
            )
            failure = failure_from(error, task=self.task, with_traceback=False)
            channel.reply(frame, failure, timeout_s=ANSWER_S)
            raise error
        channel.reply(frame, reply, timeout_s=ANSWER_S)

    @override
    def __repr__(self) -> str:
        state = (
            "closed" if self._closed.is_set() else repr(self._current) if self._current else "idle"
        )
        return f"<Worker {self.task} at {self.address} [{state}]>"
