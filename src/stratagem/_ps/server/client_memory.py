"""Shared memory of one client, mapped by the server, and a cache of decoded writes.

Clients write the same variables from the same places step after step. So tensors over a client's memory are
kept, and so are whole writes, decoded and ready to be applied again, by the bytes of their messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, final

from torch import Tensor

from stratagem._ps.server.stored_variable import StoredVariable
from stratagem._ps.types import Gradient, JoinedGradient, WriteId
from stratagem._wire import codec, messages, shm
from stratagem._wire.frames import REUSED_BYTES
from stratagem._wire.messages import Frame, SegmentRef, TensorRef
from stratagem.errors import NotFoundError, ProtocolError

_numbers = itertools.count(1)

_KEPT_TENSORS: Final = 8192

_KEPT_WRITES: Final = 64
_KEPT_VARIABLES: Final = 4096
_LONGEST_WRITE_BYTES: Final = 1 << 18
"""Limits per client: writes kept, variables they write in all, bytes of one write's message."""


class Touched(NamedTuple):
    """A variable that a write changes, and where its counter is in shared memory: see `shm.Segment.publish`."""

    variable: StoredVariable
    counters: memoryview
    counter: int


class PreparedWrite(NamedTuple):
    """A write, decoded, its tensors and variables found.

    Attributes:
        epoch: identifies the variables and optimizers of the session; after a change, it is another object.
        calls: what to do, in order; each takes the identity of the write.
        touched: the variables, by number.
        frame: the frame in whose memory the calls find the message's buffers.
        may_repeat: the calls do the same with new values in the same memory, and keep nothing of it.
    """

    epoch: object
    calls: Sequence[Callable[[WriteId], object]]
    touched: Mapping[int, Touched]
    frame: Frame
    may_repeat: bool


@final
class ClientMemory:
    """The send buffers of one client, mapped here.

    Args:
        allowed: whether this server maps clients' memory at all.
    """

    def __init__(self, *, allowed: bool) -> None:
        self.is_allowed = allowed
        self.number = next(_numbers)
        """Identifies the client in this process."""
        self._refs: tuple[SegmentRef, ...] = ()
        self._segments: dict[int, shm.MappedSegment] = {}
        self._tensors: dict[TensorRef, Tensor] = {}
        self._writes: dict[bytes, PreparedWrite] = {}
        self._variables_kept = 0
        self._area: memoryview | None = None  # in which the buffers of all of these writes are

    @property
    def refs(self) -> tuple[SegmentRef, ...]:
        return self._refs

    def open(self, refs: tuple[SegmentRef, ...]) -> None:
        """Map the segments a client announced, and release all others.

        Raises:
            NotFoundError: one cannot be mapped: the client must send bytes.
        """
        known = set(self._refs)
        kept = {ref.number for ref in refs if ref in known}
        for number in [number for number in self._segments if number not in kept]:
            self._forget_tensors()
            self._segments.pop(number).close()
        self._refs = tuple(ref for ref in refs if ref.number in kept)
        for ref in refs:
            if ref.number in self._segments:
                continue
            mapped = shm.open_segment(ref, shared=True) if self.is_allowed else None
            if mapped is None:
                raise NotFoundError(
                    f"segment {ref.number!r} of process {ref.pid!r} cannot be mapped by this server: "
                    f"send bytes over the connection"
                )
            self._segments[ref.number] = mapped
            self._refs += (ref,)

    def tensor(self, ref: TensorRef, frame: Frame) -> Tensor:
        """Return the tensor a message names: in the client's memory, or beside the message."""
        if ref.segment == 0:
            return codec.tensor_from(ref, frame)
        tensor = self._tensors.get(ref)
        if tensor is None:
            segment = self._segments.get(ref.segment)
            if segment is None:
                raise ProtocolError(f"the message names segment {ref.segment!r}, never announced")
            tensor = segment.tensor(ref.offset, ref.shape, codec.dtype_from(ref.dtype))
            if len(self._tensors) >= _KEPT_TENSORS:
                self._tensors.clear()
            self._tensors[ref] = tensor
        return tensor

    def joined(self, ref: messages.JoinedRef, frame: Frame) -> list[Gradient]:
        """Return the gradients of several variables that travel together; ProtocolError if they do not fit."""
        values, ids = self.tensor(ref.values, frame), self.tensor(ref.ids, frame)
        rows = sum(ref.counts)
        fits = len(ref.counts) == len(ref.variables) and min(ref.counts, default=0) >= 0
        if not fits or ids.shape != (rows,) or not values.dim() or values.shape[0] != rows:
            raise ProtocolError(
                f"joined gradients of {len(ref.variables)} variables have {len(ref.counts)} counts, "
                f"{tuple(ids.shape)!r} ids and {tuple(values.shape)!r} values: expected one count for each "
                f"variable, and {rows} rows"
            )
        joined = JoinedGradient(
            variables=ref.variables, counts=ref.counts, values=values, ids=ids, sparse=ref.sparse
        )
        return joined.split()

    def known_write(self, key: bytes, epoch: object, frame: Frame) -> PreparedWrite | None:
        """Return the write prepared for the same bytes in the same epoch, with its buffers in the same memory."""
        known = self._writes.get(key)
        if known is None or known.epoch is not epoch or known.frame.area is not frame.area:
            return None
        return known if known.frame.spans == frame.spans else None

    def keep_write(self, key: bytes, write: PreparedWrite) -> None:
        """Keep a prepared write, if that is not too much; those with buffers while all are received into one memory."""
        frame = write.frame
        may_keep = not frame.spans or (write.may_repeat and len(frame.area) <= REUSED_BYTES)
        if not may_keep or len(key) > _LONGEST_WRITE_BYTES:
            return
        is_full = (
            len(self._writes) >= _KEPT_WRITES
            or self._variables_kept + len(write.touched) > _KEPT_VARIABLES
        )
        if is_full or frame.area is not self._area:
            self._forget_writes()
        self._area = frame.area
        self._variables_kept += len(write.touched)
        self._writes[key] = write

    def rest(self) -> None:
        """Let the pages be their owner's alone until they are used again: nothing came for a while."""
        self._forget_writes()
        for segment in self._segments.values():
            segment.rest()

    def close(self) -> None:
        """Release everything. May be called again."""
        self._forget_tensors()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._refs = ()

    def _forget_tensors(self) -> None:
        self._tensors.clear()
        self._forget_writes()

    def _forget_writes(self) -> None:
        self._writes.clear()
        self._variables_kept = 0
        self._area = None
