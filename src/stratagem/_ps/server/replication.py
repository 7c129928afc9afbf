"""Backups on one parameter server: links to the backups of its shards, and backups of other servers (docs/design/0010).

Part of the working thread of `loop.py`. The coordinator decides everything: which server keeps a backup, that a backup becomes the
primary, that a primary continues alone. A *view* numbers its decisions about a shard, and older ones are refused.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, final

from typing_extensions import override

from stratagem import _faults as faults
from stratagem import config
from stratagem._ps.server.backup_link import BackupLink, Forwarded
from stratagem._ps.server.data_connection import DataConnection
from stratagem._ps.server.replica_state import begin_state, write_state_keys, write_state_rows
from stratagem._ps.server.session import Session
from stratagem._ps.server.session_table import SessionTable
from stratagem._wire import frames, messages
from stratagem._wire.connecting import connect
from stratagem._wire.failures import failure_from
from stratagem._wire.frames import Buffer
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.messages import Frame, Message
from stratagem._wire.round_trip import answer_limit_s
from stratagem.errors import ConnectionLost, NotFoundError, ProtocolError, WireError

_log = logging.getLogger("stratagem.ps")

ON_LINKS: Final = frozenset(
    (
        messages.OpenReplica,
        messages.ReplicaState,
        messages.ReplicaRows,
        messages.ReplicaKeys,
        messages.ReplicaReady,
        messages.FromClient,
        messages.ClientGone,
        messages.CloseReplica,
    )
)
"""Messages of a primary that are not those of its clients."""


@final
class Replication:
    """The backups of one server.

    Args:
        task: this server.
        key: the cluster's key, to connect to other servers.
        sessions: of this server.
        connections: of this server.
        selector: of the working thread.
        resume: lets the requests of a connection go on.
        lose: closes a connection, for a reason.
    """

    def __init__(
        self,
        task: str,
        key: ClusterKey | None,
        sessions: SessionTable,
        connections: Collection[DataConnection],
        selector: selectors.BaseSelector,
        resume: Callable[[DataConnection], None],
        lose: Callable[[DataConnection, str], None],
    ) -> None:
        self._task = task
        self._key = key
        self._sessions = sessions
        self._connections = connections
        self._selector = selector
        self._resume = resume
        self._lose = lose
        self._links: list[BackupLink] = []
        self._silence_limit_s = config.partition_limit_s()
        self.unlinked: tuple[tuple[str, int, int], ...] = ()
        """Names, shards and views whose backup does not answer; safe to read from any thread."""

    # -- the primary --------------------------------------------------------------------------

    def set_backup(self, connection: DataConnection, frame: Frame) -> Message | None:
        """Begin or end the link of a shard; return the reply, or None if it comes later.

        Raises:
            ProtocolError: the coordinator has decided something newer.
            WireError: the other server cannot be reached.
        """
        message, session = frame.message, connection.session
        assert isinstance(message, messages.SetBackup)
        if session is None or session.is_backup:
            raise NotFoundError(f"{connection.task} has joined no shard on {self._task}")
        if message.view < session.view:
            raise ProtocolError(
                f"view {message.view} is older than {session.view}, which {self._task} has"
            )
        session.view = message.view
        if session.link is not None:
            self._end_link(session.link, "the coordinator ended it")
        if not message.address:
            return messages.Ok()
        channel = connect(
            message.address,
            key=self._key,
            peer=f"the backup of shard {session.shard} at {message.address}",
            timeout_s=answer_limit_s(),
        )
        try:
            hello = messages.Hello(purpose="data", task=self._task)
            channel.request(hello, timeout_s=answer_limit_s())  # its accepting thread answers
        except BaseException:
            channel.close()
            raise
        link = session.link = BackupLink(channel, session)
        self._links.append(link)
        self._selector.register(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        opening = messages.OpenReplica(
            session=session.name,
            shard=session.shard,
            view=message.view,
            lease_s=session.lease_s,
            instance=connection.instance,
            epoch=connection.epoch,
        )
        link.open(opening, [one.memory for one in self._clients(session)])
        link.stream(Forwarded(0, frame, connection, messages.Ok()))
        return None

    def hold(
        self, connection: DataConnection, frame: Frame, reply: Message, buffers: Sequence[Buffer]
    ) -> bool:
        """Keep a reply until the backup has applied the message, too; False if it may be sent."""
        session = connection.session
        link = None if session is None else session.link
        if link is None:
            return False
        if isinstance(reply, messages.Transfer) and reply.done and link.session.was_read:
            # Rows were read from a checkpoint: the backup gets the whole state anew.
            link.session.was_read = False
            if not link.failure:
                link.stream(Forwarded(0, frame, connection, reply))
                self._watch(link)
                return True
        return link.hold(connection, frame, reply, buffers)

    def flush(self, connection: DataConnection) -> None:
        """Send what a connection's messages have put on its link."""
        session = connection.session
        if session is not None and session.link is not None:
            self._pump(session.link)

    def turn(self, link: BackupLink) -> None:
        """Handle a link whose connection is ready."""
        try:
            answers = link.answers()
        except WireError as error:
            self._break(link, str(error))
            return
        if answers and faults.active is not None:
            faults.active.at("backup.before_reply")
        for one in answers:
            if one.frame is not None and isinstance(one.frame.message, messages.SetBackup):
                link.backup_at = one.frame.message.address
                for client in self._clients(link.session):
                    self.greet(client)
        self._send(answers)
        if link.is_deposed:
            self._give_way(link.session)
        else:
            self._pump(link)

    def _clients(self, session: Session) -> list[DataConnection]:
        return [one for one in self._connections if one.session is session and one.memories is None]

    def greet(self, connection: DataConnection) -> None:
        """Tell a client where the backup of its server is."""
        link = None if connection.session is None else connection.session.link
        if link is not None and link.backup_at:
            note = messages.BackupAt(address=link.backup_at)
            connection.channel.enqueue(frames.NOTIFY, 0, note)

    def _give_way(self, session: Session) -> None:
        """Free a shard that its backup has taken over; its clients look for the new primary."""
        why = f"another server has taken shard {session.shard} of {session.name} over"
        _log.warning("%s frees what it has: %s", self._task, why)
        self.detach(session, why)
        self.closing([session])
        self._sessions.close(session.name, session.shard)

    def _pump(self, link: BackupLink) -> None:
        if link.failure:
            return
        was_streaming = link.is_streaming
        try:
            link.pump()
        except (WireError, ValueError) as error:
            self._break(link, str(error))
            return
        self._watch(link)
        if was_streaming and not link.is_streaming:
            self._resume_clients(link.session)

    def _watch(self, link: BackupLink) -> None:
        wants_write = link.channel.wants_write or link.is_streaming
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_write else 0)
        if self._selector.get_key(link.channel).events != events:
            self._selector.modify(link.channel, events, link)

    def _break(self, link: BackupLink, reason: str, level: int = logging.WARNING) -> None:
        """Note that a link is broken: its replies wait for the coordinator's decision."""
        if link.failure:
            return
        self._selector.unregister(link.channel)
        name, shard = link.session.name, link.session.shard
        _log.log(level, "%s lost the backup of shard %d of %s: %s", self._task, shard, name, reason)
        error = ConnectionLost(f"the backup of shard {shard} was lost: {reason}")
        for one in link.fail(reason):
            one.reply = failure_from(error, task=self._task, with_traceback=False)
            self._send([one])
        self._resume_clients(link.session)
        self.check(time.monotonic())

    def _end_link(self, link: BackupLink, reason: str) -> None:
        """End a link; the replies that it holds are sent."""
        self._break(link, reason, logging.INFO)
        link.session.link = None
        self._links.remove(link)
        self._send(link.release())
        self.check(time.monotonic())

    def _send(self, answers: list[Forwarded]) -> None:
        for one in answers:
            if one.connection in self._connections:
                assert one.connection is not None
                assert one.frame is not None
                assert one.reply is not None
                self._reply(one.connection, one.frame, one.reply, one.buffers)
        for connection in {one.connection for one in answers}:
            if connection is not None and connection in self._connections:
                self._resume(connection)

    def _reply(
        self,
        connection: DataConnection,
        frame: Frame,
        reply: Message,
        buffers: Sequence[Buffer],
    ) -> None:
        """Send a reply that was held; one to a write with the values that it asks for, as they are now."""
        if connection.session is not None and not buffers:
            memory = connection.sender_memory()
            reply, buffers = connection.session.with_values(reply, frame, memory)
        connection.channel.enqueue_reply(frame, reply, buffers)
        if buffers:  # memory of variables, which the next write changes
            try:
                connection.channel.flush()
            except WireError:
                return  # the next turn of the connection finds out
            connection.channel.keep_unsent()

    def _resume_clients(self, session: Session) -> None:
        for connection in list(self._connections):
            if connection.session is session and connection.is_parked:
                self._resume(connection)

    def check(self, now: float) -> None:
        """Note the shards whose backup does not answer."""
        for link in self._links:
            if not link.failure and link.silent_s(now) > self._silence_limit_s:
                self._break(link, f"it has not answered for {link.silent_s(now):.0f} s")
        self.unlinked = tuple(
            (link.session.name, link.session.shard, link.session.view)
            for link in self._links
            if link.failure
        )

    def client_gone(self, connection: DataConnection) -> None:
        """Note that a client has disconnected."""
        session = connection.session
        if session is not None and session.link is not None and connection.memories is None:
            session.link.client_gone(connection.memory)

    def closing(self, sessions: list[Session]) -> None:
        """End the links of sessions that end."""
        for link in [one for one in self._links if one.session in sessions]:
            if not link.failure:
                self._selector.unregister(link.channel)
                try:
                    link.close()
                except WireError:
                    link.channel.close()
            self._links.remove(link)
            link.session.link = None
        self.unlinked = ()

    def abandon(self) -> None:
        """Close all links without a word: this server ends, and its backups take over."""
        for link in self._links:
            link.channel.close()
        self._links.clear()

    # -- the backup ---------------------------------------------------------------------------

    def on_link(self, connection: DataConnection, frame: Frame) -> Message:
        """Handle a message of a primary."""
        message = frame.message
        if isinstance(message, messages.FromClient):
            connection.client = message.client
            return messages.Ok()
        if isinstance(message, messages.ClientGone):
            gone = (connection.memories or {}).pop(message.client, None)
            if gone is not None:
                gone.close()
            return messages.Ok()
        session = connection.session
        if session is None or connection.memories is None:
            raise NotFoundError(connection.refusal or f"this is no link of {self._task}")
        if isinstance(message, messages.ReplicaState):
            if session.store.stats().variables or session.deleted.ranges:
                session = self._renew(connection, session)
            begin_state(session, message)
        elif isinstance(message, messages.ReplicaRows):
            if faults.active is not None:
                faults.active.at("backup.receives_state")
            write_state_rows(session, message, frame)
        elif isinstance(message, messages.ReplicaKeys):
            write_state_keys(session, message, frame)
        else:
            session.complete()
        return messages.Ok()

    def _renew(self, connection: DataConnection, session: Session) -> Session:
        """Begin a backup anew, on the same link."""
        self._sessions.close(session.name, session.shard)
        opening = messages.OpenReplica(
            session=session.name, shard=session.shard, view=session.view, lease_s=session.lease_s
        )
        connection.session = self._sessions.open_backup(opening, link=connection)
        return connection.session

    def open_replica(self, connection: DataConnection, message: messages.OpenReplica) -> None:
        """Keep a backup of a shard; older ones of the same shard, and older primaries, are freed.

        Raises:
            ProtocolError: this server has something newer.
        """
        known = self._sessions.get(message.session, message.shard)
        if known is not None:
            if known.view >= message.view:
                raise ProtocolError(
                    f"{self._task} has view {known.view} of shard {message.shard}, view "
                    f"{message.view} is not newer"
                )
            self.detach(known, f"{self._task} keeps a newer backup of shard {message.shard}")
            self.closing(self._sessions.close(message.session, message.shard))
        connection.memories = {}
        connection.session = self._sessions.open_backup(message, link=connection)
        connection.joined, connection.refusal = message.session, ""

    def promote(self, message: messages.Promote) -> None:
        """Make a backup the primary.

        Raises:
            NotFoundError: there is no complete backup here.
        """
        session = self._sessions.get(message.session, message.shard)
        if faults.active is not None:
            faults.active.at("backup.in_promotion")
        what = f"shard {message.shard} of session {message.session!r}"
        if session is None:
            raise NotFoundError(f"{self._task} has no backup of {what}")
        if not session.is_complete:
            raise NotFoundError(f"{self._task} has not received the whole state of {what}")
        if message.view < session.view:
            raise ProtocolError(f"view {message.view} of {what} is older than {session.view}")
        session.view = message.view
        if session.is_backup:
            session.is_backup = False
            self.detach(session, f"{self._task} is the primary of {what} now")
            _log.warning("%s takes over %s", self._task, what)

    def detach(self, session: Session, refusal: str) -> None:
        """Close all connections to a shard: clients look for it elsewhere, a primary learns that it is none."""
        for other in list(self._connections):
            if other.session is session:
                if other.memories is not None:
                    other.channel.enqueue(frames.NOTIFY, 0, messages.Deposed())
                    try:
                        other.channel.flush()
                    except WireError:
                        pass  # it is gone already
                self._lose(other, refusal)

    @override
    def __repr__(self) -> str:
        return f"<Replication of {self._task}: {len(self._links)} links>"
