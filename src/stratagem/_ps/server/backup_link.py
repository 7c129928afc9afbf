"""The connection of a primary to its backup: forwarded messages, and replies that wait for the backup (docs/design/0010).

Every message that changes the shard is forwarded before it is applied here, so that both servers work at the same time. Its
reply is held until the backup has answered. A broken link holds all replies: only the coordinator decides that the
primary continues alone. No socket call waits: `replication.py` calls when the connection is ready.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from typing_extensions import override

from stratagem import _faults as faults
from stratagem._ps.inline_write import inline_write
from stratagem._ps.server.client_memory import ClientMemory
from stratagem._ps.server.data_connection import DataConnection
from stratagem._ps.server.replica_state import Sent, state_messages
from stratagem._ps.server.session import Session
from stratagem._wire import codec, frames, messages
from stratagem._wire.channel import Channel
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Frame, Message
from stratagem.errors import ProtocolError, WireError

STREAMED_BYTES: Final = 1 << 24
"""Bytes of state that may be queued: enough to keep the connection busy."""


@dataclass(slots=True)
class Forwarded:
    """A request to the backup, and the reply that waits for the answer."""

    call: int
    frame: Frame | None = None  # of the client; None if nothing waits for it
    connection: DataConnection | None = None
    reply: Message | None = None
    buffers: Sequence[Buffer] = ()  # of the reply; memory that no write changes
    opens: int = 0  # the client whose memory the backup is to map


@final
class BackupLink:
    """One primary's connection to its backup.

    Args:
        channel: to the server that has the backup.
        session: the shard.

    Attributes:
        failure: why the link is broken; empty while it works.
        is_deposed: the backup has taken over.
    """

    def __init__(self, channel: Channel, session: Session) -> None:
        self.channel = channel
        self.session = session
        self.failure = ""
        self.is_deposed = False
        self.backup_at = ""
        """Address of the backup, once it is complete."""
        self.sends_at_once = True
        """True if messages are sent when they are forwarded; else by the next `pump`, together."""
        self.heard_at = time.monotonic()
        self._sent: deque[Forwarded] = deque()
        self._held: list[Forwarded] = []  # answered by none after a failure
        self._calls = 0
        self._client = -1  # whose messages the backup expects
        self._unmapped: set[int] = set()  # clients whose memory the backup cannot map
        self._state: Iterator[Sent] | None = None
        self._waits_for_state: list[Forwarded] = []

    @property
    def is_streaming(self) -> bool:
        """True if the state is being sent."""
        return self._state is not None

    def silent_s(self, now: float) -> float:
        """Return for how long the backup has owed an answer."""
        return now - self.heard_at if self._sent else 0.0

    # -- the state ----------------------------------------------------------------------------

    def open(self, message: messages.OpenReplica, memories: list[ClientMemory]) -> None:
        """Begin the link, and tell the backup about the memory of clients."""
        self._enqueue(message, (), Forwarded(0))
        for memory in memories:
            if memory.refs:
                self._begin_client(memory)
                opening = messages.OpenSegments(segments=memory.refs)
                self._enqueue(opening, (), Forwarded(0, opens=memory.number))

    def stream(self, waiting: Forwarded) -> None:
        """Begin to send the whole state; `waiting` is answered when the backup has it."""
        self._state = state_messages(self.session)
        self._waits_for_state.append(waiting)

    def pump(self) -> None:
        """Send what the connection takes; more of the state if there is some."""
        while self._state is not None and self.channel.outgoing_bytes < STREAMED_BYTES:
            message, buffers = next(self._state)
            if faults.active is not None:
                faults.active.at("backup.in_streaming")
            if not isinstance(message, messages.ReplicaReady):
                self._enqueue(message, buffers, Forwarded(0))
                continue
            self._state = None
            for waiting in self._waits_for_state:
                self._enqueue(message, buffers, waiting)
            self._waits_for_state = []
            self.channel.flush()
            self.channel.keep_unsent()  # clients go on and write to the tensors
        self.channel.flush()

    # -- messages of clients ------------------------------------------------------------------

    def forward(self, frame: Frame, memory: ClientMemory) -> None:
        """Send a client's message to the backup; its reply must be given to `hold`."""
        if faults.active is not None:
            faults.active.at("backup.before_forward")
        message = frame.message
        forwarded = Forwarded(0, frame)
        if self.failure:
            if not isinstance(message, messages.OpenSegments):  # which changes no variable
                self._held.append(forwarded)
            return
        self._begin_client(memory)
        buffers: list[Buffer] = [frame.buffer(index) for index in range(len(frame.spans))]
        if isinstance(message, messages.OpenSegments):
            forwarded.opens = memory.number
        elif isinstance(message, messages.Write):
            if message.read:  # the backup only writes
                message = messages.Write(origin=message.origin, operations=message.operations)
            if memory.number in self._unmapped:
                message, buffers = inline_write(
                    message, buffers, lambda ref: codec.bytes_of(memory.tensor(ref, frame))
                )
        if frame.kind == frames.NOTIFY:
            self.channel.enqueue(frames.NOTIFY, 0, message, buffers)
        else:
            self._enqueue(message, buffers, forwarded)
        if self.sends_at_once:
            try:
                self.channel.flush()
            except WireError:
                pass  # the next turn of the link finds out
        if faults.active is not None:
            faults.active.at("backup.after_forward")

    def hold(
        self,
        connection: DataConnection,
        frame: Frame,
        reply: Message,
        buffers: Sequence[Buffer] = (),
    ) -> bool:
        """Keep a reply until the backup has answered; False if this message was not forwarded."""
        last = (self._held if self.failure else self._sent) or None
        if last is None or last[-1].frame is not frame:
            return False
        last[-1].connection, last[-1].reply, last[-1].buffers = connection, reply, buffers
        return True

    def client_gone(self, memory: ClientMemory) -> None:
        """Let the backup release the memory of a client."""
        self._unmapped.discard(memory.number)
        if not self.failure and memory.refs:
            gone = messages.ClientGone(client=memory.number)
            self.channel.enqueue(frames.NOTIFY, 0, gone)

    def answers(self) -> list[Forwarded]:
        """Take in what the backup has answered; return the replies that may be sent now.

        Raises:
            WireError: the link is broken, or the backup has another state.
        """
        found: list[Forwarded] = []
        for frame in self.channel.receive_ready():
            self.heard_at = time.monotonic()
            if isinstance(frame.message, messages.Deposed):
                self.is_deposed = True
                continue
            if not self._sent or self._sent[0].call != frame.call:
                raise ProtocolError(f"the backup answered {type(frame.message).__name__} unasked")
            one = self._sent.popleft()
            self._compare(one, frame)
            if one.connection is not None and one.reply is not None:
                found.append(one)
        if not self._sent:
            self.heard_at = time.monotonic()
        return found

    def _compare(self, one: Forwarded, frame: Frame) -> None:
        """Raise if the backup's answer shows that it is not what this server is."""
        failed = frame.kind == frames.FAILURE
        answer = frame.message
        if one.opens:
            (self._unmapped.add if failed else self._unmapped.discard)(one.opens)
        elif one.frame is None:
            if failed:
                raise ProtocolError(f"the backup refused the state: {_text(answer)}")
        elif one.reply is not None and (
            failed != isinstance(one.reply, messages.RemoteFailure)
            or (isinstance(one.reply, messages.Written) and answer != one.reply)
            or (isinstance(one.reply, messages.ResolvedKeys) and not _gave_same_rows(one, frame))
        ):
            raise ProtocolError(
                f"the backup has another state: it answered {_text(answer)}, expected "
                f"{_text(one.reply)}"
            )

    # -- the end ------------------------------------------------------------------------------

    def fail(self, reason: str) -> list[Forwarded]:
        """Break the link; return who waits for the state, since it will not come. Other replies stay held."""
        if self.failure:
            return []
        self.failure = reason
        self._state = None
        self.channel.close()
        asked = [*self._sent, *self._waits_for_state]
        self._sent.clear()
        self._waits_for_state = []
        waiting = [one for one in asked if one.frame is not None and _asks_for_state(one.frame)]
        self._held += [one for one in asked if one.frame is not None and one not in waiting]
        return waiting

    def release(self) -> list[Forwarded]:
        """Return all held replies: the coordinator lets this server continue alone."""
        held, self._held = self._held, []
        return [one for one in held if one.connection is not None and one.reply is not None]

    def close(self) -> None:
        """Tell the backup that the session has ended."""
        if not self.failure:
            self.channel.enqueue(frames.NOTIFY, 0, messages.CloseReplica())
            self.channel.flush()
            self.channel.close()
            self.failure = "the session was closed"

    def _begin_client(self, memory: ClientMemory) -> None:
        if self._client != memory.number:
            self._client = memory.number
            self.channel.enqueue(frames.NOTIFY, 0, messages.FromClient(client=memory.number))

    def _enqueue(self, message: Message, buffers: Sequence[Buffer], one: Forwarded) -> None:
        if not self._sent:
            self.heard_at = time.monotonic()
        self._calls = self._calls % 0xFFFFFFFF + 1
        one.call = self._calls
        self.channel.enqueue(frames.REQUEST, one.call, message, buffers)
        self._sent.append(one)

    @override
    def __repr__(self) -> str:
        state = self.failure or ("streaming" if self.is_streaming else "open")
        return f"<BackupLink to {self.channel.peer} {state}, {len(self._sent)} unanswered>"


def _gave_same_rows(one: Forwarded, frame: Frame) -> bool:
    same = len(one.buffers) == len(frame.spans) and frame.message == one.reply
    return same and all(frame.buffer(n) == each for n, each in enumerate(one.buffers))


def _text(message: Message) -> str:
    if isinstance(message, messages.RemoteFailure):
        return f"{message.type_name}: {message.text}"
    return repr(message)


def _asks_for_state(frame: Frame) -> bool:
    return isinstance(frame.message, messages.SetBackup | messages.AskTransfer)
