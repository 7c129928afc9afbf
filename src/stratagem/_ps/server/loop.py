"""The event loop of one parameter server.

Two threads. The *working* thread does everything that touches variables, in the order it arrives: no locks. The
*accepting* thread (`acceptor.py`) takes connections that prove the key, reads each one's Hello, keeps ``control``
connections (pings and statistics, answered even while a long optimizer step runs) and hands ``data`` connections to
the working thread. `session.py` handles the messages; process start, signals and readiness belong to `_cluster`.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self, final

from typing_extensions import override

from stratagem import config
from stratagem._faults import ConnectionDropped
from stratagem._owner import Owner
from stratagem._ps.malloc import give_back_freed_memory
from stratagem._ps.server.acceptor import Acceptor
from stratagem._ps.server.backup_link import BackupLink
from stratagem._ps.server.data_connection import DataConnection
from stratagem._ps.server.job_table import JobTable
from stratagem._ps.server.lent_replies import LentReplies
from stratagem._ps.server.replication import ON_LINKS, Replication
from stratagem._ps.server.server_options import ServerOptions
from stratagem._ps.server.session_table import SessionTable
from stratagem._usage import process_usage
from stratagem._wire import messages
from stratagem._wire.arenas import Budget, default_budget
from stratagem._wire.channel import Channel
from stratagem._wire.failures import failure_from
from stratagem._wire.frames import Buffer
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.listener import Listener
from stratagem._wire.messages import Frame, Message
from stratagem._wire.process_probe import own_process
from stratagem.errors import (
    ConnectionLost,
    CoordinatorReplaced,
    NotFoundError,
    ProtocolError,
    StratagemError,
    WireError,
)

_log = logging.getLogger("stratagem.ps")

_TICK_S = 0.5
"""How often leases are checked."""

UNSENT_LIMIT_BYTES = 1 << 26
"""Replies a connection may leave unread before its next request is served."""

_ABOUT_SESSIONS = frozenset(
    (
        messages.OpenSession,
        messages.JoinSession,
        messages.CloseSession,
        messages.AskJob,
        messages.ClaimJob,
        messages.KeepJob,
        messages.OpenReplica,
        messages.Promote,
        messages.Ping,
        messages.AskStats,
    )
)


@final
class ParameterServer(Owner):
    """One parameter server: it listens at once and serves when `start` or `serve` is called."""

    def __init__(
        self,
        address: str,
        *,
        task: str = "/job:ps/task:0",
        key: ClusterKey | None = None,
        options: ServerOptions | None = None,
    ) -> None:
        """Listen on `address` (``host:port``; port 0 takes a free one).

        Raises:
            PermissionError: not a loopback address, and no key.
        """
        self._options = options or ServerOptions()
        shared = self._options.shared_memory
        self._shared = config.shared_memory_allowed() if shared is None else shared
        limit = self._options.memory_limit_bytes
        if limit is None:
            limit = config.server_memory_bytes() or default_budget()
        self._budget = Budget(limit)
        modules = self._options.optimizer_modules
        optimizer_modules = config.optimizer_modules() if modules is None else tuple(modules)
        self.task = task
        self.life = secrets.token_hex(8)
        listener = Listener(address, key=key, limits=self._options.limits)
        self.address = listener.address
        self._acceptor = Acceptor(self, listener)
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._arrivals: deque[DataConnection] = deque()
        self._connections: set[DataConnection] = set()
        self._lent = LentReplies()
        self._sessions = SessionTable(
            self.task,
            self._budget,
            optimizer_modules,
            shared_memory=self._shared,
            access=self._options.checkpoints,
        )
        self._jobs = JobTable(self._sessions)
        self._replication = Replication(
            task,
            key,
            self._sessions,
            self._connections,
            self._selector,
            self._resume,
            self._lose,
        )
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False
        self._finished = threading.Event()
        self._served = 0
        self._busy_s = 0.0
        self._started_at = time.monotonic()
        self._rested_after = 0
        self._next_facts = 0.0
        self.facts: Mapping[str, object] = {}
        """Numbers about this server, refreshed twice a second; safe to read from any thread."""
        self._publish_facts()

    # -- start and end ------------------------------------------------------------------------

    def start(self) -> Self:
        """Serve in a thread of its own."""
        self._thread = threading.Thread(
            target=self.serve, name=f"stratagem-ps-work-{self.address}", daemon=True
        )
        self._thread.start()
        return self

    def serve(self) -> None:
        """Serve in the calling thread until `stop` or `close`."""
        self._acceptor.thread.start()
        try:
            while not self._stopping:
                ready = self._selector.select(_TICK_S)
                if not ready:
                    self._rest()
                for key, _ in ready:
                    if key.data is None:
                        os.eventfd_read(self._wake)
                    elif isinstance(key.data, BackupLink):
                        self._replication.turn(key.data)
                    else:
                        self._turn(key.data)
                while self._arrivals:
                    self._admit(self._arrivals.popleft())
                now = time.monotonic()
                if now < self._next_facts:
                    continue
                for one in self._sessions.expired(now):
                    reason = f"its coordinator has been gone for {one.lease_s:g} s"
                    self._end_session(one.name, reason, shard=one.shard if one.is_backup else None)
                self._publish_facts()
        finally:
            self._replication.abandon()  # the backups stay
            for connection in list(self._connections):
                self._forget(connection)
            self._sessions.close_all()
            self._finished.set()

    def _rest(self) -> None:
        """Release memory that only work needs: no request has come for a while."""
        if self._rested_after == self._served:
            return
        self._rested_after = self._served
        for connection in self._connections:
            connection.memory.rest()
        give_back_freed_memory()

    def stop(self) -> None:
        """Ask the loop to end; return at once. Safe in signal handlers and from any thread."""
        self._stopping = True
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    @override
    def close(self) -> None:
        """Close all connections and free all variables. May be called again."""
        if self._closed:
            return
        self.stop()
        if self._thread is not None:
            self._thread.join(10.0)
        elif self._acceptor.thread.ident is not None and not self._finished.wait(10.0):
            _log.warning("%s is busy: closing it without waiting longer", self.task)
        self._closed = True
        self._acceptor.stop()
        for connection in self._arrivals:
            connection.channel.close()
        self._selector.close()
        os.close(self._wake)

    @property
    def session_count(self) -> int:
        """Number of strategies that have variables here."""
        return len(self._sessions)

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else "stopping" if self._stopping else "open"
        return (
            f"<ParameterServer {self.task} at {self.address} {state}, {len(self._sessions)} sessions, "
            f"{len(self._connections)} connections, {self._served} messages served>"
        )

    # -- for the acceptor's thread ---------------------------------------------------------------------

    def welcome(self) -> messages.Welcome:
        """Return the answer to a Hello."""
        return messages.Welcome(
            life=self.life,
            shares_memory=self._shared,
            frame_bytes=self._options.limits.frame_bytes,
            process=own_process(),
        )

    def pong(self) -> messages.Pong:
        """Return the answer to a Ping."""
        return messages.Pong(unlinked=self._replication.unlinked)

    def take_over(self, channel: Channel, task: str, frames: Sequence[Frame]) -> None:
        """Hand a data connection, and the frames it has already sent, to the working thread."""
        connection = DataConnection(channel, task or channel.peer, shared_memory=self._shared)
        connection.inbox.extend(frames)
        self._arrivals.append(connection)
        os.eventfd_write(self._wake, 1)

    # -- work ---------------------------------------------------------------------------------

    def _admit(self, connection: DataConnection) -> None:
        self._connections.add(connection)
        self._selector.register(connection.channel, selectors.EVENT_READ, connection)
        self._work_off(connection)

    def _turn(self, connection: DataConnection) -> None:
        """Give one connection its turn: one read, then its complete requests."""
        if connection not in self._connections or connection.is_parked:
            return  # lost or parked since the selector returned
        try:
            if connection.channel.wants_write:
                connection.channel.flush()
            if not connection.inbox:  # else its requests wait until it has read replies
                connection.inbox.extend(connection.channel.receive_ready())
        except ConnectionLost as error:
            self._lose(connection, str(error), quiet=True)
        except WireError as error:
            self._lose(connection, str(error))
        else:
            self._work_off(connection)

    def _work_off(self, connection: DataConnection) -> None:
        channel = connection.channel
        try:
            while connection.inbox:
                if channel.outgoing_bytes > UNSENT_LIMIT_BYTES and not channel.flush():
                    break  # until it has read its replies; the selector says when
                if self._must_wait(connection):
                    channel.flush()
                    self._park(connection)
                    return
                frame = connection.inbox.popleft()
                began = time.monotonic()
                try:
                    self._answer(connection, frame)
                finally:
                    self._busy_s += time.monotonic() - began
                self._served += 1
            self._replication.flush(connection)
            if channel.wants_write:
                channel.flush()
        except ConnectionLost as error:
            self._lose(connection, str(error), quiet=True)
            return
        except (WireError, MemoryError) as error:
            self._lose(connection, str(error) or "no memory is left for its replies")
            return
        self._watch(connection)

    @staticmethod
    def _must_wait(connection: DataConnection) -> bool:
        """Return whether the next request waits until the state of its session has been sent to a backup."""
        link = None if connection.session is None else connection.session.link
        if link is None or not link.is_streaming:
            return False
        return not isinstance(connection.inbox[0].message, messages.SetBackup)

    def _park(self, connection: DataConnection) -> None:
        connection.is_parked = True
        self._selector.unregister(connection.channel)

    def _resume(self, connection: DataConnection) -> None:
        """Send replies that were held, and go on with the requests of a parked connection."""
        if connection.is_parked:
            connection.is_parked = False
            connection.events = selectors.EVENT_READ
            self._selector.register(connection.channel, selectors.EVENT_READ, connection)
        self._work_off(connection)

    def _watch(self, connection: DataConnection) -> None:
        """Select for what the connection can go on with."""
        if connection not in self._connections:
            return  # lost while a link of its session broke
        events = 0 if connection.inbox else selectors.EVENT_READ
        if connection.channel.wants_write or connection.inbox:
            # With requests waiting always: the last flush may have sent everything, and nothing else
            # would ever wake this connection.
            events |= selectors.EVENT_WRITE
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.channel, events, connection)

    def _answer(self, connection: DataConnection, frame: Frame) -> None:
        buffers: Sequence[Buffer] = ()
        try:
            message: Message | None
            kind = type(frame.message)
            self._lent.before(kind)
            if kind in _ABOUT_SESSIONS:
                message = self._about_session(connection, frame.message)
            elif kind is messages.SetBackup:
                message = self._replication.set_backup(connection, frame)
            elif kind is messages.CloseReplica:
                self._close_replica(connection)
                return
            elif kind in ON_LINKS:
                message = self._replication.on_link(connection, frame)
            else:
                if connection.session is None:
                    if connection.refusal:
                        raise CoordinatorReplaced(connection.refusal)
                    raise NotFoundError(
                        f"{connection.task} has joined no session on {self.task}: it was closed, or "
                        f"its lease ran out because its coordinator was gone"
                    )
                link = connection.session.link
                if link is not None:
                    link.sends_at_once = not connection.inbox
                message, buffers = connection.session.handle(frame, connection.sender_memory())
        except ConnectionDropped:
            raise
        except Exception as error:  # noqa: BLE001 - the error of the client that asked
            if isinstance(error, ProtocolError):
                # The text, not the error: a kept log record would keep frames, and so variables.
                reason = str(error)
                _log.warning("%s refused a message of %s: %s", self.task, connection.task, reason)
            unforeseen = not isinstance(error, StratagemError)
            message = failure_from(error, task=self.task, with_traceback=unforeseen)
            buffers = ()
        if message is None or self._replication.hold(connection, frame, message, buffers):
            return  # the reply waits for the backup
        connection.channel.enqueue_reply(frame, message, buffers)
        if buffers:  # replies without wait for the end of the turn
            self._lent.flush(connection)

    def _about_session(self, connection: DataConnection, message: Message) -> Message:
        """Answer messages about sessions as a whole, and about the server."""
        if isinstance(message, messages.OpenSession):
            self._jobs.admit(message, opens=True)
            connection.join(message, self._sessions.open(message, owner=connection))
            self._replication.greet(connection)
            return messages.Ok()
        if isinstance(message, messages.JoinSession):
            self._jobs.admit(message)
            connection.join(message, self._sessions.find(message.session, message.shard))
            self._replication.greet(connection)
            return messages.Ok()
        if isinstance(message, messages.OpenReplica):
            self._jobs.admit(message, opens=True)
            self._replication.open_replica(connection, message)
            return messages.Ok()
        if isinstance(message, messages.Promote):
            self._jobs.admit(message)
            self._replication.promote(message)
            return messages.Ok()
        if isinstance(message, messages.CloseSession):
            if connection.refusal:
                raise CoordinatorReplaced(connection.refusal)
            self._end_session(message.session, "its coordinator closed it")
            return messages.Ok()
        if isinstance(message, messages.AskJob):
            return self._jobs.report(message.session, time.monotonic())
        if isinstance(message, messages.ClaimJob):
            self._claim(connection, message)
            return messages.Ok()
        if isinstance(message, messages.KeepJob):
            return self._jobs.keep(message, connection, time.monotonic())
        if isinstance(message, messages.Ping):
            return self.pong()
        self._publish_facts()
        return messages.Stats(facts=self.facts)

    def _claim(self, connection: DataConnection, message: messages.ClaimJob) -> None:
        """Give a job to a new coordinator, and cut every other connection off its session."""
        self._jobs.check_claim(message)
        if not message.keep:
            self._end_session(message.session, f"{message.coordinator} starts the job anew")
        session = self._jobs.claim(message, connection, time.monotonic())
        for one in self._sessions.shards(message.session).values():
            one.end_transfers()
        for other in self._connections:
            is_link = other.memories is not None
            if other is not connection and other.joined == message.session and not is_link:
                other.session, other.refusal = None, self._jobs.refusal(message.session)
        _log.info("%s: %s has %s", self.task, message.coordinator, session)

    def _end_session(self, name: str, reason: str, *, shard: int | None = None) -> None:
        if shard is None:
            self._jobs.forget(name)
        ending = self._sessions.shards(name)
        self._replication.closing([one for at, one in ending.items() if shard in (None, at)])
        closed = self._sessions.close(name, shard)
        if not closed:
            return
        _log.info("%s closes session %s: %s", self.task, name, reason)
        for connection in self._connections:
            if connection.session in closed:
                connection.session = None

    def _close_replica(self, connection: DataConnection) -> None:
        """Free a backup whose primary was closed."""
        session = connection.session
        if session is not None and session.is_backup and connection.memories is not None:
            self._end_session(session.name, "its primary closed it", shard=session.shard)
            if not self._sessions.shards(session.name):
                self._jobs.forget(session.name)

    def _lose(self, connection: DataConnection, reason: str, *, quiet: bool = False) -> None:
        level = logging.INFO if quiet else logging.WARNING
        _log.log(level, "%s lost %s: %s", self.task, connection.task, reason)
        self._forget(connection)

    def _forget(self, connection: DataConnection) -> None:
        self._connections.discard(connection)
        self._lent.forget(connection)
        if not connection.is_parked:
            self._selector.unregister(connection.channel)
        self._replication.client_gone(connection)
        self._sessions.leave(connection, time.monotonic())
        self._jobs.leave(connection)
        connection.close()

    def _publish_facts(self) -> None:
        self._replication.check(time.monotonic())
        stores = [session.store.stats() for session in self._sessions.sessions()]
        self.facts = {
            "task": self.task,
            "sessions": len(self._sessions),
            "connections": len(self._connections),
            "served": self._served,
            "variables": sum(one.variables for one in stores),
            "bytes": sum(one.bytes for one in stores),
            "held_bytes": self._budget.used_bytes,
            "limit_bytes": self._budget.limit_bytes,
            "applied": sum(one.applied for one in stores),
            "duplicates": sum(one.duplicates for one in stores),
            "fenced": sum(one.fenced for one in stores),
            "checkpointing": any(session.is_checkpointing for session in self._sessions.sessions()),
            "busy_s": self._busy_s,
            "up_s": time.monotonic() - self._started_at,
            "life": self.life,
            **process_usage(),
        }
        self._next_facts = time.monotonic() + _TICK_S
