"""All messages between processes, and their encoding.

The messages are defined in `message_base.py`, `server_messages.py`, `checkpoint_messages.py`, `key_messages.py`, `job_messages.py`, `backup_messages.py` and `worker_messages.py`, one frozen
tagged struct each; this module exports them all. A new message needs only its struct. A message names a tensor by a
`TensorRef`; `codec.py` converts one into the other.

Messages are msgpack maps with the struct's name as tag; fields at their default are left out. The small records that
occur by the hundred in one message (`TensorRef`, `WriteId`, operations) are arrays.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from stratagem._wire.backup_messages import *  # noqa: F403
from stratagem._wire.checkpoint_messages import *  # noqa: F403
from stratagem._wire.frames import Frame as Frame
from stratagem._wire.job_messages import *  # noqa: F403
from stratagem._wire.key_messages import *  # noqa: F403
from stratagem._wire.message_base import *  # noqa: F403
from stratagem._wire.message_base import Message, Record
from stratagem._wire.server_messages import *  # noqa: F403
from stratagem._wire.server_messages import Operation, Operations
from stratagem._wire.worker_messages import *  # noqa: F403
from stratagem.errors import ProtocolError

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    reduce(or_, Message.__subclasses__())
)
_operations_decoder = msgspec.msgpack.Decoder(tuple[Operation, ...])
_DECODING_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_structs = (*Message.__subclasses__(), *Record.__subclasses__())
MESSAGES_DIGEST = zlib.crc32(
    repr([(one.__name__, one.__annotations__) for one in _structs]).encode()
)
"""Digest of all message types. Processes whose digests differ may misunderstand each other."""


def encode(message: Message) -> bytes:
    """Return the bytes of a message.

    Example:
        >>> decode(encode(Ping()))
        Ping()
    """
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message that `encode` was given; ProtocolError if the bytes are none."""
    try:
        message: Message = _decoder.decode(data)
    except _DECODING_ERRORS as error:
        raise ProtocolError(f"a frame does not hold a valid message: {error}") from error
    return message


def encode_operations(operations: Sequence[Operation]) -> Operations:
    """Return the operations of a `Write`, encoded."""
    return msgspec.Raw(_encoder.encode(operations))


def decode_operations(data: Operations) -> tuple[Operation, ...]:
    """Return the operations that `encode_operations` was given; ProtocolError if the bytes are none."""
    try:
        return _operations_decoder.decode(data)
    except _DECODING_ERRORS as error:
        raise ProtocolError(f"the operations of a write are invalid: {error}") from error
