"""How a connection comes to be: an address, a socket that reaches it, the key proved both ways.

What it is then used for is `channel.py`; the side that waits to be called is `listener.py`.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import os
import re
import select
import socket
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from stratagem._wire.channel import Channel
from stratagem._wire.frames import Limits
from stratagem._wire.handshake import ClientHandshake, ClusterKey
from stratagem._wire.stream import prepare, wait_for
from stratagem.errors import ConnectionLost, DeadlineExceeded, WireError

_STOP_SLICE_S = 0.1
"""How often an attempt to connect looks whether it should end."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; IPv6 hosts stand in brackets.

    Example:
        >>> from stratagem._wire.connecting import split_address
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
        >>> from stratagem._wire.connecting import join_address
        >>> join_address("localhost", 2222), join_address("::1", 80)
        ('localhost:2222', '[::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_NO_HOST_LETTER: Final = re.compile(r"[^A-Za-z0-9_.-]")
"""Underscores are no part of host names, but of names that people's networks know."""

_LONGEST_NAME: Final = 253


def check_destination(address: str) -> None:
    """Refuses what can never be connected to, without asking anybody.

    A name that nobody knows may be known in a moment: behind Kubernetes' headless services, names
    appear when their pods are ready. What is no name at all stays none.

    Raises:
        ValueError: it is no address, or its host neither a name nor a number.

    Example:
        >>> from stratagem._wire.connecting import check_destination
        >>> check_destination("127.0.0.1:2222")
        >>> check_destination("ps-0.training.svc:2222")
    """
    host, port = split_address(address)
    if not host or port == 0:
        raise ValueError(
            f"{address!r} is no address to connect to: expected a host and a port from 1 to 65535, "
            f"such as 'localhost:2222'"
        )
    why = _why_no_host(host)
    if why is not None:
        raise ValueError(
            f"{address!r} has a host that is no host: {why}. Expected host:port, such as "
            f"'localhost:2222', '10.0.0.5:2222' or '[::1]:2222'"
        )


def _why_no_host(host: str) -> str | None:
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            return f"{host!r} is no IPv6 address ({error})"
        return None
    try:
        name = host.encode("idna").decode()  # as Python does before it asks for an address
    except UnicodeError as error:
        return f"{host!r} is no name ({error.__cause__ or error})"
    strange = _NO_HOST_LETTER.search(name)
    if strange is not None:
        return f"{host!r} has {strange.group()!r} in it"
    if len(name) > _LONGEST_NAME:
        return f"it has {len(name)} letters, the longest name has {_LONGEST_NAME}"
    if name.rstrip(".").rpartition(".")[2].isdigit():  # as no name may end
        try:
            socket.inet_aton(name)
        except OSError:
            return f"{host!r} is no IPv4 address"
    return None


def reason(error: BaseException) -> str:
    """Why a connection failed, in the kernel's words if it was the kernel; the caller says whose.

    Example:
        >>> from stratagem._wire.connecting import connect, reason
        >>> try:
        ...     connect("127.0.0.1:1", timeout_s=5.0)
        ... except ConnectionError as error:
        ...     reason(error)
        'connection refused'
    """
    cause = error.__cause__
    if isinstance(cause, socket.gaierror):
        return f"its host name is not known ({str(cause.strerror).lower()})"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return str(error)


def is_unknown_name(error: BaseException | None) -> bool:
    """Whether a connection failed because its host's name could not be looked up."""
    return error is not None and isinstance(error.__cause__, socket.gaierror)


def connect(
    address: str,
    *,
    key: ClusterKey | None = None,
    timeout_s: float = 10.0,
    peer: str | None = None,
    limits: Limits | None = None,
    may_unpickle: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Channel:
    """Connects to a listener and proves the key, both ways.

    Args:
        address: ``host:port``.
        key: the cluster's key, or None for a cluster without one.
        timeout_s: for connecting and proving together.
        peer: how to call the other side in errors; its address by default.
        limits: of what is received.
        may_unpickle: see `Channel`.
        stopped: asked now and then; True ends the attempt.

    Raises:
        ConnectionLost: nobody listens there, it hung up, or the attempt was stopped.
        DeadlineExceeded: it did not answer in time.
        AuthenticationError, ProtocolError: it refused, or is somebody else.
    """
    host, port = split_address(address)
    name = peer or address
    deadline = time.monotonic() + timeout_s
    wait = functools.partial(_wait, deadline=deadline, stopped=stopped, name=name)
    try:
        sock = _dial(host, port, wait)
    except WireError:
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(f"{name} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {name} at {address!r}: {error}") from error
    try:
        prepare(sock)
        if sock.getsockname() == sock.getpeername():
            # Connecting to a free local port can meet itself; nobody listens there.
            raise ConnectionLost(f"nobody listens at {address!r}, where {name} should be")
        _prove(sock, ClientHandshake(key, who=name), wait, name)
    except BaseException as error:  # Ctrl-C too: no channel owns it yet
        sock.close()
        if isinstance(error, OSError) and not isinstance(error, WireError):
            # A process that dies hangs up on those it serves before it stops listening: who comes again
            # at once gets into the line, and is thrown out of it.
            raise ConnectionLost(f"{name} at {address!r} hung up at once: {error}") from error
        raise
    return Channel(sock, peer=name, limits=limits, may_unpickle=may_unpickle)


_Wait: TypeAlias = Callable[[socket.socket, int], bool]
"""Waits for an event on a socket; False when the time is over."""


def _wait(
    sock: socket.socket, events: int, *, deadline: float, stopped: Callable[[], bool], name: str
) -> bool:
    while True:
        if stopped():
            raise ConnectionLost(f"connecting to {name} was given up by this process")
        now = time.monotonic()
        if wait_for(sock, events, min(deadline, now + _STOP_SLICE_S)):
            return True
        if now >= deadline:
            return False


def _dial(host: str, port: int, wait: _Wait) -> socket.socket:
    """A connected socket, to the first of the host's addresses that answers."""
    failure: OSError = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(where)
            if code == errno.EINPROGRESS:
                if not wait(sock, select.POLLOUT):
                    code = errno.ETIMEDOUT
                else:
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except BaseException:  # Ctrl-C too: nobody else knows it
            sock.close()
            raise
        if code == 0:
            return sock
        sock.close()
        failure = OSError(code, os.strerror(code))
    raise failure


def _prove(sock: socket.socket, handshake: ClientHandshake, wait: _Wait, name: str) -> None:
    outgoing = handshake.opening()
    while not handshake.done:
        try:
            if outgoing:
                sock.sendall(outgoing)  # at most 48 bytes into an empty socket buffer: never blocks
            data = b""
            while len(data) < handshake.needed:
                if not wait(sock, select.POLLIN):
                    raise DeadlineExceeded(f"{name} accepted the connection but does not answer")
                part = sock.recv(handshake.needed - len(data))
                if not part:
                    handshake.cut_short(data)
                    raise ConnectionLost(
                        f"{name} hung up during the handshake; its log says why (another protocol "
                        f"version, or too many connections waiting)"
                    )
                data += part
        except (ConnectionLost, DeadlineExceeded):
            raise
        except OSError as error:
            raise ConnectionLost(f"{name} hung up during the handshake: {error}") from error
        outgoing = handshake.feed(data)
