"""One client's connection to one parameter server, taken up again when it breaks.

`client.py` holds one `Link` per server. A link remembers every request until its reply is here: if the connection breaks
while the server lives, it connects again and sends them again, in order. Servers recognise writes they have
applied (`ledger.py`), and every other request may be repeated. If the server is gone, or has
come back as another life without its variables, that is `ParameterServerLost`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from typing_extensions import override

from stratagem import config
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.frames import Buffer, Limits
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.messages import Frame, Message
from stratagem.errors import (
    ConnectionLost,
    DeadlineExceeded,
    NotFoundError,
    ParameterServerLost,
    ProtocolError,
    WireError,
)

_RECONNECT_S = 2.0
"""For a server that still lives to let us in again: noticed and repaired well within 5 seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Which session a client belongs to, as whom.

    Example:
        >>> from stratagem._ps.client.server_connection import Membership
        >>> Membership(session="s", task="/job:worker/task:0").is_owner
        False
    """

    session: str
    task: str
    is_owner: bool = False
    """True for the coordinator: it opens the session and keeps it alive."""

    lease_s: float = 60.0
    """How long servers keep the variables after the coordinator is gone."""

    key: ClusterKey | None = None

    def entry(self) -> Message:
        """The message by which a connection enters the session."""
        if self.is_owner:
            return messages.OpenSession(session=self.session, lease_s=self.lease_s)
        return messages.JoinSession(session=self.session)


@dataclass(slots=True, eq=False)
class Pending:
    """A request whose reply has not been collected."""

    message: Message
    buffers: Sequence[Buffer]
    call: int = 0
    was_repeated: bool = False


@final
class ServerConnection:
    """Requests to one server. Not for several threads at once; `client.py` has the lock."""

    def __init__(self, task: str, address: str, membership: Membership) -> None:
        self.task = task
        self.address = address
        self.names: dict[int, str] = {}
        """Variables known to be there, for errors."""
        self.announced: tuple[messages.SegmentRef, ...] = ()
        """Slots of this client the server has mapped."""
        self.sequence = 0
        self.server_shares_memory = False
        self.frame_bytes = Limits().frame_bytes
        """What the server takes in one message."""
        self._membership = membership
        self._timeout_s = config.wire_timeout_s()
        self._channel: Channel | None = None
        self.welcome: messages.Welcome | None = None
        """What the server said of itself; it stays the same life, or it is lost."""
        self._pending: list[Pending] = []
        self._lost: str | None = None

    def open(self, *, timeout_s: float) -> None:
        """Connects and enters the session: one attempt.

        Raises:
            ConnectionLost, DeadlineExceeded: nobody answers there.
            AuthenticationError, ProtocolError: it is not one of ours.
        """
        self._connect(time.monotonic() + timeout_s)

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent: it was opened, and neither closed nor lost since."""
        return self._channel is not None and self._lost is None

    def begin(self, message: Message, buffers: Sequence[Buffer] = ()) -> Pending:
        """Sends a request; `collect` waits for its reply."""
        pending = Pending(message, buffers)
        self.send(pending)
        return pending

    def send(self, pending: Pending, *, later: bool = False) -> None:
        """As `begin`, for a request that its caller noted before it is on its way.

        With `later` it waits for company: the next one takes it along, and so does `collect`.
        """
        channel = self._open_channel()
        self._pending.append(pending)
        try:
            pending.call = channel.begin(pending.message, pending.buffers, later=later)
        except ConnectionLost as error:
            self._recover(error)
        except DeadlineExceeded as error:
            raise self._lost_error(str(error)) from error

    def interrupted(self, keep: Sequence[Pending]) -> None:
        """The caller was interrupted (Ctrl-C) while it sent or read: nobody knows how far it came.

        This connection is given up. The next request makes another one and repeats `keep`, the
        writes that still matter; those which the server has applied it recognises.
        """
        self._pending = list(keep)
        if self._channel is not None:
            self._channel.abandon()

    def collect(self, pending: Pending, *, timeout_s: float | None = None) -> Frame:
        """Waits for the reply.

        Raises:
            ParameterServerLost: the server is gone, came back empty, or did not reply in time.
            Exception: what the server raised.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                channel = self._open_channel()
                try:
                    return channel.collect(pending.call, deadline=deadline)
                except ConnectionLost as error:
                    self._recover(error)
                except DeadlineExceeded as error:
                    raise self._lost_error(f"did not reply within {timeout_s:g} s") from error
        finally:
            if pending in self._pending:
                self._pending.remove(pending)

    def flush(self) -> None:
        """Sends what waits for company, as far as the connection takes it; never waits."""
        if self._channel is not None and self._channel.is_open:
            try:
                self._channel.flush()
            except WireError:
                pass  # `collect` makes another connection; that may take a while

    def is_answered(self, pending: Pending) -> bool:
        """Whether `collect` would return or raise at once. Never waits."""
        if self._lost is not None:
            return True
        return self._channel is not None and self._channel.has_reply(pending.call)

    def request(self, message: Message, buffers: Sequence[Buffer] = ()) -> Frame:
        """Sends a request and waits for its reply."""
        return self.collect(self.begin(message, buffers))

    def close(self) -> None:
        """Hangs up. Repeatable."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._pending.clear()

    @override
    def __repr__(self) -> str:
        state = "lost" if self._lost else "open" if self._channel else "closed"
        return f"<Link to {self.task} {state}, {len(self._pending)} outstanding>"

    def _open_channel(self) -> Channel:
        if self._lost is not None:
            raise self._lost_error(self._lost)
        if self._channel is None:
            raise ConnectionLost(f"the connection to {self.task} was closed by this process")
        return self._channel

    def _connect(self, deadline: float) -> None:
        channel = connect(
            self.address,
            key=self._membership.key,
            peer=self.task,
            timeout_s=max(0.1, deadline - time.monotonic()),
        )
        try:
            self._enter(channel, deadline)
        except BaseException:
            channel.close()
            raise
        self._channel = channel

    def _enter(self, channel: Channel, deadline: float) -> None:
        def ask(message: Message) -> Message:
            left = max(0.1, deadline - time.monotonic())
            return channel.request(message, timeout_s=left).message

        welcome = ask(messages.Hello(purpose="data", task=self._membership.task))
        if not isinstance(welcome, messages.Welcome):
            raise ProtocolError(f"{self.task} answered Hello by {type(welcome).__name__}")
        known = self.welcome
        if known is not None:
            if known.life != welcome.life:
                raise self._lost_error("was restarted and has lost its variables")
            # Opening would make a new, empty session if the old one's lease has run out.
            ask(messages.JoinSession(session=self._membership.session))
        ask(self._membership.entry())
        self.welcome = welcome
        self.server_shares_memory = welcome.shares_memory
        self.frame_bytes = welcome.frame_bytes
        if self.announced:
            try:
                ask(messages.OpenSegments(segments=self.announced))
            except NotFoundError as error:
                raise self._lost_error("cannot map this process's memory any more") from error

    def _recover(self, cause: ConnectionLost) -> None:
        """Connects again and repeats what is outstanding; ParameterServerLost if that fails."""
        if self._lost is not None:  # declared so by somebody else while we waited
            raise self._lost_error(self._lost) from cause
        if self._channel is not None:
            self._channel.close()
        deadline = time.monotonic() + _RECONNECT_S
        try:
            self._connect(deadline)
            for pending in self._pending:
                assert self._channel is not None
                pending.was_repeated = True
                pending.call = self._channel.begin(pending.message, pending.buffers)
        except (WireError, NotFoundError) as error:  # or somebody else is there by now
            raise self._lost_error(f"is gone: {cause}; connecting again failed: {error}") from error

    def declare_lost(self, what: str) -> ParameterServerLost:
        """Somebody else found out that the server is lost; what waits here fails at once from now on."""
        lost = self._lost_error(what)
        if self._channel is not None:
            self._channel.close()  # wakes who waits for a reply
        return lost

    def _lost_error(self, what: str) -> ParameterServerLost:
        self._lost = what
        names = sorted(self.names.values())
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        held = f" It held {shown}." if names else ""
        return ParameterServerLost(
            f"parameter server {self.task} at {self.address!r} {what}.{held} Start it again, create "
            f"the strategy anew and restore the last checkpoint.",
            task=self.task,
            variables=names,
        )
