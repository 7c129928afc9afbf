"""TLS between tasks: certificate files, and encrypting sockets.

The proof of the cluster key (`handshake.py`) runs inside the encrypted connection. Certificates are checked against the cluster's
own authority; host names are not, because tasks come back at other addresses. `stream.py` uses a `TlsSocket` like any
other socket.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from typing_extensions import Buffer, override

from stratagem import config
from stratagem._private_files import check_private
from stratagem.errors import AuthenticationError, ConnectionLost, DeadlineExceeded, ProtocolError

_NAMES: Final = ("STRATAGEM_TLS_CERT", "STRATAGEM_TLS_KEY", "STRATAGEM_TLS_CA")

TLS_ALERT: Final = b"\x15\x03\x03\x00\x02\x02\x46"
"""The record "protocol version not supported", by which a peer without TLS sees that TLS is expected."""

_SMALL_BYTES: Final = 16 << 10
"""Pieces below this size are joined: each write makes a record with its own header and checksum."""

_WRITE_BYTES: Final = 256 << 10
"""Bytes that one call encrypts, so that a thread that reads waits for the lock only briefly."""


@final
@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Certificate files that encrypt the connections of a task, in PEM format (``stratagem certificates``).

    Attributes:
        cert: certificate of this task, signed by the cluster's authority.
        key: private key of the certificate; other users must not be able to read it.
        ca: certificate of the cluster's authority, which must have signed the certificate of every peer.

    Example:
        >>> import stratagem as sg
        >>> sg.TlsFiles(cert="tls/task.pem", key="tls/task-key.pem", ca="tls/ca.pem").ca
        'tls/ca.pem'
    """

    cert: str
    key: str
    ca: str


def files_from_environment() -> TlsFiles | None:
    """Return the files named by ``STRATAGEM_TLS_CERT``, ``_KEY`` and ``_CA``; None if none is set.

    Raises:
        ValueError: only some of them are set.
    """
    cert, key, ca = values = tuple(config.environment(name) or "" for name in _NAMES)
    missing = [name for name, value in zip(_NAMES, values, strict=True) if not value]
    if len(missing) == len(_NAMES):
        return None
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} not set: TLS needs all of {', '.join(_NAMES)}, or none of them."
        )
    return TlsFiles(cert=cert, key=key, ca=ca)


@final
class TlsSocket(ssl.SSLSocket):
    """A socket that encrypts, with the errors of a plain non-blocking socket.

    One thread may send while another receives: OpenSSL allows one call at a time, so that a lock separates them.
    """

    _lock: threading.Lock

    @override
    def send(self, data: Buffer, flags: int = 0) -> int:
        """Encrypt and send a part of the bytes; return how many."""
        # After a refusal OpenSSL expects the same bytes again, at least as many. The queue of `FrameStream` gives them.
        with self._lock:
            try:
                return super().send(memoryview(data)[:_WRITE_BYTES], flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError from error

    def send_pieces(self, pieces: Iterable[Buffer]) -> int:
        """Send a part of the pieces; return how many bytes. Small pieces share a record."""
        joined = bytearray()
        for piece in pieces:
            view = memoryview(piece)
            if not joined and view.nbytes >= _SMALL_BYTES:
                return self.send(view)
            joined += view[: _SMALL_BYTES - len(joined)]
            if len(joined) == _SMALL_BYTES:
                break
        return self.send(joined)

    @override
    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        space = bytearray(buflen)
        return bytes(space[: self.recv_into(space, buflen, flags)])

    @override
    def recv_into(self, buffer: Buffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Decrypt what has arrived into a buffer; a partly filled buffer means that no more is there."""
        view, count = memoryview(buffer), 0
        with self._lock:
            while count < len(view):
                try:
                    part = super().recv_into(view[count:])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                    if count:
                        break
                    raise BlockingIOError from error
                if part == 0:  # the peer closed; the next call says so again
                    break
                count += part
        return count

    @override
    def shutdown(self, how: int) -> None:
        """End the connection without a reply of the peer; a thread that reads may still use the socket."""
        # SSLSocket.shutdown would turn it into a plain socket, and the reader would receive encrypted bytes.
        socket.socket.shutdown(self, how)


@final
class Tls:
    """Makes encrypted sockets with the certificate of one task."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            ValueError: a file is missing or is not what it should be.
            PermissionError: other users can read the private key.
        """
        self.files = files
        self._client = _context(files, ssl.PROTOCOL_TLS_CLIENT)
        self._server = _context(files, ssl.PROTOCOL_TLS_SERVER)
        self._server.num_tickets = (
            0  # sessions are not resumed; a ticket would only wake the reader
        )

    def client(self, sock: socket.socket) -> TlsSocket:
        """Return the socket of the connecting side; the caller continues with `greet`."""
        return _wrap(self._client, sock, server_side=False)

    def server(self, sock: socket.socket) -> TlsSocket:
        """Return the socket of the accepting side; the caller calls `do_handshake` until it succeeds."""
        return _wrap(self._server, sock, server_side=True)

    @override
    def __repr__(self) -> str:
        return f"<Tls with {self.files.cert!r}>"


def greet(sock: TlsSocket, name: str, wait: Callable[[TlsSocket, bool], bool]) -> None:
    """Agree on keys with a listener and check its certificate.

    Args:
        sock: the connecting side.
        name: of the peer, in errors.
        wait: waits until the socket is readable, or writable if its second argument is True; returns False when
            the time is over.

    Raises:
        AuthenticationError: the certificate is not signed by the cluster's authority.
        ProtocolError: the peer does not use TLS.
        ConnectionLost, DeadlineExceeded: the peer closed the connection, or does not answer.
    """
    while True:
        writing = False
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            writing = True
        except ssl.SSLCertVerificationError as error:
            raise AuthenticationError(
                f"{name} has a certificate that the cluster's authority did not sign, or that is not valid now "
                f"({error.verify_message}): check {_NAMES[2]} on both sides"
            ) from error
        except (ssl.SSLEOFError, ConnectionError) as error:
            raise ConnectionLost(
                f"{name} closed the connection in the TLS handshake: it does not use TLS, or it ended. Set "
                f"{', '.join(_NAMES)} for every task"
            ) from error
        except ssl.SSLError as error:
            raise ProtocolError(
                f"{name} does not use TLS as this process does ({error.reason}): set "
                f"{', '.join(_NAMES)} for every task, or for none"
            ) from error
        if not wait(sock, writing):
            raise DeadlineExceeded(f"{name} accepted the connection but does not answer")


def refused(name: str, error: ssl.SSLError) -> AuthenticationError:
    """Return the error of a connection that the peer ended after it saw our certificate."""
    return AuthenticationError(
        f"{name} refused the certificate of this process ({error.reason}): expected one that the authority in its "
        f"{_NAMES[2]} has signed"
    )


def _context(files: TlsFiles, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # tasks move; the authority signs for this cluster only
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = TlsSocket
    for path in (files.cert, files.key, files.ca):
        if not Path(path).is_file():
            raise ValueError(
                f"the TLS file {path!r} does not exist: expected a file in PEM format."
            )
    check_private(Path(files.key), "the TLS key file")
    try:
        context.load_cert_chain(files.cert, files.key)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(
            f"{files.cert!r} and {files.key!r} are not a certificate and its private key: {error}."
        ) from error
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"{files.ca!r} is not a certificate of an authority: {error}.") from error
    return context


def _wrap(context: ssl.SSLContext, sock: socket.socket, *, server_side: bool) -> TlsSocket:
    wrapped = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    assert isinstance(wrapped, TlsSocket)
    wrapped._lock = threading.Lock()
    return wrapped
