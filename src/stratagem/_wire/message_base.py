"""Base classes of messages, references to tensors, and messages between any two tasks.

Only data: no behaviour, no tensor, no socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from stratagem._snapshots import Snapshot


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of every message."""


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of the small parts of messages; encoded by position, because one message may have thousands."""


class TensorRef(Record, frozen=True, tag="t"):
    """Place of a tensor's bytes: buffer `buffer` of the same frame, or byte `offset` of shared-memory `segment`."""

    dtype: str
    shape: tuple[int, ...]
    buffer: int = -1
    segment: int = 0
    offset: int = 0


class SparseRef(Record, frozen=True, tag="s"):
    """A sparse (COO) tensor, by the places of its indices and values."""

    shape: tuple[int, ...]
    indices: TensorRef
    values: TensorRef
    coalesced: bool = False


AnyTensorRef: TypeAlias = TensorRef | SparseRef


class SegmentRef(Record, frozen=True):
    """Place of a shared-memory segment on the same host; `token` is repeated in the segment's header."""

    number: int
    pid: int
    fd: int
    size: int
    token: bytes


class Ok(Message, frozen=True):
    """Answer to a request that was carried out."""


class Ping(Message, frozen=True):
    """Question whether the task responds."""


class Pong(Message, frozen=True):
    """Answer to Ping. `unlinked`: sessions, shards and views on this server whose backup does not answer."""

    unlinked: tuple[tuple[str, int, int], ...] = ()


class AskStats(Message, frozen=True):
    """Ask for statistics of the task."""


class Stats(Message, frozen=True):
    """Answer to AskStats: numbers and texts by name, and the metrics of a worker."""

    facts: Mapping[str, Any]
    metrics: Snapshot | None = None


class RemoteFailure(Message, frozen=True):
    """An exception, as data. See `failures.py`."""

    type_name: str
    text: str
    task: str = ""
    args: tuple[str | int | float | bool | None, ...] | None = None
    traceback: str = ""
    pickled: bytes = b""


class Packed(Message, frozen=True):
    """A pickled Python object; only processes that may run the sender's code unpickle it.

    Its tensors and large byte strings are buffers of the frame; so is a large pickle (`body` instead of `payload`).
    See `codec.pack`.
    """

    payload: bytes
    tensors: tuple[PackedTensor, ...] = ()
    raw: tuple[int, ...] = ()
    body: int = -1


class PackedTensor(Record, frozen=True, tag="p"):
    """A tensor inside a packed object: the place of its bytes, and its kind."""

    ref: AnyTensorRef
    requires_grad: bool = False
    is_parameter: bool = False
    channels_last: bool = False  # the bytes are those of the tensor with its channels moved last
