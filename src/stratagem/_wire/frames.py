"""Byte layout of frames, and the parser of a byte stream.

Pure, without a socket. `stream.py` sends and receives the bytes; `messages.py` and `codec.py` interpret messages and
buffers.

One frame::

    offset    bytes
    0         2      b"SG"
    2         1      kind: 1 request, 2 reply, 3 failure, 4 notify
    3         1      0
    4         4      call number (0 for a notify), little endian as everything here
    8         4      M, length of the message
    12        4      N, number of buffers
    16        8 N    length of each buffer
    16+8N     M      the message (see messages.py)
    16+8N+M          the buffers, each padded with zeros to a multiple of 64 bytes

A receiver puts all buffers of a frame into one allocation. The padding aligns each of them for any dtype and for vector
instructions, so that tensors use the memory without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from stratagem._wire.message_base import Message
from stratagem.errors import ProtocolError

REQUEST = 1
REPLY = 2
FAILURE = 3
NOTIFY = 4
KINDS = frozenset((REQUEST, REPLY, FAILURE, NOTIFY))

ALIGNMENT = 64
PREFIX = struct.Struct("<2sBBIII")
MAGIC = b"SG"
MAX_BUFFERS = 1 << 16
"""Buffers in one frame: 16 times the variables of a very large model."""

REUSED_BYTES = 1 << 22
"""Largest area that a connection keeps for the next frame of the same size."""

PLACED_BYTES = 1 << 16
"""Mean size of buffers from which they are received in memory of their own: each costs a receive call."""

INPUT_BYTES = 1 << 16
"""Size of a connection's input buffer: frames up to this size cost one receive call."""

Buffer: TypeAlias = bytes | bytearray | memoryview

_ZEROS = bytes(ALIGNMENT)
# torch's own: on workers, `numpy` looks for parameters over the same memory.
_to_numpy: Final = torch.Tensor.numpy


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of the memory that a peer can make this process allocate."""

    message_bytes: int = 1 << 24
    """Longest message; large values are sent in buffers."""

    frame_bytes: int = 1 << 30
    """Largest sum of buffers; senders split larger tensors."""


@dataclass(slots=True)
class Frame:
    """One received frame: its message, and the buffers beside it."""

    kind: int
    call: int
    data: bytes  # the message, encoded
    area: memoryview
    spans: tuple[tuple[int, int], ...]
    """(offset, length) of every buffer in the area."""

    starved_bytes: int = 0
    """Bytes of its buffers if there was no memory for them; they were discarded."""

    places: tuple[memoryview, ...] = ()
    """Memory that its buffers were received in, if not in the area. The message was decoded to find it."""

    is_done: bool = False
    """Set by the receiver when nothing uses the area any more: the next frame of the same size may overwrite it."""

    message: Message = field(init=False)
    """Set by the receiver of the frame (`stream.py`)."""

    def buffer(self, index: int) -> memoryview:
        """Return the memory of one buffer, writable; it stays valid while it is referenced.

        Raises:
            MemoryError: there was no memory for the buffers of this frame.
        """
        if self.starved_bytes:
            raise MemoryError(
                f"no memory is left for the {self.starved_bytes} bytes of tensors of one message; "
                f"send less at a time, or give the receiving process more memory"
            )
        if not 0 <= index < len(self.spans):
            raise ProtocolError(
                f"the message names buffer {index!r}, but its frame has {len(self.spans)} buffers"
            )
        if self.places:
            return self.places[index]
        offset, length = self.spans[index]
        return self.area[offset : offset + length]


class Placing(NamedTuple):
    """Where the buffers of one reply go, None for new memory; and the reply, decoded."""

    places: Sequence[memoryview | None]
    message: Message


Place: TypeAlias = Callable[[bytes], Placing | None]
"""Finds places for the buffers of a reply, given the bytes of its message; None: one new area for all."""


def padded(length: int) -> int:
    """Return a length rounded up to the alignment."""
    return (length + ALIGNMENT - 1) & -ALIGNMENT


def encode_frame(kind: int, call: int, message: bytes, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the parts of a frame, in order, for a scatter/gather send. Buffers are not copied."""
    if not buffers:
        return [PREFIX.pack(MAGIC, kind, 0, call, len(message), 0) + message]
    lengths = [memoryview(buffer).nbytes for buffer in buffers]
    head = PREFIX.pack(MAGIC, kind, 0, call, len(message), len(lengths))
    table = struct.pack(f"<{len(lengths)}Q", *lengths)
    pieces: list[Buffer] = [head + table + message]
    for buffer, length in zip(buffers, lengths, strict=True):
        if length:
            pieces.append(buffer)
            if length % ALIGNMENT:
                pieces.append(_ZEROS[: -length % ALIGNMENT])
    return pieces


def allocate(length: int) -> memoryview:
    """Return uninitialised memory aligned for tensors; a bytearray would be zeroed first."""
    array: Any = _to_numpy(torch.empty(length, dtype=torch.uint8))
    return memoryview(array)


_NOTHING = memoryview(b"")


def _fits(places: Sequence[memoryview | None], lengths: Sequence[int]) -> bool:
    pairs = zip(places, lengths, strict=False)
    return len(places) == len(lengths) and all(
        one is None or len(one) == length for one, length in pairs
    )


class FrameParser:
    """Parser of the frames of one connection.

    The caller puts n bytes into `space()`, calls `advance(n)`, and then `next_frame()` until that returns None. Small
    frames are copied out of a fixed input buffer; the buffers of a large frame are received into their final memory.

    Example:
        >>> parser = FrameParser()
        >>> data = b"".join(encode_frame(NOTIFY, 0, b"hello", [b"xy"]))
        >>> parser.space()[: len(data)] = data
        >>> parser.advance(len(data))
        >>> frame = parser.next_frame()
        >>> frame.data, bytes(frame.buffer(0))
        (b'hello', b'xy')
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._input = bytearray(INPUT_BYTES)
        self._view = memoryview(self._input)
        self._start = 0
        self._end = 0
        self._needed = PREFIX.size  # bytes of the head to be complete, counted from _start
        self._partial: Frame | None = None  # a frame whose area is being filled
        self._last: Frame | None = None  # the last one with an area, if that may be used again
        self._rest: list[memoryview] = []  # of its places: where these go, the last one first
        self.missing = 0
        """Bytes of a large frame that are yet to come."""
        self.places: dict[int, Place] = {}
        """By call: what finds the places of its reply."""

    @property
    def is_between_frames(self) -> bool:
        """True if no frame is half received, so that the peer may close without loss."""
        return self._partial is None and self._start == self._end

    def space(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        if self._partial is not None:
            if self._rest:
                return self._rest[-1]
            if self._partial.starved_bytes:  # discarded
                return self._view[: self.missing]
            return self._partial.area[-self.missing :]
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._input) > INPUT_BYTES:  # after one long head
                self._replace_input(INPUT_BYTES)
        elif self._start + self._needed > len(self._input) or self._end == len(self._input):
            self._replace_input(max(INPUT_BYTES, self._needed))
        return self._view[self._end :]

    def advance(self, count: int) -> None:
        """Note that `count` bytes were put into `space()`."""
        if self._partial is not None:
            self.missing -= count
            if self._rest:
                rest = self._rest.pop()[count:]
                if rest:
                    self._rest.append(rest)
        else:
            self._end += count

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None.

        Raises:
            ProtocolError: the bytes are not a frame, or the frame exceeds the limits.
        """
        partial = self._partial
        if partial is not None:
            if self.missing:
                return None
            self._partial = None
            return partial
        available = self._end - self._start
        if available < self._needed:
            return None
        start = self._start
        magic, kind, zero, call, message_length, count = PREFIX.unpack_from(self._input, start)
        if magic != MAGIC or kind not in KINDS or zero != 0:
            raise ProtocolError(
                f"the stream holds {bytes(self._view[start : start + 4])!r} where a frame should "
                f"begin: the peer does not speak this protocol"
            )
        if message_length > self._limits.message_bytes or count > MAX_BUFFERS:
            raise ProtocolError(
                f"a frame announces a message of {message_length} bytes and {count} buffers; the "
                f"limits are {self._limits.message_bytes} bytes and {MAX_BUFFERS} buffers"
            )
        head = PREFIX.size + 8 * count + message_length
        if available < head:
            self._needed = head
            return None
        self._needed = PREFIX.size
        text = start + PREFIX.size + 8 * count
        body = text + message_length
        message = bytes(self._view[text:body])
        self._start = body
        if count == 0:
            return Frame(kind, call, message, _NOTHING, ())
        lengths = struct.unpack_from(f"<{count}Q", self._input, start + PREFIX.size)
        return self._begin_area(kind, call, message, lengths)

    def _begin_area(
        self, kind: int, call: int, message: bytes, lengths: tuple[int, ...]
    ) -> Frame | None:
        spans = []
        total = 0
        for length in lengths:
            spans.append((total, length))
            total += (length + ALIGNMENT - 1) & -ALIGNMENT
        if total > self._limits.frame_bytes:
            raise ProtocolError(
                f"a frame announces {total} bytes of buffers; the limit is "
                f"{self._limits.frame_bytes} bytes. Large tensors must be sent in pieces."
            )
        here = min(total, self._end - self._start)
        place = self.places.get(call) if kind == REPLY else None
        if place is not None and total >= PLACED_BYTES * len(lengths):
            placing = place(message)
            if placing is not None and _fits(placing.places, lengths):
                return self._begin_places(
                    Frame(kind, call, message, _NOTHING, tuple(spans)), placing, total, here
                )
        last, self._last = self._last, None
        try:
            is_free = last is not None and last.is_done and len(last.area) == total
            area = last.area if last is not None and is_free else allocate(total)
            area[:here] = self._view[self._start : self._start + here]
            frame = Frame(kind, call, message, area, tuple(spans))
            self._last = frame if total <= REUSED_BYTES else None
        except (MemoryError, RuntimeError):  # the latter is how torch says it
            # `Frame.buffer` raises MemoryError, which is sent to the peer; the connection continues.
            frame = Frame(kind, call, message, _NOTHING, tuple(spans), starved_bytes=total)
        self._start += here
        if here == total:
            return frame
        self._partial = frame
        self.missing = total - here
        return None

    def _begin_places(self, frame: Frame, placing: Placing, total: int, here: int) -> Frame | None:
        """Receive each buffer in its own memory."""
        pairs = zip(placing.places, frame.spans, strict=True)
        frame.places = tuple(allocate(span[1]) if one is None else one for one, span in pairs)
        frame.message = placing.message
        self._partial, self.missing = frame, total
        for one, (_, length) in zip(reversed(frame.places), reversed(frame.spans), strict=True):
            if length % ALIGNMENT:
                self._rest.append(memoryview(bytearray(-length % ALIGNMENT)))
            if length:
                self._rest.append(one)
        end = self._start + here
        while self._start < end:
            space = self._rest[-1]
            count = min(len(space), end - self._start)
            space[:count] = self._view[self._start : self._start + count]
            self._start += count
            self.advance(count)
        return self.next_frame()

    def _replace_input(self, size: int) -> None:
        kept = self._end - self._start
        replacement = bytearray(size)
        replacement[:kept] = self._view[self._start : self._end]
        self._input = replacement
        self._view = memoryview(replacement)
        self._start = 0
        self._end = kept


def check_size(buffers: Sequence[Buffer]) -> None:
    """Reject a call or a result that is too large for one message."""
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    limit = Limits().frame_bytes
    if size > limit:
        raise ValueError(
            f"{size} bytes of tensors in one call or result: at most {limit} bytes can be sent. Use "
            "a variable or a per-worker dataset for data of this size."
        )
