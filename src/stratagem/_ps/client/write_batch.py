"""Collect the writes of one step, per server, before they are sent.

`PsClient.batch` makes a `WriteBatch`, its caller fills it, `PsClient.send` sends it: one message per
server, for any number of variables. A server that would get more bytes than it accepts in one message
gets several. Only sizes decide where a batch is divided, not the way in which tensors are sent: a closure that runs
again on another worker makes the same writes in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.torch_patches import private_api
from stratagem._ps.client.send_buffers import GradientSlot, LentGradient, Placed, SendBuffers
from stratagem._ps.types import Gradient, JoinedGradient
from stratagem._wire import codec, messages
from stratagem._wire.frames import Buffer, padded
from stratagem._wire.messages import (
    GradientRef,
    JoinedRef,
    Operation,
    Push,
    Setting,
    TensorRef,
)


class Destination(NamedTuple):
    """Facts about a server that decide how writes travel to it.

    Attributes:
        task: the server's name, for errors.
        shares_memory: whether it reads this process's shared memory.
        message_bytes: how many bytes of tensors it takes in one message.
        names: names of its variables, for errors.
        narrow: the type in which gradients are sent over the connection; None: their own.
    """

    task: str
    shares_memory: bool
    message_bytes: int
    names: Mapping[int, str]
    narrow: torch.dtype | None = None

    def dtype_of(self, gradient: torch.dtype) -> torch.dtype:
        """Return the type in which a gradient is sent."""
        is_wide = gradient.is_floating_point and gradient.itemsize > 2  # not complex numbers
        if self.narrow is None or self.shares_memory or not is_wide:
            return gradient
        return self.narrow


@final
class ServerPart:
    """One message to one server: operations, and their bytes if the server shares no memory.

    Attributes:
        is_shared: operations name shared memory, which the server reads.
        lent: gradients that are sent from where they are, by the numbers of their buffers.
    """

    __slots__ = ("_encoded", "buffers", "is_shared", "lent", "nbytes", "operations")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.buffers: list[Buffer] = []
        self.lent: dict[int, LentGradient] = {}
        self.nbytes = 0
        self.is_shared = False
        self._encoded: messages.Operations | None = None

    def encoded(self) -> messages.Operations:
        """Return the encoded operations, encoded once even if they are sent several times."""
        if self._encoded is None:
            self._encoded = messages.encode_operations(self.operations)
        return self._encoded

    def buffers_now(self) -> list[Buffer]:
        """Return the buffers to send, with the present bytes of lent gradients."""
        if not self.lent:
            return self.buffers
        return [
            self.lent[index].memory if index in self.lent else buffer
            for index, buffer in enumerate(self.buffers)
        ]


class SlotGradient(NamedTuple):
    """Dense gradient of a variable that lies in its slot, or is lent."""

    variable: int
    slot: GradientSlot | LentGradient


@final
class WriteBatch:
    """Operations of one step on any number of servers. Example: see `PsClient`.

    Tensors given to it must not change until it is sent. A batch of gradients that all lie in slots or are lent may be
    sent again and again.

    Args:
        buffers: where tensors are copied to.
        destinations: the servers, by index.
    """

    def __init__(self, buffers: SendBuffers, destinations: Sequence[Destination]) -> None:
        self._buffers = buffers
        self._destinations = destinations
        self._to: list[Tensor] = []
        self._from: list[Tensor] = []
        self._reserved: dict[int, Placed] = {}
        self.parts: dict[int, list[ServerPart]] = {}
        self.nbytes = 0

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor that the caller fills and then adds to the batch; it is sent without a copy."""
        placed = self._buffers.place(shape, dtype)
        self._reserved[id(placed.view)] = placed
        return placed.view

    def assign(self, server: int, variable: int, operation: str, value: Tensor) -> None:
        """Add: ``set``, ``add`` or ``sub`` a value of the variable's shape."""
        part = self._part_for(server, variable, value)
        part.operations.append(messages.Assign(variable, operation, self._put(server, part, value)))

    def assign_rows(self, server: int, variable: int, start: int, value: Tensor) -> None:
        """Add: overwrite consecutive rows from `start`."""
        part = self._part_for(server, variable, value)
        part.operations.append(messages.AssignRows(variable, start, self._put(server, part, value)))

    def scatter(
        self, server: int, variable: int, operation: str, ids: Tensor, values: Tensor
    ) -> None:
        """Add: combine rows by ``add sub mul div min max update``."""
        part = self._part_for(server, variable, ids, values)
        refs = self._put(server, part, ids), self._put(server, part, values)
        part.operations.append(messages.Scatter(variable, operation, *refs))

    def push(
        self,
        server: int,
        optimizer: int,
        gradients: Sequence[Gradient | SlotGradient],
        settings: Mapping[int, Mapping[str, Setting]] | None = None,
        *,
        joined: Sequence[JoinedGradient] = (),
        held: bool = False,
    ) -> None:
        """Add one step of the server's optimizer; `settings`, by group number, hold for this step alone.

        `joined`: gradients of tables that travel together. `held`: the step is made at the end of the round.
        Gradients must not change until the step is acknowledged (`Outbox.keep_unacknowledged` ends that).
        """
        changed = {group: dict(values) for group, values in (settings or {}).items()}
        refs: list[GradientRef] = []
        part: ServerPart | None = None
        together: list[JoinedRef] = []
        for each in joined:
            if each.values.nbytes + each.ids.nbytes > self._destinations[server].message_bytes // 2:
                gradients = [*gradients, *each.split()]
                continue
            part = self._part_for(server, each.variables[0], each.values, each.ids)
            values, ids = self._put(server, part, each.values), self._put(server, part, each.ids)
            together.append(JoinedRef(each.variables, each.counts, values, ids, each.sparse))
        for one in gradients:
            if isinstance(one, SlotGradient):
                into = self._part_for(server, one.variable, one.slot.view)
            elif one.ids is None:
                into = self._part_for(server, one.variable, one.values)
            else:
                into = self._part_for(server, one.variable, one.values, one.ids)
            if into is not part and part is not None:
                part.operations.append(Push(optimizer, tuple(refs), changed, tuple(together), held))
                refs, together = [], []
            part = into
            if isinstance(one, SlotGradient):
                refs.append(GradientRef(one.variable, self._slot_ref(server, part, one.slot)))
                continue
            values = self._put(server, part, one.values, lent=True)
            rows = None if one.ids is None else self._put(server, part, one.ids, lent=True)
            refs.append(GradientRef(one.variable, values, rows, one.sparse, one.clock))
        if part is None:
            part = self._part_for(server, 0)
        part.operations.append(Push(optimizer, tuple(refs), changed, tuple(together), held))

    @property
    def is_empty(self) -> bool:
        """True if nothing would be written."""
        return not self.parts

    def copy_in(self) -> None:
        """Copy all tensors to where they are sent from."""
        if len(self._to) == 1:
            self._to[0].copy_(self._from[0])
        elif self._to:
            private_api.foreach_copy_(self._to, self._from)
        self._to, self._from = [], []

    @override
    def __repr__(self) -> str:
        count = sum(len(part.operations) for parts in self.parts.values() for part in parts)
        return f"<WriteBatch {count} operations on {len(self.parts)} servers>"

    def _part_for(self, server: int, variable: int, *tensors: Tensor) -> ServerPart:
        """Return the message that takes an operation on one variable with these tensors.

        Raises:
            ValueError: they are too large for any message to this server.
        """
        size = 0
        for tensor in tensors:
            size += padded(tensor.nbytes)
        parts = self.parts.get(server)
        if parts is None:
            parts = self.parts[server] = [ServerPart()]
        there = self._destinations[server]
        part = parts[-1]
        if part.nbytes + size > there.message_bytes:
            if size > there.message_bytes and not there.shares_memory:
                name = there.names.get(variable, f"number {variable}")
                raise ValueError(
                    f"one step writes {size} bytes of variable {name!r} to {there.task} over the "
                    f"connection, which takes at most {there.message_bytes} at once. Use a "
                    "variable_partitioner that cuts large variables, or set STRATAGEM_FRAME_BYTES "
                    "for the servers."
                )
            if part.nbytes:
                part = ServerPart()
                parts.append(part)
        part.nbytes += size
        self.nbytes += size
        return part

    def _slot_ref(
        self, server: int, part: ServerPart, slot: GradientSlot | LentGradient
    ) -> TensorRef:
        if isinstance(slot, LentGradient):
            part.lent[len(part.buffers)] = slot
            part.buffers.append(b"")
            return TensorRef(slot.ref.dtype, slot.ref.shape, len(part.buffers) - 1)
        if self._destinations[server].shares_memory:
            part.is_shared = True
            return slot.ref
        part.buffers.append(slot.memory)
        return TensorRef(slot.ref.dtype, slot.ref.shape, len(part.buffers) - 1)

    def _put(
        self, server: int, part: ServerPart, tensor: Tensor, *, lent: bool = False
    ) -> TensorRef:
        """Place a tensor: `lent`, it is sent from where it is, and must not change until it is acknowledged."""
        if tensor.layout != torch.strided:
            raise ValueError(
                f"a tensor with layout {tensor.layout} cannot be written as it is: give rows (ids "
                f"and values) instead"
            )
        shape = tuple(tensor.shape)
        if (
            lent
            and (dtype := self._destinations[server].dtype_of(tensor.dtype)) is not tensor.dtype
        ):
            tensor = tensor.detach().to(dtype)
        if lent and tensor.is_contiguous() and not self._destinations[server].shares_memory:
            part.buffers.append(codec.bytes_of(tensor))
            return TensorRef(codec.dtype_name(tensor.dtype), shape, len(part.buffers) - 1)
        reserved = self._reserved.get(id(tensor))
        view, ref, memory = reserved or self._buffers.place(shape, tensor.dtype)
        if tensor.numel() and reserved is None:
            self._to.append(view)
            self._from.append(tensor.detach() if tensor.requires_grad else tensor)
        if self._destinations[server].shares_memory:
            part.is_shared = True
            return ref
        part.buffers.append(memory)
        return TensorRef(ref.dtype, shape, len(part.buffers) - 1)
