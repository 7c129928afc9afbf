"""Open connections: parse addresses, connect a socket, prove the key both ways.

`channel.py` uses the connection; `listener.py` is the other side.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

from stratagem._wire.channel import Channel
from stratagem._wire.frames import Limits
from stratagem._wire.handshake import ClientHandshake, ClusterKey
from stratagem._wire.round_trip import RoundTrip, answer_limit_s
from stratagem._wire.stream import prepare, wait_for
from stratagem._wire.tls import greet, refused
from stratagem.errors import ConnectionLost, DeadlineExceeded, WireError

_STOP_SLICE_S = 0.1
"""How often an attempt to connect asks whether it should end."""

_NAME: Final = re.compile(r"(?=.{1,253}$)[\w-]{1,63}(\.[\w-]{1,63})*\.?")
"""Of a host. Underscores are not allowed in host names, but some networks use them."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; IPv6 hosts are in brackets.

    Example:
        >>> split_address("localhost:2222"), split_address("[::1]:80")
        (('localhost', 2222), ('::1', 80))
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(
            f"{address!r} is not an address: expected host:port with a port from 0 to 65535, such "
            f"as 'localhost:2222'"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int | str) -> str:
    """Return ``host:port``, with an IPv6 host in brackets.

    Example:
        >>> join_address("localhost", 2222), join_address("::1", 80)
        ('localhost:2222', '[::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_destination(address: str) -> None:
    """Raise if an address can never be connected to, without a lookup.

    An unknown name may become known: Kubernetes' headless services publish names when their pods are ready.

    Raises:
        ValueError: the address, or its host, is malformed.

    Example:
        >>> check_destination("127.0.0.1:2222")
        >>> check_destination("ps-0.training.svc:2222")
    """
    host, port = split_address(address)
    if not host or port == 0:
        raise ValueError(
            f"{address!r} is not an address to connect to: expected a host and a port from 1 to "
            f"65535, such as 'localhost:2222'"
        )
    if not _is_host(host):
        raise ValueError(
            f"{address!r} has an invalid host, {host!r}: expected host:port, such as "
            f"'localhost:2222', '10.0.0.5:2222' or '[::1]:2222'"
        )


def _is_host(host: str) -> bool:
    """Return whether a text can be a host: a name, or an address of IPv4 or IPv6."""
    if ":" not in host and not host.rstrip(".").rpartition(".")[2].isdigit():
        return _NAME.fullmatch(host) is not None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def descriptor_limit() -> int:
    """Return how many files and sockets this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def reason(error: BaseException) -> str:
    """Return why a connection failed, in the kernel's words where it was the kernel.

    Example:
        >>> try:
        ...     connect("127.0.0.1:1", timeout_s=5.0)
        ... except ConnectionError as error:
        ...     reason(error)
        'connection refused'
    """
    cause = error.__cause__
    if isinstance(cause, socket.gaierror):
        return f"its host name is not known ({str(cause.strerror).lower()})"
    if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
        return str(error)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return str(error)


def is_unknown_name(error: BaseException | None) -> bool:
    """Return whether a connection failed because its host name could not be resolved."""
    return error is not None and isinstance(error.__cause__, socket.gaierror)


def connect(
    address: str,
    *,
    key: ClusterKey | None = None,
    timeout_s: float | None = None,
    peer: str | None = None,
    limits: Limits | None = None,
    may_unpickle: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Channel:
    """Connect to a listener; both sides prove the key.

    Args:
        address: ``host:port``.
        key: the cluster's key, or None for a cluster without one.
        timeout_s: for connection and handshake together, the heartbeat limit by default. A peer that has answered
            once gets at least the time that the measured round trip demands.
        peer: name of the peer in errors; its address by default.
        limits: size limits of received frames.
        may_unpickle: see `Channel`.
        stopped: called repeatedly; True ends the attempt.

    Raises:
        ConnectionLost: no process listens there, the peer closed the connection, or the attempt was stopped.
        DeadlineExceeded: the peer did not answer in time.
        AuthenticationError, ProtocolError: the peer refused, or is another kind of program.
    """
    host, port = split_address(address)
    name = peer or address
    timeout_s = answer_limit_s() if timeout_s is None else timeout_s
    attempt = _Attempt(name, timeout_s, stopped)
    try:
        sock = _dial(host, port, attempt)
    except WireError:
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(f"{name} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        why = str(error)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            why = f"this process has no file descriptor left (limit {descriptor_limit()}): raise `ulimit -n`"
        raise ConnectionLost(f"cannot connect to {name} at {address!r}: {why}") from error
    try:
        prepare(sock)
        if sock.getsockname() == sock.getpeername():
            # A connection to a free local port can connect to itself.
            raise ConnectionLost(f"no process listens at {address!r}, the address of {name}")
        if key is not None and key.tls is not None:
            sock = encrypted = key.tls.client(sock)
            greet(encrypted, name, attempt.wait_for_tls)
        _prove(sock, ClientHandshake(key, who=name), attempt)
    except BaseException as error:  # Ctrl-C too: no channel owns it yet
        sock.close()
        if isinstance(error, OSError) and not isinstance(error, WireError):
            # A process that ends closes its connections before it stops listening: a new connection is
            # queued and then reset.
            raise ConnectionLost(
                f"{name} at {address!r} closed the connection at once: {error}"
            ) from error
        raise
    return Channel(
        sock, peer=name, limits=limits, may_unpickle=may_unpickle, round_trip=attempt.round_trip
    )


class _Attempt:
    """Time limit and measured round trip of one attempt to connect."""

    def __init__(self, name: str, timeout_s: float, stopped: Callable[[], bool]) -> None:
        self.name = name
        self.round_trip = RoundTrip()
        self._stopped = stopped
        self._deadline = time.monotonic() + timeout_s

    def wait(self, sock: socket.socket, events: int) -> bool:
        """Wait for an event on a socket; return False when the time is over."""
        while True:
            if self._stopped():
                raise ConnectionLost(f"this process gave up connecting to {self.name}")
            now = time.monotonic()
            if wait_for(sock, events, min(self._deadline, now + _STOP_SLICE_S)):
                return True
            if now >= self._deadline:
                return False

    def wait_for_tls(self, sock: socket.socket, writing: bool) -> bool:
        """Wait in the TLS handshake; return False when the time is over."""
        return self.wait(sock, select.POLLOUT if writing else select.POLLIN)

    def answered(self, asked_at: float) -> None:
        """Note an answer of the peer; give it time for the next one."""
        now = time.monotonic()
        self.round_trip.measured(now - asked_at)
        self._deadline = max(self._deadline, now + self.round_trip.limit_s(0.0))


def _dial(host: str, port: int, attempt: _Attempt) -> socket.socket:
    """Return a socket connected to the first address of the host that answers."""
    failure: OSError = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(where)
            if code == errno.EINPROGRESS:
                if not attempt.wait(sock, select.POLLOUT):
                    code = errno.ETIMEDOUT
                else:
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except BaseException:  # Ctrl-C too
            sock.close()
            raise
        if code == 0:
            return sock
        sock.close()
        failure = OSError(code, os.strerror(code))
    raise failure


def _prove(sock: socket.socket, handshake: ClientHandshake, attempt: _Attempt) -> None:
    name, outgoing = attempt.name, handshake.opening()
    while not handshake.done:
        asked_at = time.monotonic()
        try:
            if outgoing:
                sock.sendall(outgoing)  # at most 48 bytes into an empty socket buffer
            data = b""
            while len(data) < handshake.needed:
                if not attempt.wait(sock, select.POLLIN):
                    raise DeadlineExceeded(f"{name} accepted the connection but does not answer")
                try:
                    part = sock.recv(handshake.needed - len(data))
                except BlockingIOError:  # a part of an encrypted record
                    continue
                if not part:
                    handshake.cut_short(data)
                    raise ConnectionLost(
                        f"{name} closed the connection during the handshake; its log says why (another protocol "
                        f"version, or too many connections waiting)"
                    )
                data += part
        except (ConnectionLost, DeadlineExceeded):
            raise
        except ssl.SSLError as error:
            raise refused(name, error) from error
        except OSError as error:
            raise ConnectionLost(
                f"{name} closed the connection during the handshake: {error}"
            ) from error
        attempt.answered(asked_at)
        outgoing = handshake.feed(data)
