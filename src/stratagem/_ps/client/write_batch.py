"""The writes of one step, gathered per server before they are sent.

A `WriteBatch` comes from `PsClient.batch()`, is filled by whoever steps, and is sent by `PsClient.send`: one message per
server, whatever the number of variables. Tensors are copied into the client's gradient slots (shared memory the
servers map, or the source of the bytes sent), all in one go, when the batch is sent. Large tensors of a worker lie in shared memory
themselves (`_wire/shared_heap.py`): whoever waits for the servers anyway may lend them instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.torch_patches import private_api
from stratagem._wire import codec, messages, shared_heap, shm
from stratagem._wire.arenas import Arena, Budget, memory_of_machine
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Operation, Setting, TensorRef

_CACHE_LIMIT = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class PushedGradient:
    """The gradient of one variable on one server: dense, or rows (unique ids and their values)."""

    variable: int
    values: Tensor
    ids: Tensor | None = None
    sparse: bool = False


@final
class SendBuffers:
    """Where a client puts what it sends; placed from the start again when all of it arrived.

    Steps place the same shapes in the same order, so the tensors over the slots are kept.
    """

    def __init__(self) -> None:
        self.arena = Arena(Budget(memory_of_machine()), writable_by_peers=True)
        self._views: dict[tuple[int, int, tuple[int, ...], torch.dtype], Tensor] = {}
        self._heap = shared_heap.installed()
        self._refs: tuple[messages.SegmentRef, ...] = ()
        self._known: list[shm.Segment] = []

    def prepare(self) -> None:
        """Makes the first segment, so that servers can be asked whether they can map it."""
        if not self.arena.segments():
            self.arena.place(0)
            self.arena.reset()

    def place(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, TensorRef]:
        """Room for a tensor: the tensor over it, and how a server on this host finds it."""
        size = shm.bytes_for(shape, dtype)
        segment, offset = self.arena.place(size)
        key = (segment.number, offset, shape, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _CACHE_LIMIT:
                self._views.clear()
            view = self._views[key] = segment.tensor(offset, shape, dtype)
        name = codec.dtype_name(dtype)
        return view, TensorRef(name, shape, segment=segment.number, offset=offset)

    def lend(self, tensor: Tensor) -> TensorRef | None:
        """How a server on this host finds a tensor where it lies; None if it must be copied."""
        offset = None if self._heap is None else self._heap.offset_of(tensor)
        if offset is None:
            return None
        name = codec.dtype_name(tensor.dtype)
        return TensorRef(name, tuple(tensor.shape), segment=shared_heap.NUMBER, offset=offset)

    def reset(self) -> None:
        """Everything sent has arrived: start again."""
        if len(self.arena.segments()) > 1:
            self._views.clear()  # the arena joins its segments into one
        self.arena.reset()

    @cached_property
    def heap_refs(self) -> tuple[messages.SegmentRef, ...]:
        """How servers on this host find what is lent; nothing if nothing can be."""
        return () if self._heap is None else (self._heap.ref(),)

    def refs(self) -> tuple[messages.SegmentRef, ...]:
        """How servers on this host find the slots."""
        segments = self.arena.segments()
        if segments != self._known:
            self._known = segments
            self._refs = tuple(segment.ref() for segment in segments)
        return self._refs

    def close(self) -> None:
        """Gives the memory up. Repeatable."""
        self._views.clear()
        self.arena.close()


class Sharing(Enum):
    """What a server reads in this process's memory."""

    NOTHING = auto()  # bytes go over the connection
    SLOTS = auto()
    HEAP = auto()  # the slots, and large tensors where they lie


@final
class ServerPart:
    """What goes to one server: operations, and for a server that shares no memory their bytes."""

    __slots__ = ("_encoded", "buffers", "operations", "sharing")

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self.operations: list[Operation] = []
        self.buffers: list[Buffer] = []
        self._encoded: messages.Operations | None = None

    def encoded(self) -> messages.Operations:
        """The operations as they travel; made once, however often they are sent."""
        if self._encoded is None:
            self._encoded = messages.encode_operations(self.operations)
        return self._encoded


@final
class WriteBatch:
    """Operations of one step on any number of servers, applied at most once.

    Tensors given to it must not change until it is sent; if it `lends` some, not until it is settled. Example:
    see `PsClient`.

    Args:
        slots: where tensors are copied to.
        sharing: by server, what it can read.
        lends_from: tensors of so many bytes that servers can read where they lie are not copied.
    """

    def __init__(
        self, slots: SendBuffers, sharing: Sequence[Sharing], *, lends_from: float = math.inf
    ) -> None:
        self._slots = slots
        self._sharing = sharing
        self._lends_from = lends_from
        self._to: list[Tensor] = []
        self._from: list[Tensor] = []
        self._tensors: list[Tensor | int] = []  # each one's slot, or where a lent one lies
        self._placed: tuple[messages.SegmentRef, ...] = ()
        self._position: dict[int, int] = {}  # how far the slots were taken with it
        self.parts: dict[int, ServerPart] = {}
        self._lent: list[Tensor] = []
        self.lends = False
        """Whether servers read some of the tensors where they lie."""
        self.nbytes = 0
        """Bytes that are copied."""

    def assign(self, server: int, variable: int, operation: str, value: Tensor) -> None:
        """``set``, ``add`` or ``sub`` a value of the variable's shape."""
        part = self._part(server)
        part.operations.append(messages.Assign(variable, operation, self._put(part, value)))

    def assign_rows(self, server: int, variable: int, start: int, value: Tensor) -> None:
        """Overwrite consecutive rows from `start`."""
        part = self._part(server)
        part.operations.append(messages.AssignRows(variable, start, self._put(part, value)))

    def scatter(
        self, server: int, variable: int, operation: str, ids: Tensor, values: Tensor
    ) -> None:
        """Combine rows by ``add sub mul div min max update``."""
        part = self._part(server)
        part.operations.append(
            messages.Scatter(variable, operation, self._put(part, ids), self._put(part, values))
        )

    def push(
        self,
        server: int,
        optimizer: int,
        gradients: Sequence[PushedGradient],
        settings: Mapping[int, Mapping[str, Setting]] | None = None,
    ) -> None:
        """One step of the optimizer on the server; `settings`, by group number, are this step's own."""
        part = self._part(server)
        refs = tuple(
            messages.GradientRef(
                one.variable,
                self._put(part, one.values),
                self._put(part, one.ids) if one.ids is not None else None,
                one.sparse,
            )
            for one in gradients
        )
        changed = {group: dict(values) for group, values in (settings or {}).items()}
        part.operations.append(messages.Push(optimizer, refs, changed))

    @property
    def is_empty(self) -> bool:
        """True if nothing would be written."""
        return not self.parts

    def again(self, tensors: Sequence[Tensor]) -> WriteBatch | None:
        """This batch, sent and settled before, with other values: none of it is built anew.

        Steps of one model send the same gradients over and over; for a thousand variables building
        the batch costs more than their bytes. Nothing may be added to it.

        Args:
            tensors: as given at first, in the same order, without those that have no elements.

        Returns:
            None if the slots have moved, a tensor that was lent lies elsewhere, or slots are shared with
            other servers than before.
        """
        if self._slots.refs() != self._placed or len(tensors) != len(self._tensors):
            return None
        for server, part in self.parts.items():
            if part.sharing is not self._sharing[server]:
                return None
        twin = WriteBatch(self._slots, self._sharing, lends_from=self._lends_from)
        twin.parts, twin.nbytes, twin._tensors = self.parts, self.nbytes, self._tensors
        for place, tensor in zip(self._tensors, tensors, strict=True):
            if isinstance(place, Tensor):
                twin._to.append(place)
                twin._from.append(tensor)
            elif tensor.data_ptr() == place and shared_heap.lies_as_it_reads(tensor):
                twin._lend(tensor)
            else:
                return None
        # If it is interrupted, what follows must not be placed over it.
        self._slots.arena.advance(self._position)
        return twin

    def copy_in(self) -> None:
        """Copies all tensors into the slots; called by the client when it sends."""
        self._placed = self._slots.refs()
        self._position = self._slots.arena.position()
        if len(self._to) == 1:
            self._to[0].copy_(self._from[0])
        elif self._to:
            private_api.foreach_copy_(self._to, self._from)
        self._to, self._from = [], []

    def take_lent(self) -> Sequence[Tensor]:
        """The tensors that are lent, for who sends the batch: they must stay until it is settled."""
        lent = self._lent
        self._lent = []  # whoever keeps the batch to fill it again shall not keep them
        return lent

    @override
    def __repr__(self) -> str:
        count = sum(len(part.operations) for part in self.parts.values())
        return f"<WriteBatch {count} operations on {len(self.parts)} servers>"

    def _part(self, server: int) -> ServerPart:
        part = self.parts.get(server)
        if part is None:
            part = ServerPart(self._sharing[server])
            self.parts[server] = part
        return part

    def _lend(self, tensor: Tensor) -> None:
        self._lent.append(tensor)
        self.lends = True

    def _put(self, part: ServerPart, tensor: Tensor) -> TensorRef:
        if tensor.layout != torch.strided:
            raise ValueError(
                f"a tensor with layout {tensor.layout} cannot be written as it is: give rows (ids "
                f"and values) instead"
            )
        shape, size = tuple(tensor.shape), tensor.nbytes
        if size >= self._lends_from and part.sharing is Sharing.HEAP:
            lent = self._slots.lend(tensor)
            if lent is not None:
                self._lend(tensor)
                self._tensors.append(tensor.data_ptr())
                return lent
        view, ref = self._slots.place(shape, tensor.dtype)
        if size:
            self.nbytes += size
            self._to.append(view)
            self._from.append(tensor.detach() if tensor.requires_grad else tensor)
            self._tensors.append(view)
        if part.sharing is not Sharing.NOTHING:
            return ref
        part.buffers.append(codec.bytes_of(view))
        return TensorRef(ref.dtype, shape, len(part.buffers) - 1)
