"""The coordinator's connection to one worker, through all of the worker's lives.

One thread per worker connects (again and again), opens a life, hands what the worker reports to the
coordinator, and tells it when the life is over. Sending is done by whoever has something to send,
under the link's own lock, so that definitions, updates and closures keep their order. What is sent
and what a loss means is decided elsewhere (`closures.py`, `coordinator.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Final, Protocol, final

from typing_extensions import override

from stratagem._cluster.coordinator.packer import Encoded
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.codec import Outgoing, pack
from stratagem._wire.connecting import connect, reason
from stratagem._wire.frames import Limits
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.messages import Frame, Message
from stratagem._wire.process_probe import LivenessCheck
from stratagem.config import ClusterOptions
from stratagem.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ParameterServerLost,
    WireError,
    WorkerBusy,
    WorkerLost,
)

_log = logging.getLogger("stratagem.coordinator")

RECEIVE_S = 0.5
"""Longest sleep of a link's thread between two looks at whether it should end."""

RESULTS_AT_ONCE = 64
"""Reports handed over together, so that waiters are woken once for all of them."""


TAKEN_S = 1.0
"""How long a worker must have been another coordinator's before it is left to it: one that is being
closed is gone in a tenth of that."""


_MAY_PASS: Final = (ConnectionLost, DeadlineExceeded, WorkerBusy, ParameterServerLost)
"""What came of an attempt when nobody is there yet, or when it is not the worker's own answer. Every other error is:
another key or protocol, another task, a setup that fails there."""


class LinkOwner(Protocol):
    """What a link tells its coordinator; all calls come from the link's thread."""

    name: str
    options: ClusterOptions

    def setup_object(self) -> object:
        """What the worker needs to open a life."""

    def next_incarnation(self, worker: int) -> int:
        """A number no earlier life of the worker had."""

    def worker_up(self, link: WorkerLink) -> None:
        """A life began."""

    def worker_reports(self, link: WorkerLink, frames: Sequence[Frame]) -> None:
        """Messages of the worker, oldest first."""

    def worker_lost(self, link: WorkerLink, reason: Exception) -> None:
        """The life is over; returns when its closures are settled and its writes are fenced."""

    def worker_unreachable(self, link: WorkerLink, error: Exception) -> None:
        """An attempt to begin a life failed."""


@final
class WorkerLink:
    """Connection and thread of one worker.

    Args:
        owner: the coordinator.
        index: the worker's place among the workers, from 0.
        task_index: its number in the cluster; the same unless the cluster has gaps.
        workers: how many there are.
        address: where it listens.
        key: the cluster's key.
    """

    def __init__(
        self,
        owner: LinkOwner,
        index: int,
        *,
        task_index: int,
        workers: int,
        address: str,
        key: ClusterKey | None,
    ) -> None:
        self.index = index
        self.task_index = task_index
        self.task = f"/job:worker/task:{task_index}"
        self.address = address
        self.incarnation = 0
        self.pid = 0
        self.sending = threading.Lock()
        # Guarded by `sending`: what the worker's current life has been told.
        self.functions: set[bytes] = set()
        self.tokens: set[Hashable] = set()
        self.version = 0
        self.mean_run_s = 0.0
        self.last_error: Exception | None = None
        self.taken = False  # it serves another coordinator, which lives
        self.refused = False  # it answered, and will give the same answer again
        self._busy_since: float | None = None
        self._owner = owner
        self._workers = workers
        self._key = key
        self._channel: Channel | None = None
        self._silence = LivenessCheck(self.task, log=_log)
        self._opening: Channel | None = None  # while a life is being opened, for close()
        self._why: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._live, name=f"stratagem-worker-{task_index}-link", daemon=True
        )

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether a life is open."""
        return self._channel is not None

    def why_down(self) -> str:
        """Who it is, where, and what came of the last attempt to reach it."""
        error = self.last_error
        why = "no attempt has ended yet" if error is None else reason(error)
        return f"{self.task} at {self.address!r}: {why}"

    def send(self, batch: Sequence[Encoded]) -> bool:
        """Sends messages; False if the worker is gone (the link's thread tells the coordinator)."""
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
        """Sends one message without buffers."""
        return self.send([(message, ())])

    def beat(self) -> None:
        """Says that the coordinator lives, unless it is saying something else; never waits."""
        channel = self._channel
        if channel is not None:
            try:
                channel.try_notify(messages.Beat())
            except WireError as error:
                self.give_up(error)

    def look_for_silence(self, now: float) -> None:
        """Gives the worker up if it has said nothing for too long. Never waits; one thread calls."""
        channel, options = self._channel, self._owner.options
        silent_s = 0.0 if channel is None else channel.silent_s()
        why = self._silence.judge(
            now,
            silent_s=silent_s,
            limit_s=options.heartbeat_limit_s,
            busy_limit_s=options.busy_limit_s,
            cut_off_s=lambda: 0.0 if channel is None else channel.cut_off_s(),
        )
        if why is not None:
            self.give_up(WorkerLost(f"no sign of life for {silent_s:.1f} s{why}", task=self.task))

    def give_up(self, reason: Exception) -> None:
        """Ends this life: the worker is silent, or sends cannot reach it."""
        channel = self._channel
        if self._why is None:
            self._why = reason
        if channel is not None:
            channel.close()

    def leave(self) -> None:
        """Says goodbye and asks the thread to end, without waiting. May be called again."""
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
        """Waits for the thread to end; it does as soon as it looks, see `leave`."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # ------------------------------------------------------------------ the link's thread

    def _live(self) -> None:
        options = self._owner.options
        delay = options.start_delay_s * self.index
        if options.start_delay_max_s:
            delay = min(delay, options.start_delay_max_s)
        self._stop.wait(delay)
        while not self._stop.is_set():
            try:
                channel = self._open_life()
            except Exception as error:  # noqa: BLE001 - setup runs code of others on the worker
                if self._stop.is_set():
                    return
                self.last_error = error
                self._note_answer(error)
                self._owner.worker_unreachable(self, error)
                self._stop.wait(options.restart_pause_s)
                continue
            with channel:
                reason = self._hear(channel)
            self._channel = None
            if self._stop.is_set():
                return
            self.last_error = reason
            self._owner.worker_lost(self, reason)

    def _note_answer(self, error: Exception) -> None:
        """Whose coordinator is dead or leaving will be free soon; one that goes on speaking lives."""
        self.refused = not isinstance(error, _MAY_PASS)
        if not isinstance(error, WorkerBusy) or error.coordinator == self._owner.name:
            self._busy_since, self.taken = None, False
            return
        now = time.monotonic()
        if self._busy_since is None:
            self._busy_since = now
        # It was heard after we first asked.
        self.taken = now - self._busy_since > max(TAKEN_S, error.heard_s)

    def _open_life(self) -> Channel:
        options = self._owner.options
        channel = connect(
            self.address,
            key=self._key,
            timeout_s=min(5.0, options.connect_timeout_s),
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
            incarnation = self._owner.next_incarnation(self.index)
            opening = messages.OpenWorker(
                coordinator=self._owner.name,
                worker=self.task_index,
                workers=self._workers,
                incarnation=incarnation,
                setup=pack(self._owner.setup_object(), outgoing),
                heartbeat_s=options.heartbeat_s,
                heartbeat_limit_s=options.heartbeat_limit_s,
            )
            reply = channel.request(
                opening, outgoing.buffers, timeout_s=options.connect_timeout_s
            ).message
            if not isinstance(reply, messages.WorkerOpened):
                raise WireError(f"{self.task} answered {type(reply).__name__} to OpenWorker")
        except BaseException:
            channel.close()
            raise
        finally:
            self._opening = None
        with self.sending:
            self.functions.clear()
            self.tokens.clear()
            self.version = 0
            self.incarnation = incarnation
            self.pid = reply.pid
            self._silence = LivenessCheck(self.task, reply.process, log=_log)
            self.mean_run_s = 0.0
            self._why = None
            self._busy_since, self.taken, self.refused = None, False, False
            self._channel = channel
        return channel

    def _hear(self, channel: Channel) -> Exception:
        """Listens until the life is over; gives the reason."""
        try:
            self._owner.worker_up(self)
            while not self._stop.is_set():
                frame = channel.receive(timeout_s=RECEIVE_S)
                if frame is None:
                    continue
                frames = [frame]
                while len(frames) < RESULTS_AT_ONCE:
                    more = channel.receive(timeout_s=0.0)
                    if more is None:
                        break
                    frames.append(more)
                self._owner.worker_reports(self, frames)
        except (WireError, ParameterServerLost) as error:
            return self._why or error
        except Exception as error:  # noqa: BLE001
            # A mistake of ours or of the strategy: this life ends, the thread must not.
            _log.exception("%s: handling its reports failed", self.task)
            return error
        return self._why or WireError("closed")

    @override
    def __repr__(self) -> str:
        state = f"life {self.incarnation}" if self.connected else f"down: {self.last_error!r}"
        return f"<WorkerLink to {self.task} at {self.address} [{state}]>"


def close_links(links: Sequence[WorkerLink], timeout_s: float) -> None:
    """Leaves all workers at once, then waits: nobody waits for one that does not answer."""
    deadline = time.monotonic() + timeout_s
    for link in links:
        link.leave()
    for link in links:
        link.join(max(0.0, deadline - time.monotonic()))
