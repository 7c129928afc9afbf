"""Proving the cluster key: who may talk at all, settled before anything else is read.

Pure: bytes in, bytes out; `channel.py` moves them. Every record has a fixed size, so an unknown peer can make
us read 80 bytes and compute one digest, nothing more::

    client -> server   greeting   8 magic, 2 version, 2 flags, 4 zero, 32 random     (48 bytes)
    server -> client   greeting   the same                                           (48 bytes)
    client -> server   proof      HMAC-SHA256(key, "client" + both greetings)        (32 bytes)
    server -> client   verdict    1 status, 7 zero, HMAC(key, "server" + both)       (40 bytes)

The client proves first: an unknown client gets no digest of the key to work on. Both greetings, and so both
random numbers and versions, are part of both proofs: nothing can be replayed, reflected or downgraded.
Without a key both sides use the empty one; `channel.py` refuses to listen beyond loopback then.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import NoReturn, final

from typing_extensions import override

from stratagem.errors import AuthenticationError, ProtocolError

PROTOCOL_VERSION = 2
"""Raised whenever messages.py or the frame layout changes; both sides must have the same."""

MAGIC = b"stratgm\0"
_GREETING = struct.Struct("<8sHHI32s")
_VERDICT = struct.Struct("<B7x32s")
_KEYED = 1
_ACCEPTED = 1
_WRONG_KEY = 2
_PROOF_BYTES = 32
MIN_KEY_BYTES = 16
"""Shorter keys can be guessed offline by somebody who records one handshake."""


@final
class ClusterKey:
    """The secret shared by all tasks of one cluster; its repr never shows it.

    Example:
        >>> from stratagem._wire.handshake import ClusterKey
        >>> ClusterKey(b"0123456789abcdef")
        <ClusterKey 16 bytes>
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_KEY_BYTES:
            raise ValueError(
                f"the cluster key has {len(secret)} bytes; at least {MIN_KEY_BYTES} are needed. "
                f"Make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
            )
        self._secret = secret

    @classmethod
    def from_text(cls, text: str) -> ClusterKey:
        """A key as it stands in an environment variable or a file; surrounding blanks do not count."""
        return cls(text.strip().encode())

    @classmethod
    def random(cls) -> ClusterKey:
        """A fresh key, for a cluster whose tasks are all started by us."""
        return cls(secrets.token_hex(32).encode())

    def text(self) -> str:
        """The secret itself, to be handed to a child process through its environment."""
        return self._secret.decode()

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError("the cluster key cannot be pickled: it is never sent over a connection.")

    def sign(self, data: bytes) -> bytes:
        """HMAC-SHA256 of the data under this key."""
        return hmac.digest(self._secret, data, hashlib.sha256)

    @override
    def __repr__(self) -> str:
        return f"<ClusterKey {len(self._secret)} bytes>"


def _sign(key: ClusterKey | None, data: bytes) -> bytes:
    return key.sign(data) if key is not None else hmac.digest(b"", data, hashlib.sha256)


def _greet(key: ClusterKey | None, version: int) -> bytes:
    flags = _KEYED if key is not None else 0
    return _GREETING.pack(MAGIC, version, flags, 0, secrets.token_bytes(32))


def _stranger(who: str, data: bytes) -> ProtocolError:
    return ProtocolError(
        f"{who} began with {data[:8]!r}, not with {MAGIC!r}: it does not speak this protocol"
    )


def _check_greeting(data: bytes, *, key: ClusterKey | None, version: int, who: str) -> None:
    magic, theirs, flags, zero, _ = _GREETING.unpack(data)
    if magic != MAGIC or zero != 0:
        raise _stranger(who, data)
    if theirs != version:
        raise ProtocolError(
            f"{who} speaks protocol version {theirs}, this process speaks {version}: run the same "
            f"release of stratagem in every task of the cluster"
        )
    if bool(flags & _KEYED) != (key is not None):
        have, lack = ("has", "has none") if flags & _KEYED else ("has no", "has one")
        raise AuthenticationError(
            f"{who} {have} cluster key, this process {lack}: set STRATAGEM_CLUSTER_KEY or "
            f"STRATAGEM_CLUSTER_KEY_FILE to the same value for every task"
        )


class Handshake:
    """One side of the proof; abstract. Feed it exactly `needed` bytes until `done`."""

    def __init__(self, key: ClusterKey | None, *, who: str, version: int) -> None:
        self._key = key
        self._who = who
        self._version = version
        self._mine = _greet(key, version)
        self._theirs = b""
        self.needed = _GREETING.size
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Takes `needed` bytes of the other side; gives what to send it.

        Raises:
            ProtocolError: the other side speaks something else.
            AuthenticationError: it does not have the key.
        """
        raise NotImplementedError


@final
class ServerHandshake(Handshake):
    """The accepting side.

    Example:
        >>> from stratagem._wire.handshake import ClientHandshake, ServerHandshake
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
        """What to send before closing after an error: our greeting or a refusal, so that the client
        can say why."""

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
    """The connecting side; `opening()` is sent first."""

    def __init__(
        self, key: ClusterKey | None, *, who: str, version: int = PROTOCOL_VERSION
    ) -> None:
        super().__init__(key, who=who, version=version)

    def opening(self) -> bytes:
        """The client's greeting."""
        return self._mine

    def cut_short(self, data: bytes) -> None:
        """The other side hung up after fewer bytes than `needed`, perhaps none.

        Raises:
            ProtocolError: what it said shows that it speaks something else; a short answer of a web server, say.
        """
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
                f"{self._who} refused this process: its cluster key is another one. Check "
                f"STRATAGEM_CLUSTER_KEY or STRATAGEM_CLUSTER_KEY_FILE on both sides"
            )
        if not hmac.compare_digest(proof, _sign(self._key, b"server" + self._mine + self._theirs)):
            raise AuthenticationError(
                f"{self._who} did not prove the cluster key: it is not a task of this cluster"
            )
        self.needed = 0
        self.done = True
        return b""
