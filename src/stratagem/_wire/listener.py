"""Accept connections, only from peers that prove the cluster key.

A `Listener` runs any number of handshakes side by side, and returns authenticated channels. A slow, silent or hostile
peer costs it one socket until a time limit, and delays no other peer. Used by parameter servers and workers.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import select
import socket
import ssl
import time
from typing import final

from typing_extensions import override

from stratagem import config
from stratagem._owner import Owner
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import descriptor_limit, join_address, split_address
from stratagem._wire.frames import Limits
from stratagem._wire.handshake import PROTOCOL_VERSION, ClusterKey, ServerHandshake
from stratagem._wire.stream import close_in_children, prepare
from stratagem._wire.tls import TLS_ALERT, TlsSocket
from stratagem.errors import WireError

_log = logging.getLogger("stratagem.wire")

PENDING_LIMIT = 128
"""Handshakes at one time; beyond it the oldest connection is closed."""

PAUSE_S = 0.2
"""After a connection that could not be accepted: trying again at once would only burn a core."""

LOG_INTERVAL_S = 10.0
"""Least time between two log lines about refused connections, or about pauses."""

_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


def is_loopback(host: str) -> bool:
    """Return whether every address of the host is this machine's loopback.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("")
        (True, False, False)
    """
    if not host:
        return False
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(a.split("%")[0]).is_loopback for a in found)


def is_local(host: str) -> bool:
    """Return whether a task of this machine can listen on an address of the host.

    Example:
        >>> is_local("127.0.0.1"), is_local("0.0.0.0"), is_local("192.0.2.250")
        (True, True, False)
    """
    try:
        _bind(host, 0).close()
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> socket.socket:
    """Listen on the first of the host's addresses that is one of this machine, IPv4 first."""
    if host in ("", "::"):  # every interface, of both families where the kernel can
        both = host == "::" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=256, dualstack_ipv6=both)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    failure: OSError = OSError(errno.EADDRNOTAVAIL, f"{host!r} has no address")
    for family, _, _, _, where in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        try:
            return socket.create_server(where, family=family, backlog=256)
        except OSError as error:
            failure = error
    raise failure


class _Handshaking:
    """A connection that has not yet proved the key."""

    def __init__(
        self, sock: socket.socket, peer: str, handshake: ServerHandshake, limit_s: float
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.handshake = handshake
        self.data = b""
        self.encrypting = isinstance(sock, TlsSocket)  # until both sides have agreed on keys
        self.deadline = time.monotonic() + limit_s


@final
class Listener(Owner):
    """A listening socket that returns authenticated channels.

    Use `accept`; or, in an event loop, put it in a selector and call `progress` when it is readable, and about once a
    second.
    """

    def __init__(
        self,
        address: str,
        *,
        key: ClusterKey | None = None,
        limits: Limits | None = None,
        may_unpickle: bool = False,
        version: int = PROTOCOL_VERSION,
    ) -> None:
        """Listen at once.

        Args:
            address: ``host:port``; port 0 takes a free one, see `address`.
            key: the cluster's key; without one only loopback addresses are allowed.
            limits: of what each channel receives.
            may_unpickle: see `Channel`.
            version: the protocol version to demand.

        Raises:
            PermissionError: no key, and not loopback or `may_unpickle`.
            OSError: the address is in use, or not of this machine.
        """
        host, port = split_address(address)
        if key is None and may_unpickle:
            raise PermissionError(
                f"refusing to listen on {address!r} without a cluster key: every user of this machine "
                f"could run code in this process. Pass a key"
            )
        if key is None and not is_loopback(host):
            raise PermissionError(
                f"refusing to listen on {address!r} without a cluster key: any process that can reach "
                f"the port could read and change the model. Set STRATAGEM_CLUSTER_KEY or "
                f"STRATAGEM_CLUSTER_KEY_FILE for every task, or listen on 127.0.0.1"
            )
        self._key = key
        self._limits = limits
        self._may_unpickle = may_unpickle
        self._version = version
        self._handshake_limit_s = config.partition_limit_s()  # of the whole proof
        self._sock = _bind(host, port)
        self._sock.setblocking(False)
        close_in_children(self._sock)
        self._epoll = select.epoll()
        self._epoll.register(self._sock, select.EPOLLIN)
        self._pending: dict[int, _Handshaking] = {}
        self._ready: list[Channel] = []
        self._closed = False
        self._paused_until: float | None = None
        self._next_pause_log = 0.0
        self._next_refusal_log = 0.0
        self._unlogged = 0  # refusals since the last log line
        self._last_refusal = ""
        self.accepted = 0
        self.refused = 0
        bound = self._sock.getsockname()
        self.address = join_address(bound[0], bound[1])

    def fileno(self) -> int:
        """Return the descriptor for selectors."""
        return self._epoll.fileno()

    def progress(self) -> list[Channel]:
        """Advance all handshakes without waiting; return the channels of those that are complete."""
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._paused_until = None
            self._epoll.register(self._sock, select.EPOLLIN)
        for fd, _ in self._epoll.poll(0):
            if fd == self._sock.fileno():
                self._accept_waiting()
            elif fd in self._pending:
                self._advance(fd)
        self._refuse_late()
        self._log_refusals()
        ready, self._ready = self._ready, []
        return ready

    def accept(self, *, timeout_s: float) -> Channel | None:
        """Return the next authenticated channel; None if there is none within the limit."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._epoll, select.POLLIN)
        while True:
            self._ready = self.progress()
            if self._ready:
                return self._ready.pop(0)
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return None
            poll.poll(min(left, 1.0 if self._paused_until is None else PAUSE_S) * 1000.0)

    @override
    def close(self) -> None:
        """Stop listening, and close unfinished handshakes. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._next_refusal_log = 0.0
        self._log_refusals()
        for pending in self._pending.values():
            pending.sock.close()
        self._pending.clear()
        for channel in self._ready:
            channel.close()
        self._ready.clear()
        self._epoll.close()
        self._sock.close()

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._pending)} in the handshake"
        return (
            f"<Listener {self.address} {state}, {self.accepted} accepted, {self.refused} refused>"
        )

    def _accept_waiting(self) -> None:
        for _ in range(64):  # then continue with the handshakes; the rest is accepted next time
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                continue  # the connection failed before it was accepted; see accept(2)
            try:
                self._begin(sock, join_address(address[0], address[1]))
            except MemoryError as error:
                sock.close()
                self._pause(error)
                return
            except OSError:  # the connection is broken already
                sock.close()

    def _begin(self, sock: socket.socket, peer: str) -> None:
        if self._key is not None and self._key.tls is not None:
            sock = self._key.tls.server(sock)
        prepare(sock)
        if len(self._pending) >= PENDING_LIMIT:
            oldest = next(iter(self._pending))
            self._refuse(oldest, "too many connections in the handshake")
        handshake = ServerHandshake(self._key, who=peer, version=self._version)
        pending = _Handshaking(sock, peer, handshake, self._handshake_limit_s)
        self._epoll.register(sock, select.EPOLLIN)
        self._pending[sock.fileno()] = pending

    def _pause(self, error: OSError | MemoryError) -> None:
        """Accept no connection for a moment; new ones wait in the kernel's queue."""
        now = time.monotonic()
        self._epoll.unregister(self._sock)
        self._paused_until = now + PAUSE_S
        if now < self._next_pause_log:
            return
        self._next_pause_log = now + LOG_INTERVAL_S
        _log.warning(
            "%s accepts no more connections for now: %s. Open connections are served, new ones wait. "
            "If it lasts, allow more open files (ulimit -n, now %d), give the process more memory, or "
            "connect fewer tasks.",
            self.address,
            str(error) or "no memory is left",
            descriptor_limit(),
        )

    def _advance(self, fd: int) -> None:
        pending = self._pending[fd]
        handshake = pending.handshake
        try:
            if pending.encrypting:
                assert isinstance(pending.sock, TlsSocket)
                pending.sock.do_handshake()
                pending.encrypting = False
            part = pending.sock.recv(handshake.needed - len(pending.data))
            if not part:
                self._refuse(fd, "closed the connection during the handshake")
                return
            pending.data += part
            if len(pending.data) < handshake.needed:
                return
            data, pending.data = pending.data, b""
            pending.sock.send(handshake.feed(data))  # at most 48 bytes: always sent whole
            if handshake.done:
                self._finish(fd, pending)
        except WireError as error:
            self._refuse(fd, str(error))
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            pass
        except ssl.SSLCertVerificationError as error:
            self._refuse(
                fd,
                f"has no certificate that the cluster's authority signed: {error.verify_message}",
            )
        except ssl.SSLError as error:
            self._refuse(
                fd, f"does not use TLS as this task does, or has no certificate: {error.reason}"
            )
        except OSError as error:
            self._refuse(fd, f"failed during the handshake: {error}")
        except MemoryError:
            self._refuse(fd, "no memory is left for another connection")

    def _finish(self, fd: int, pending: _Handshaking) -> None:
        channel = Channel(
            pending.sock,
            peer=pending.peer,
            limits=self._limits,
            may_unpickle=self._may_unpickle,
        )
        del self._pending[fd]
        self._epoll.unregister(fd)
        self.accepted += 1
        self._ready.append(channel)

    def _refuse(self, fd: int, reason: str) -> None:
        pending = self._pending.pop(fd)
        self._epoll.unregister(fd)
        self.refused += 1
        self._unlogged += 1
        self._last_refusal = f"{pending.peer}: {reason}"
        self._log_refusals()
        try:
            if pending.encrypting:  # the peer's bytes may be no TLS, so that OpenSSL sends no alert
                socket.socket.send(pending.sock, TLS_ALERT)
                # Unread bytes would make close() discard the alert.
                socket.socket.recv(pending.sock, 4096)
            elif pending.handshake.farewell:
                pending.sock.send(pending.handshake.farewell)
        except OSError:
            pass  # the peer does not wait for our reason
        pending.sock.close()

    def _log_refusals(self) -> None:
        """Log refused connections: at most one line in `LOG_INTERVAL_S`, however many there are."""
        now = time.monotonic()
        if not self._unlogged or now < self._next_refusal_log:
            return
        self._next_refusal_log = now + LOG_INTERVAL_S
        more = f" ({self._unlogged - 1} others refused before it)" if self._unlogged > 1 else ""
        _log.warning("%s refused %s%s", self.address, self._last_refusal, more)
        self._unlogged = 0

    def _refuse_late(self) -> None:
        now = time.monotonic()
        while self._pending:  # in order of arrival, and so of deadline
            fd, pending = next(iter(self._pending.items()))
            if pending.deadline > now:
                return
            self._refuse(fd, f"did not prove the cluster key within {self._handshake_limit_s:g} s")
