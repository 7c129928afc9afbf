"""The coordinator's connection to one worker, across all incarnations of the worker.

One thread per worker connects (again and again), opens a session, passes the worker's messages to the
engine, and reports the end of the session. Other threads send, holding the link's `sending` lock, so that
definitions, updates and closures keep their order. The engine decides what to send and what a loss means.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final, overload

from typing_extensions import override

from stratagem import _faults as faults
from stratagem._cluster.coordinator.packer import Encoded
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._snapshots import Snapshot
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.codec import Outgoing, pack
from stratagem._wire.connecting import connect, reason
from stratagem._wire.frames import Limits
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.messages import Message
from stratagem._wire.process_probe import LivenessCheck
from stratagem._wire.round_trip import attempt_limit_s
from stratagem.config import ClusterOptions
from stratagem.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ParameterServerLost,
    WireError,
    WorkerBusy,
    WorkerLost,
)

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine

_log = logging.getLogger("stratagem.coordinator")

RECEIVE_S: Final = 0.5  # longest sleep of a link's thread before it checks whether it should end
RESULTS_AT_ONCE: Final = 64  # messages passed on together: waiting threads are woken once for all

TAKEN_S: Final = 1.0
"""How long a worker must have served another coordinator before this one stops waiting for it. A
coordinator that is being closed is gone in a tenth of that."""

_MAY_PASS: Final = (ConnectionLost, DeadlineExceeded, WorkerBusy, ParameterServerLost)
"""Errors of an attempt to connect that a later attempt may not meet. Any other error is the worker's own
refusal: another key or protocol, another task, a setup that fails there."""


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """Present state of one worker.

    Example:
        >>> from stratagem._cluster.coordinator.worker_link import WorkerStatus
        >>> WorkerStatus(index=0, task="/job:worker/task:0", connected=True, incarnation=2).index
        0
    """

    index: int
    task: str
    connected: bool
    """True if it receives closures."""
    incarnation: int
    """Number of its sessions with this coordinator: above 1, it was lost and came back."""
    address: str = ""
    draining: bool = False
    """True if it is leaving: it finishes the closure that it runs and gets no more."""
    last_error: BaseException | None = None
    """Why its last session ended, or why the last attempt to connect failed."""


@final
class WorkersView(Sequence[WorkerStatus]):
    """The workers at present, in the order in which they joined: a live view.

    A view that you keep shows workers that join and leave. A loop over it sees the workers of its beginning.

    Example:
        >>> states = []
        >>> view = WorkersView(lambda: states)
        >>> states.append(WorkerStatus(index=0, task="w", connected=True, incarnation=1))
        >>> len(view), view[0].index
        (1, 0)
    """

    def __init__(self, read: Callable[[], list[WorkerStatus]]) -> None:
        self._read = read

    def __len__(self) -> int:
        return len(self._read())

    @overload
    def __getitem__(self, index: int) -> WorkerStatus: ...
    @overload
    def __getitem__(self, index: slice) -> list[WorkerStatus]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    @override
    def __iter__(self) -> Iterator[WorkerStatus]:
        return iter(self._read())

    @override
    def __repr__(self) -> str:
        return f"<WorkersView {self._read()!r}>"


@final
class WorkerAddresses:
    """Looks up addresses of workers when needed: a task may come back at another address.

    All links share one call of the resolver's `cluster_spec` per `max_age_s`: it may ask another system.
    """

    def __init__(self, cluster_spec: Callable[[], ClusterSpec], max_age_s: float) -> None:
        self._cluster_spec = cluster_spec
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._known: ClusterSpec | None = None
        self._asked_at = 0.0

    def __call__(self, task_index: int) -> str:
        """Return the address of a worker.

        Raises:
            ConnectionLost: the resolver failed, or does not know the worker.
        """
        try:
            return self._spec().task_address("worker", task_index)
        except Exception as error:  # resolvers are users' classes
            raise ConnectionLost(f"the cluster resolver gave no address: {error}") from error

    def workers(self) -> list[int]:
        """Return the task indices of the workers; raise any error of the resolver."""
        spec = self._spec()
        return spec.task_indices("worker") if "worker" in spec.jobs else []

    def _spec(self) -> ClusterSpec:
        with self._lock:
            now = time.monotonic()
            if self._known is None or now - self._asked_at >= self._max_age_s:
                self._known = self._cluster_spec()
                self._asked_at = now
            return self._known


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """Settings shared by all links of a coordinator."""

    options: ClusterOptions
    setup: Callable[[], object]  # makes the object that connects a worker to the strategy
    addresses: Callable[[int], str]  # looks up a worker's address, at every attempt
    key: ClusterKey | None = None
    seed: int = 0  # of the job


@dataclass(slots=True)
class SentObjects:
    """Objects that the worker's current incarnation has received. Guarded by the link's `sending`."""

    functions: set[bytes] = field(default_factory=set)
    tokens: set[Hashable] = field(default_factory=set)
    version: int = 0


@final
class WorkerLink:
    """Connection and thread of one worker.

    Args:
        events: the engine; all calls come from the link's thread.
        number: the worker's number in the engine.
        task_index: the worker's index in the cluster.
        settings: the same for all workers.
    """

    def __init__(
        self, events: Engine, number: int, task_index: int, *, settings: LinkSettings
    ) -> None:
        self.number = number
        self.task_index = task_index
        self.task = f"/job:worker/task:{task_index}"
        self.address = "?"  # of the last attempt
        self.incarnation = 0
        self.sending = threading.Lock()
        self.sent = SentObjects()
        self.metrics = Snapshot()  # of the last heartbeat that had them
        self.last_error: Exception | None = None
        self.taken = False  # it serves another coordinator, which is alive
        self.refused = False  # it answered with an error that will not go away
        self._events = events
        self._settings = settings
        self._options = settings.options
        self._busy_since: float | None = None
        self._channel: Channel | None = None
        self._opening: Channel | None = None  # while a session is being opened, for leave()
        self._preparing: Channel | None = None  # while the worker connects to the servers
        self._liveness = LivenessCheck(self.task, log=_log)
        self._end_reason: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"stratagem-worker-{task_index}-link", daemon=True
        )

    def start(self) -> None:
        """Start the thread that connects."""
        self._thread.start()

    @property
    def connected(self) -> bool:
        """True if a session is open."""
        return self._channel is not None

    def why_down(self) -> str:
        """Say which worker this is, its address, and why the last attempt failed."""
        error = self.last_error
        why = "no attempt has ended yet" if error is None else reason(error)
        return f"{self.task} at {self.address!r}: {why}"

    def send(self, batch: Sequence[Encoded]) -> bool:
        """Send messages; return False if the worker is gone (the link's thread reports that)."""
        channel = self._channel
        if channel is None:
            return False
        try:
            channel.notify_all(batch)
        except WireError as error:
            self.give_up(error)
            return False
        return True

    def notify(self, message: Message) -> bool:
        """Send one message without buffers."""
        return self.send([(message, ())])

    def watch(self, now: float, *, send_heartbeat: bool) -> None:
        """Give the worker up if it was silent for too long; send a heartbeat. Never waits."""
        channel, options = self._channel, self._options
        silent_s, limit_s = 0.0, options.heartbeat_limit_s
        if channel is not None:
            silent_s, limit_s = channel.silent_s(), channel.round_trip.limit_s(limit_s)
        why = self._liveness.judge(
            silent_s,
            limit_s=limit_s,
            running_limit_s=options.partition_limit_s,
            cut_off_s=lambda: 0.0 if channel is None else channel.cut_off_s(),
        )
        if why is not None:
            self.give_up(WorkerLost(f"no sign of life for {silent_s:.1f} s{why}", task=self.task))
        target = channel or self._preparing
        if why is None and target is not None and send_heartbeat:
            try:
                target.try_notify(messages.Beat())  # unless another message is being sent
            except WireError as error:
                if target is channel:
                    self.give_up(error)

    def give_up(self, reason: Exception) -> None:
        """End this session: the worker is silent, or cannot be sent to."""
        if self._end_reason is None:
            self._end_reason = reason
        channel = self._channel
        if channel is not None:
            channel.close()

    def leave(self) -> None:
        """Release the worker and ask the thread to end, without waiting. May be called again."""
        self._stop.set()
        channel, opening = self._channel, self._opening
        if opening is not None:
            opening.close()
        if channel is not None:
            try:
                channel.try_notify(messages.Leave())
            except WireError:
                pass  # it is gone anyway
            channel.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, see `leave`."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # ------------------------------------------------------------------ the link's thread

    def _run(self) -> None:
        options = self._options
        delay_s = options.start_delay_s * self.number
        if options.start_delay_max_s:
            delay_s = min(delay_s, options.start_delay_max_s)
        self._stop.wait(delay_s)
        while not self._stop.is_set():
            try:
                channel = self._open_session()
            except Exception as error:  # noqa: BLE001 - setup runs code of users on the worker
                if self._stop.is_set():
                    return
                self._note_answer(error)
                self._events.worker_unreachable(self, error)
                self._stop.wait(options.restart_pause_s)
                continue
            with channel:
                end_reason = self._receive_all(channel)
            self._channel = None
            if self._stop.is_set():
                return
            self.last_error = end_reason
            self._events.worker_lost(self, end_reason)

    def _note_answer(self, error: Exception) -> None:
        """Note why an attempt failed, and whether a later attempt can do better."""
        self.last_error = error
        self.refused = not isinstance(error, _MAY_PASS)
        if not isinstance(error, WorkerBusy) or error.coordinator == self._events.name:
            self._busy_since, self.taken = None, False
            return
        now = time.monotonic()
        if self._busy_since is None:
            self._busy_since = now
        # The worker has heard its coordinator after our first attempt: that coordinator is alive.
        self.taken = now - self._busy_since > max(TAKEN_S, error.heard_s)

    def _open_session(self) -> Channel:
        options = self._options
        self.address = self._settings.addresses(self.task_index)
        channel = connect(
            self.address,
            key=self._settings.key,
            timeout_s=min(attempt_limit_s(options), options.connect_timeout_s),
            peer=self.task,
            limits=Limits(),
            may_unpickle=True,
            stopped=self._stop.is_set,
        )
        self._opening = channel
        try:
            if self._stop.is_set():
                raise WireError("closed")
            outgoing = Outgoing()
            incarnation, job = self._events.new_incarnation(self), self._events.job
            opening = messages.OpenWorker(
                coordinator=self._events.name,
                worker=self.task_index,
                incarnation=incarnation,
                setup=pack(self._settings.setup(), outgoing),
                seed=self._settings.seed,
                heartbeat_s=options.heartbeat_s,
                heartbeat_limit_s=options.heartbeat_limit_s,
                instance="" if job is None else job.connection.instance,
                epoch=0 if job is None else job.connection.epoch,
            )
            limit_s = options.connect_timeout_s
            call = channel.begin(opening, outgoing.buffers, timeout_s=limit_s)
            self._preparing = channel
            reply = channel.collect(call, timeout_s=limit_s).message
            if not isinstance(reply, messages.WorkerOpened):
                raise WireError(f"{self.task} answered {type(reply).__name__} to OpenWorker")
        except BaseException:
            channel.close()
            raise
        finally:
            self._opening = self._preparing = None
        with self.sending:
            self.sent = SentObjects()
            self.incarnation = incarnation
            self._liveness = LivenessCheck(self.task, reply.process, log=_log)
            self._end_reason = None
            self._busy_since, self.taken, self.refused = None, False, False
            self._channel = channel
        return channel

    def _receive_all(self, channel: Channel) -> Exception:
        """Receive until the session ends; return the reason."""
        try:
            self._events.worker_up(self)
            while not self._stop.is_set():
                frames = channel.receive_some(timeout_s=RECEIVE_S, most=RESULTS_AT_ONCE)
                if not frames:
                    continue
                if faults.active is not None:
                    faults.active.at("coordinator.finished")
                self._events.worker_reports(self, frames)
        except (WireError, ParameterServerLost) as error:
            return self._end_reason or error
        except Exception as error:  # noqa: BLE001 - ends the session, not the thread
            _log.exception("%s: handling its messages failed", self.task)
            return error
        return self._end_reason or WireError("closed")

    def status(self, *, up: bool, draining: bool) -> WorkerStatus:
        """Return the worker's state for the user. `up`, `draining`: as the queue has it."""
        return WorkerStatus(
            index=self.task_index,
            task=self.task,
            connected=up,
            incarnation=max(0, self.incarnation - self._events.before_first),
            address=self.address,
            draining=draining,
            last_error=self.last_error,
        )

    @override
    def __repr__(self) -> str:
        state = f"incarnation {self.incarnation}" if self.connected else f"{self.last_error!r}"
        return f"<WorkerLink to {self.task} at {self.address} [{state}]>"


def log_output(task: str, line: messages.LogLine) -> None:
    """Log a line that a worker printed or logged, under ``stratagem.tasks.<task>``.

    Print a line that a worker printed, unless the program has set up logging to show it.
    """
    logger = logging.getLogger(f"stratagem.tasks.{task}")
    if not line.logger and not (logger.isEnabledFor(line.level) and logger.hasHandlers()):
        stream = sys.stdout if line.level < logging.WARNING else sys.stderr
        # One write: other threads print, too.
        stream.write(f"[{task}] {line.text}\n")
        stream.flush()
        return
    origin = f"{line.logger}: " if line.logger else ""
    logger.log(line.level, "[%s] %s%s", task, origin, line.text)


def close_links(links: Sequence[WorkerLink], timeout_s: float) -> None:
    """Leave all workers at once, then wait for the threads together."""
    deadline = time.monotonic() + timeout_s
    for link in links:
        link.leave()
    for link in links:
        link.join(max(0.0, deadline - time.monotonic()))
