"""Mutual proof of the cluster key, before a connection carries anything else.

Pure: bytes in, bytes out; `listener.py` and `connecting.py` send and receive them. Every record has a fixed size, so
that an unknown peer can cause 80 bytes to be read and one digest to be computed, and no more::

    client -> server   greeting   8 magic, 2 version, 2 flags, 4 digest of the message types, 32 random
    server -> client   greeting   the same                                           (48 bytes)
    client -> server   proof      HMAC-SHA256(key, "client" + both greetings)        (32 bytes)
    server -> client   verdict    1 status, 7 zero, HMAC(key, "server" + both)       (40 bytes)

The client proves first: an unknown client gets no digest of the key to attack. Both greetings, with both random
numbers and versions, are part of both proofs, so that a proof cannot be replayed, reflected or downgraded. Without a
key both sides use an empty one; `listener.py` then refuses addresses beyond loopback.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import TYPE_CHECKING, NoReturn, final

from typing_extensions import override

from stratagem._wire.messages import MESSAGES_DIGEST
from stratagem.errors import AuthenticationError, ProtocolError

if TYPE_CHECKING:
    from stratagem._wire.tls import Tls

PROTOCOL_VERSION = 3
"""Version of handshake and frame layout; message types are compared by their digest."""

MAGIC = b"stratgm\0"
_GREETING = struct.Struct("<8sHHI32s")
_VERDICT = struct.Struct("<B7x32s")
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
"""First bytes of an alert and of a handshake record."""

_KEYED = 1
_ACCEPTED = 1
_WRONG_KEY = 2
_PROOF_BYTES = 32
MIN_KEY_BYTES = 16
"""An attacker who records one handshake could guess shorter keys offline."""


@final
class ClusterKey:
    """The secret shared by all tasks of one cluster, and how they encrypt; its repr does not show the secret."""

    def __init__(self, secret: bytes, *, tls: Tls | None = None) -> None:
        """Keep the secret.

        Args:
            secret: at least `MIN_KEY_BYTES` long.
            tls: encrypts the connections of this cluster; without it they are not encrypted.
        """
        self.tls = tls
        if len(secret) < MIN_KEY_BYTES:
            raise ValueError(
                f"the cluster key has {len(secret)} bytes, expected at least {MIN_KEY_BYTES}. "
                f"Make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
            )
        self._secret = secret

    @classmethod
    def from_text(cls, text: str, *, tls: Tls | None = None) -> ClusterKey:
        """Return the key of an environment variable or a file; surrounding white space is ignored."""
        return cls(text.strip().encode(), tls=tls)

    @classmethod
    def random(cls) -> ClusterKey:
        """Return a new key, for a cluster whose tasks are all started by us."""
        return cls(secrets.token_hex(32).encode())

    def text(self) -> str:
        """Return the secret itself, for the environment of a child process."""
        return self._secret.decode()

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError("the cluster key cannot be pickled: it is never sent over a connection.")

    def sign(self, data: bytes) -> bytes:
        """Return the HMAC-SHA256 of the data under this key."""
        return hmac.digest(self._secret, data, hashlib.sha256)

    @override
    def __repr__(self) -> str:
        return f"<ClusterKey {len(self._secret)} bytes{', TLS' if self.tls else ''}>"


def _sign(key: ClusterKey | None, data: bytes) -> bytes:
    return key.sign(data) if key is not None else hmac.digest(b"", data, hashlib.sha256)


def _greet(key: ClusterKey | None, version: int) -> bytes:
    flags = _KEYED if key is not None else 0
    return _GREETING.pack(MAGIC, version, flags, MESSAGES_DIGEST, secrets.token_bytes(32))


def _stranger(who: str, data: bytes) -> ProtocolError:
    if data[:2] in _TLS_RECORDS:
        return ProtocolError(
            f"{who} uses TLS, this process does not: set STRATAGEM_TLS_CERT, STRATAGEM_TLS_KEY and "
            f"STRATAGEM_TLS_CA for every task, or for none"
        )
    return ProtocolError(
        f"{who} began with {data[:8]!r}, not with {MAGIC!r}: it does not speak this protocol"
    )


def _check_greeting(data: bytes, *, key: ClusterKey | None, version: int, who: str) -> None:
    magic, theirs, flags, digest, _ = _GREETING.unpack(data)
    if magic != MAGIC:
        raise _stranger(who, data)
    ours: object = version
    if theirs == version and digest != MESSAGES_DIGEST:
        theirs, ours = f"{version}-{digest:08x}", f"{version}-{MESSAGES_DIGEST:08x}"
    if theirs != ours:
        raise ProtocolError(
            f"{who} speaks protocol version {theirs}, this process speaks {ours}: run the same "
            f"release of stratagem in every task of the cluster"
        )
    if bool(flags & _KEYED) != (key is not None):
        have, lack = ("has", "has none") if flags & _KEYED else ("has no", "has one")
        raise AuthenticationError(
            f"{who} {have} cluster key, this process {lack}: set STRATAGEM_CLUSTER_KEY or "
            f"STRATAGEM_CLUSTER_KEY_FILE to the same value for every task"
        )


class Handshake:
    """One side of the proof; abstract. Its caller feeds it exactly `needed` bytes until `done`."""

    def __init__(
        self, key: ClusterKey | None, *, who: str, version: int = PROTOCOL_VERSION
    ) -> None:
        self._key = key
        self._who = who
        self._version = version
        self._mine = _greet(key, version)
        self._theirs = b""
        self.needed = _GREETING.size
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Process `needed` bytes of the peer; return the bytes to send to it.

        Raises:
            ProtocolError: the peer speaks another protocol or version.
            AuthenticationError: the peer does not have the key.
        """
        raise NotImplementedError


@final
class ServerHandshake(Handshake):
    """The accepting side.

    Example:
        >>> client, server = (
        ...     ClientHandshake(None, who="server"),
        ...     ServerHandshake(None, who="client"),
        ... )
        >>> proof = client.feed(server.feed(client.opening()))
        >>> client.feed(server.feed(proof))
        b''
        >>> client.done, server.done
        (True, True)
    """

    def __init__(
        self, key: ClusterKey | None, *, who: str, version: int = PROTOCOL_VERSION
    ) -> None:
        super().__init__(key, who=who, version=version)
        self.farewell = b""
        """Bytes to send before closing after an error, so that the client can report the reason."""

    @override
    def feed(self, data: bytes) -> bytes:
        if not self._theirs:
            self._theirs = data
            if data[:8] == MAGIC:
                self.farewell = self._mine
            _check_greeting(data, key=self._key, version=self._version, who=self._who)
            self.farewell = b""
            self.needed = _PROOF_BYTES
            return self._mine
        both = self._theirs + self._mine
        if not hmac.compare_digest(data, _sign(self._key, b"client" + both)):
            self.farewell = _VERDICT.pack(_WRONG_KEY, bytes(_PROOF_BYTES))
            raise AuthenticationError(f"{self._who} did not prove the cluster key")
        self.needed = 0
        self.done = True
        return _VERDICT.pack(_ACCEPTED, _sign(self._key, b"server" + both))


@final
class ClientHandshake(Handshake):
    """The connecting side; its caller sends `opening()` first."""

    def opening(self) -> bytes:
        """Return the client's greeting."""
        return self._mine

    def cut_short(self, data: bytes) -> None:
        """Raise ProtocolError if the bytes of a peer that closed early are another protocol's."""
        if not self._theirs and not MAGIC.startswith(data[: len(MAGIC)]):
            raise _stranger(self._who, data)

    @override
    def feed(self, data: bytes) -> bytes:
        if not self._theirs:
            self._theirs = data
            _check_greeting(data, key=self._key, version=self._version, who=self._who)
            self.needed = _VERDICT.size
            return _sign(self._key, b"client" + self._mine + self._theirs)
        status, proof = _VERDICT.unpack(data)
        if status != _ACCEPTED:
            raise AuthenticationError(
                f"{self._who} refused this process: the cluster keys differ. Check "
                f"STRATAGEM_CLUSTER_KEY or STRATAGEM_CLUSTER_KEY_FILE on both sides"
            )
        if not hmac.compare_digest(proof, _sign(self._key, b"server" + self._mine + self._theirs)):
            raise AuthenticationError(
                f"{self._who} did not prove the cluster key: it is not a task of this cluster"
            )
        self.needed = 0
        self.done = True
        return b""
