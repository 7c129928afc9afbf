"""Shared memory from which parameter servers on this host read a client's writes.

Two kinds of memory, both owned by the client and mapped by the servers:

- *Halves*: most values are copied here when they are sent. While servers read one half, the next
  writes are copied into the other one.
- *Gradient slots*: each holds the gradient of one parameter for as long as the parameter exists.
  Large gradients stay in their slots (`GradientSlot.take`), so that sending them copies nothing.

Large gradients for servers elsewhere are sent from where they are (`LentGradient`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.torch_patches.numpy_views import plain_numpy
from stratagem._wire import codec, shm
from stratagem._wire.messages import SegmentRef, TensorRef

SMALLEST_SEGMENT_BYTES: Final = 1 << 22

_KEPT_PLACES: Final = 16384


class Placed(NamedTuple):
    """Place of one tensor in a half: a tensor over the memory, its name in messages, and its bytes."""

    view: Tensor
    ref: TensorRef
    memory: memoryview


class _Memory:
    """Segments in which entries are placed one after the other."""

    def __init__(self, numbers: Iterator[int], on_change: Callable[[], None]) -> None:
        self._numbers = numbers
        self._on_change = on_change
        self._room = 0  # of all segments together
        self.segments: list[shm.Segment] = []
        self.used_bytes = 0

    def place(self, size: int) -> tuple[shm.Segment, int]:
        """Return a segment and the offset of `size` free bytes in it."""
        self.used_bytes += size
        if self.segments:
            offset = self.segments[-1].take(size)
            if offset is not None:
                return self.segments[-1], offset
        # As large as all before it, so that there are few.
        room = max(SMALLEST_SEGMENT_BYTES, self._room, size + shm.ENTRY_BYTES)
        self._room += room
        self.segments.append(shm.Segment(next(self._numbers), room, writable_by_peers=True))
        self._on_change()
        offset = self.segments[-1].take(size)
        assert offset is not None
        return self.segments[-1], offset

    def reset(self) -> bool:
        """Free all entries; True if segments were closed, for one that is as large as all of them."""
        self.used_bytes = 0
        if len(self.segments) == 1:
            self.segments[0].reset()
            return False
        self.close()
        self._on_change()
        return True

    def close(self) -> None:
        """Release the memory; tensors over it stay valid."""
        for segment in self.segments:
            segment.close()
        self.segments.clear()


@final
class GradientSlot:
    """Memory of one gradient, at a place that servers know.

    Attributes:
        ref: how messages name the place.
        address: where it begins in this process.
    """

    __slots__ = ("_dtype", "_shape", "address", "memory", "place", "ref", "taken", "view")

    def __init__(
        self, segment: shm.Segment, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.place = (segment, offset)
        self.view = segment.tensor(offset, shape, dtype)
        """Tensor over the memory, for copying into it."""
        self.address = self.view.data_ptr()
        self.ref = _ref(segment, offset, shape, dtype)
        self.memory = segment.buffer(offset, self.view.nbytes)
        """The bytes, for sending them to a server that does not map them."""
        self._shape = shape
        self._dtype = dtype
        self.taken: weakref.ref[memoryview] | None = None
        """The memory of the tensor that `take` returned last; None if it never did."""

    @property
    def is_free(self) -> bool:
        """False while a tensor that `take` returned, or a view of it, is alive."""
        return self.taken is None or self.taken() is None

    def take(self) -> Tensor:
        """Return a tensor over the memory; the slot is not free until the tensor is gone."""
        memory = self.memory[:]  # the tensor alone keeps this object alive
        self.taken = weakref.ref(memory)
        # Detached: a gradient that torch counts as a view refuses ``p.grad.detach_()``.
        return torch.frombuffer(memory, dtype=self._dtype).view(self._shape).detach()

    def holds(self, gradient: Tensor) -> bool:
        """Return whether a gradient of the slot's shape is the content of this memory."""
        return gradient.data_ptr() == self.address and gradient.is_contiguous()


@final
class LentGradient:
    """Large gradient for a server that reads no shared memory: sent from the tensor that autograd made."""

    __slots__ = ("ref", "view")

    def __init__(self, leaf: Tensor) -> None:
        self.view = leaf
        self.ref = TensorRef(codec.dtype_name(leaf.dtype), tuple(leaf.shape))

    @property
    def memory(self) -> memoryview:
        """The bytes of the present gradient."""
        grad = self.view.grad
        assert grad is not None
        if grad.dtype is not torch.float32 or grad.requires_grad:
            return codec.bytes_of(grad)
        array: Any = plain_numpy(grad)  # a third of the time of `bytes_of`
        return memoryview(array).cast("B")


@final
class SendBuffers:
    """All memory that one client shares with servers. Not thread-safe.

    Attributes:
        current: which half is being filled, 0 or 1.
        generation: changes when all memory was replaced (`retire`); slots of earlier generations must not
            be used again.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.current = 0
        self.generation = 0
        self._halves = (self._new_memory(), self._new_memory())
        self._slots = self._new_memory()
        self._free_slots: dict[int, list[tuple[shm.Segment, int]]] = {}  # by their bytes
        self._retired: list[_Memory] = []
        self._placed: dict[tuple[int, int, tuple[int, ...], torch.dtype], Placed] = {}
        self._refs: tuple[SegmentRef, ...] | None = None

    def prepare(self) -> None:
        """Create the first segment, so that servers can be asked whether they can map it."""
        self._halves[self.current].place(0)

    @property
    def used_bytes(self) -> int:
        """Bytes placed in the current half."""
        return self._halves[self.current].used_bytes

    def place(self, shape: tuple[int, ...], dtype: torch.dtype) -> Placed:
        """Place a tensor in the current half."""
        size = shm.bytes_for(shape, dtype)
        segment, offset = self._halves[self.current].place(size)
        # Steps place the same shapes in the same order: what was made for a place is kept.
        key = (segment.number, offset, shape, dtype)
        placed = self._placed.get(key)
        if placed is None:
            if len(self._placed) >= _KEPT_PLACES:
                self._placed.clear()
            placed = self._placed[key] = Placed(
                segment.tensor(offset, shape, dtype),
                _ref(segment, offset, shape, dtype),
                segment.buffer(offset, size),
            )
        return placed

    def new_slot(self, shape: tuple[int, ...], dtype: torch.dtype) -> GradientSlot:
        """Return memory for one parameter's gradient."""
        size = shm.bytes_for(shape, dtype)
        free = self._free_slots.get(size)
        return GradientSlot(*(free.pop() if free else self._slots.place(size)), shape, dtype)

    def free_slot(self, slot: GradientSlot) -> None:
        """Take back the memory of a slot for others of its size, unless a tensor over it is alive."""
        if slot.is_free and slot.place[0] in self._slots.segments:
            self._free_slots.setdefault(slot.view.nbytes, []).append(slot.place)

    def reset(self) -> None:
        """Begin again at the start of the current half: servers have read everything in it."""
        half = self._halves[self.current]
        if half.segments and half.reset():
            self._placed.clear()

    def switch(self) -> None:
        """Go on with the other half, from its start: servers have read everything in it."""
        self.current = 1 - self.current
        self.reset()

    def retire(self) -> None:
        """Use new memory from now on: a server may still read what the present memory holds.

        The memory stays announced until `release_retired`, so that writes can be repeated from it.
        """
        if not any(memory.used_bytes for memory in (*self._halves, self._slots)):
            return
        self._retired += [*self._halves, self._slots]
        self._halves = (self._new_memory(), self._new_memory())
        self._slots = self._new_memory()
        self._free_slots.clear()
        self._placed.clear()
        self.generation += 1
        self.prepare()

    def release_retired(self) -> None:
        """Release retired memory: no write will be repeated from it."""
        if self._retired:
            for memory in self._retired:
                memory.close()
            self._retired.clear()
            self._forget_refs()

    def refs(self) -> tuple[SegmentRef, ...]:
        """How servers on this host find the memory; the same object until that changes."""
        if self._refs is None:
            memories = (*self._retired, *self._halves, self._slots)
            self._refs = tuple(one.ref() for memory in memories for one in memory.segments)
        return self._refs

    def bytes_at(self, ref: TensorRef) -> memoryview:
        """Return the bytes of a tensor that was placed here, to be sent over a connection."""
        size = shm.bytes_for(ref.shape, codec.dtype_from(ref.dtype))
        memories = (*self._retired, *self._halves, self._slots)
        (segment,) = (
            one for memory in memories for one in memory.segments if one.number == ref.segment
        )
        return segment.buffer(ref.offset, size)

    def _new_memory(self) -> _Memory:
        return _Memory(self._numbers, self._forget_refs)

    def _forget_refs(self) -> None:
        self._refs = None

    def close(self) -> None:
        """Release everything. May be called again."""
        self._placed.clear()
        self.release_retired()
        for memory in (*self._halves, self._slots):
            memory.close()

    @override
    def __repr__(self) -> str:
        return f"<SendBuffers {len(self.refs())} segments, generation {self.generation}>"


def _ref(
    segment: shm.Segment, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> TensorRef:
    return TensorRef(codec.dtype_name(dtype), shape, segment=segment.number, offset=offset)
