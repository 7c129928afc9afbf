"""Connection of one client to one parameter server, which reconnects when it breaks.

`PsClient` holds one `ServerConnection` per server. A connection keeps every request until the reply
arrives. If it breaks while the server is running, it reconnects and repeats them, in order; servers recognise
writes they have applied (`server/ledger.py`), and every other request may be repeated. If the server cannot
be reached or does not reply in time, the requests fail with `ParameterServerLost`, and the next request
tries to connect again. `connection_state.py` decides which transitions are allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from typing_extensions import override

from stratagem import config
from stratagem._ps.client.connection_state import SURVIVAL, ConnectionState, Phase
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.frames import Buffer, Limits, Place
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.messages import Frame, Message
from stratagem._wire.round_trip import answer_limit_s
from stratagem.errors import (
    ConnectionLost,
    CoordinatorReplaced,
    DeadlineExceeded,
    NotFoundError,
    ParameterServerLost,
    ProtocolError,
    WireError,
)

Address: TypeAlias = Callable[[], str]
"""Returns where a server listens now (``host:port``); called at every attempt to connect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Which session a client belongs to, as which task.

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

    instance: str = ""
    """Of a named job: which start of it."""

    epoch: int = 0
    """Of a named job: the number of its coordinator."""

    shard: int = -1
    """Of a session with backups: which server's part (docs/design/0010)."""

    def entry(self) -> Message:
        """Return the message by which a connection enters the session; a ping if it enters none."""
        if self.session and self.is_owner:
            return messages.OpenSession(
                session=self.session,
                lease_s=self.lease_s,
                instance=self.instance,
                epoch=self.epoch,
                shard=self.shard,
            )
        return self.joining()

    def joining(self) -> Message:
        """Return the message by which a connection enters a session that exists."""
        if not self.session:
            return messages.Ping()
        return messages.JoinSession(
            session=self.session, instance=self.instance, epoch=self.epoch, shard=self.shard
        )


@dataclass(slots=True, eq=False)
class Pending:
    """A request whose reply has not been collected."""

    message: Message
    buffers: Sequence[Buffer]
    call: int = 0
    was_repeated: bool = False
    failure: str = ""  # why no reply will come
    place: Place | None = None  # of large buffers of the reply

    def begin(self, channel: Channel, *, later: bool = False) -> None:
        self.call = channel.begin(self.message, self.buffers, later=later, place=self.place)


@final
class ServerConnection:
    """Requests to one server. Not thread-safe, except `give_up`; `PsClient` holds a lock.

    Args:
        task: the server's name.
        address: where it listens, or a function that is asked at every attempt to connect.
        membership: the session to enter.

    Attributes:
        names: variables known to be on the server, for errors.
        announced: this client's shared memory that the server has mapped.
        segments: returns this client's shared memory as it is now.
        on_unmapped: called when the server cannot map it; puts the values of outstanding writes into their messages.
        sequence: number of the last write.
        frame_bytes: how many bytes of tensors the server takes in one message.
        welcome: what the server said about itself.
        last_address: where the last attempt to connect went.
        recovery: waits until the lost server has been restored, or finds the one that has taken over; returns
            False if there is none. Outstanding requests are repeated there. Workers have one with backups only.
    """

    def __init__(self, task: str, address: str | Address, membership: Membership) -> None:
        self.task = task
        self.names: dict[int, str] = {}
        self.announced: tuple[messages.SegmentRef, ...] = ()
        self.segments: Callable[[], tuple[messages.SegmentRef, ...]] = tuple
        self.on_unmapped: Callable[[], None] = lambda: None
        self.sequence = 0
        self.frame_bytes = Limits().frame_bytes
        self.welcome: messages.Welcome | None = None
        self.last_address = ""
        self.backup_address = ""
        """Where the server's backup is, as far as the server said so."""
        self._address = address if callable(address) else (lambda: address)
        self._membership = membership
        self._timeout_s = config.wire_timeout_s()
        self.recovery: Callable[[Exception], bool] | None = None
        self._state = ConnectionState()
        self._channel: Channel | None = None
        self._pending: list[Pending] = []

    def find_address(self) -> str:
        """Ask where the server listens now.

        Raises:
            ConnectionLost: that cannot be found out.
        """
        try:
            self.last_address = self._address()
        except Exception as error:  # resolvers ask other services, which fail in many ways
            raise ConnectionLost(f"the address of {self.task} is not known: {error}") from error
        return self.last_address

    @property
    def server(self) -> str:
        """Identity of the server process that has the variables; empty before the first connection."""
        return self._state.server

    @property
    def is_open(self) -> bool:
        """True if the connection is open, as far as this process knows."""
        return self._state.phase is Phase.OPEN

    def open(self, *, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Connect and enter the session: one attempt, which ends early when `stopped` returns True.

        Raises:
            ConnectionLost, DeadlineExceeded: no server answers there.
            AuthenticationError, ProtocolError: another kind of task answers there.
        """
        self._connect(time.monotonic() + timeout_s, stopped)

    def begin(self, message: Message, buffers: Sequence[Buffer] = ()) -> Pending:
        """Send a request; `collect` waits for its reply."""
        pending = Pending(message, buffers)
        self.send(pending)
        return pending

    def send(self, pending: Pending, *, later: bool = False) -> None:
        """Send a request that the caller has noted; with `later`, together with the next one.

        `collect` and `flush` send what waits, too.
        """
        channel = self._open_channel()
        self._pending.append(pending)
        if pending.failure:  # found out while connecting again; `collect` raises it
            return
        try:
            pending.begin(channel, later=later)
        except ConnectionLost as error:
            self._reconnect(error, time.monotonic() + self._timeout_s)
        except DeadlineExceeded as error:
            raise self._broken(str(error)) from error

    def collect(self, pending: Pending, *, timeout_s: float | None = None) -> Frame:
        """Wait for the reply.

        Raises:
            ParameterServerLost: the server is gone, came back without its variables, or did not reply
                in time.
            Exception: what the server raised.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                if pending.failure:
                    raise self._error(pending.failure)
                channel = self._open_channel(deadline)
                try:
                    return channel.collect(pending.call, deadline=deadline)
                except ConnectionLost as error:
                    self._reconnect(error, deadline)
                except DeadlineExceeded as error:
                    raise self._broken(f"did not reply within {timeout_s:g} s") from error
        finally:
            if pending in self._pending:
                self._pending.remove(pending)

    def request(self, message: Message, buffers: Sequence[Buffer] = ()) -> Frame:
        """Send a request and wait for its reply."""
        return self.collect(self.begin(message, buffers))

    def flush(self) -> None:
        """Send what waits, as far as the connection takes it; never wait."""
        if self._channel is not None and self._channel.is_open:
            try:
                self._channel.flush()
            except WireError:
                pass  # `collect` connects again, which may take a while

    def is_answered(self, pending: Pending) -> bool:
        """Return whether `collect` would return or raise at once. Never waits."""
        if pending.failure or not self._state.is_usable:
            return True
        return self._channel is not None and self._channel.has_reply(pending.call)

    @property
    def is_cut_off(self) -> bool:
        """True if the server has closed the connection; the next request connects again."""
        return self._channel is not None and not self._channel.is_open

    def notify(self, message: Message) -> None:
        """Send a message that needs no reply if that is possible at once; else do nothing."""
        if self._channel is not None and self._channel.is_open:
            try:
                self._channel.try_notify(message)
            except WireError:
                pass  # the next request connects again

    def interrupted(self, keep: Sequence[Pending]) -> None:
        """Drop the connection after Ctrl-C struck while it was used: its state is not known.

        The next request connects again and repeats `keep`, the writes that still matter.
        """
        self._pending = list(keep)
        if self._channel is not None:
            self._channel.abandon()

    def fail(self, reason: str) -> Exception:
        """Make outstanding requests fail, or wait for recovery: the server cannot be reached."""
        self._state.broken(reason)
        return self._drop_requests() if self.recovery is None else self._wake_waiting()

    def give_up(self, reason: str) -> Exception:
        """Make waiting and later requests fail, or wait for recovery: the server counts as lost."""
        self._state.lost(reason)
        return self._drop_requests() if self.recovery is None else self._wake_waiting()

    def accept(self, server: str) -> None:
        """Use the server process with this identity from now on: it has the variables."""
        self._state.restored(server)
        self._wake_waiting()

    def closing_limit_s(self) -> float:
        """Return how long to wait for the answer to a last request."""
        least_s = answer_limit_s()
        return least_s if self._channel is None else self._channel.round_trip.limit_s(least_s)

    def close(self) -> None:
        """Close the connection. May be called again."""
        self._state.closed()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._pending.clear()

    @override
    def __repr__(self) -> str:
        phase = self._state.phase.value
        return f"<ServerConnection to {self.task} {phase}, {len(self._pending)} outstanding>"

    # -- inside -------------------------------------------------------------------------------

    def _open_channel(self, deadline: float | None = None) -> Channel:
        """Return the channel; connect again if it is broken."""
        if self._state.phase is Phase.LOST:
            self._await_recovery(self._error(self._state.reason))
        phase = self._state.phase
        if phase is Phase.BROKEN:
            self._reconnect(None, deadline or time.monotonic() + self._timeout_s)
        elif phase is not Phase.OPEN:
            raise self._error(self._state.reason)
        assert self._channel is not None
        return self._channel

    def _connect(self, deadline: float, stopped: Callable[[], bool] = lambda: False) -> None:
        channel = connect(
            self.find_address(),
            key=self._membership.key,
            peer=self.task,
            timeout_s=max(0.1, deadline - time.monotonic()),
            stopped=stopped,
        )
        try:
            self._enter(channel, deadline)
        except BaseException as error:
            channel.close()
            if self.is_open:
                self._state.broken(f"did not answer: {error}")
            raise
        self._channel = channel

    def _enter(self, channel: Channel, deadline: float) -> None:
        def ask(message: Message) -> Message:
            left_s = max(0.1, deadline - time.monotonic())
            limit_s = channel.round_trip.limit_s(left_s)
            return channel.request(message, timeout_s=limit_s).message

        welcome = ask(messages.Hello(purpose="data", task=self._membership.task))
        if not isinstance(welcome, messages.Welcome):
            raise ProtocolError(f"{self.task} answered Hello by {type(welcome).__name__}")
        if self.welcome is not None and self.welcome.life == welcome.life:
            # Opening would make a new, empty session if the old one's lease has run out.
            ask(self._membership.joining())
        self._state.opened(welcome.life)
        if self._state.phase is not Phase.OPEN:
            raise self._error(self._state.reason)
        ask(self._membership.entry())
        self.welcome = welcome
        self.frame_bytes = welcome.frame_bytes
        if self.announced:  # requests may refer to the memory; some may be released since
            refs = self.segments()
            try:
                ask(messages.OpenSegments(segments=refs))
            except NotFoundError:
                self.on_unmapped()
            else:
                self.announced = refs

    def _reconnect(self, cause: ConnectionLost | None, deadline: float) -> None:
        """Connect again and repeat outstanding requests.

        Raises:
            ParameterServerLost: connecting failed; outstanding requests have failed, too.
        """
        while True:
            try:
                self._reconnect_once(cause, deadline)
                return
            except ParameterServerLost as error:
                self._await_recovery(error)
                cause, deadline = None, time.monotonic() + self._timeout_s

    def _await_recovery(self, error: Exception) -> None:
        """Wait until the server has been restored.

        Raises:
            Exception: `error`, or why the wait has ended, if it will not be; outstanding requests have failed, too.
        """
        try:
            if self.recovery is None or not self.recovery(error):
                raise error
        except Exception:
            self._drop_requests()
            raise

    def _reconnect_once(self, cause: ConnectionLost | None, deadline: float) -> None:
        if cause is not None and self._state.phase is not Phase.OPEN:
            # Another thread found out while this one waited.
            raise self._error(self._state.reason) from cause
        if self._channel is not None:
            self._take_notes(self._channel)
            self._channel.close()
        why = _first_cause(self._state.reason) if cause is None else str(cause)
        self._state.broken(why)
        try:
            self._connect(deadline)
            for pending in self._pending:
                assert self._channel is not None
                if pending.failure:
                    continue
                pending.was_repeated = True
                pending.begin(self._channel)
        except CoordinatorReplaced as error:
            self._state.broken(str(error))
            self._drop_requests()
            raise
        except NotFoundError as error:
            # The session has ended there.
            raise self.give_up(f"has no part of this session any more: {error}") from error
        except WireError as error:
            reason = f"{_GONE}{why}{_AGAIN}{error}"
            raise self.fail(reason) from error

    def _take_notes(self, channel: Channel) -> None:
        """Read what the server said unasked: where its backup is."""
        try:
            while (frame := channel.receive(timeout_s=0.0)) is not None:
                if isinstance(frame.message, messages.BackupAt):
                    self.backup_address = frame.message.address
        except WireError:
            pass  # it has said no more

    def _broken(self, reason: str) -> Exception:
        self._state.broken(reason)
        return self._drop_requests()

    def _wake_waiting(self) -> Exception:
        """Close the channel, so that a thread that waits for a reply goes on; return the error."""
        if self._channel is not None:
            self._channel.close()
        return self._error(self._state.reason)

    def _drop_requests(self) -> Exception:
        """Let every outstanding request fail for the reason in the state; return the error."""
        reason = self._state.reason
        for pending in self._pending:
            pending.failure = reason
        self._pending = []
        self.announced = ()
        if self._channel is not None:
            self._channel.close()  # wakes a thread that waits for a reply
        return self._error(reason)

    def _error(self, reason: str) -> Exception:
        """Return the error of a request that failed for this reason."""
        if self._state.phase in (Phase.NEW, Phase.CLOSED):
            return ConnectionLost(f"the connection to {self.task} {reason or 'is not open'}")
        names = sorted(self.names.values())
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        held = f" It held {shown}." if names else ""
        if self._state.phase is Phase.LOST:
            advice = "Start it again"
        else:
            advice = (
                "The next request tries to connect again. If the server has ended, start it again"
            )
        # A coordinator cannot restore a server of a job that has no checkpoint.
        then = (
            "and run the script again: restore_or_initialize() continues the job from the newest "
            "checkpoint, or from the beginning if there is none"
            if self._membership.instance
            else "create a new strategy and restore the last checkpoint"
        )
        hint = SURVIVAL if self._membership.is_owner and self.recovery is None else ""
        return ParameterServerLost(
            f"parameter server {self.task} at {self.last_address!r} {reason}.{held} {advice}, {then}.{hint}",
            task=self.task,
            variables=names,
            identity=self._state.server,
        )


_GONE: Final = "is gone: "
_AGAIN: Final = "; connecting again failed: "


def _first_cause(reason: str) -> str:
    """Return why a connection broke first, without what later attempts to connect added.

    Example:
        >>> _first_cause("is gone: it hung up; connecting again failed: no answer")
        'it hung up'
    """
    return reason.removeprefix(_GONE).partition(_AGAIN)[0]


def collect_all(calls: Sequence[tuple[ServerConnection, Pending]]) -> list[Frame]:
    """Return the replies to requests; raise the first error when all servers have replied."""
    first: Exception | None = None
    found = []
    for connection, pending in calls:
        try:
            found.append(connection.collect(pending))
        except Exception as error:  # noqa: BLE001 - raised below, when all replies are here
            first = first or error
    if first is not None:
        raise first
    return found
