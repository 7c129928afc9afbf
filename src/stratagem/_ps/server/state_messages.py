"""Optimizer state in messages: read it from a store, and decode it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratagem._ps import types
from stratagem._ps.server.client_memory import ClientMemory
from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import StateEntry
from stratagem._wire import codec, messages
from stratagem._wire.codec import Outgoing
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Frame, TensorRef
from stratagem.errors import ProtocolError


def read_state(
    store: VariableStore, message: messages.ReadState
) -> tuple[messages.State, Sequence[Buffer]]:
    wanted = set(message.variables)
    outgoing = Outgoing()
    items = []
    size = 0
    for entry in store.optimizer_state(message.optimizer):
        if wanted and entry.variable not in wanted:
            continue
        value = entry.value
        if isinstance(value, Tensor) and value.is_sparse:
            value = value.to_dense()  # SGD's momentum of sparse gradients
        if message.key:
            if entry.key != message.key or not isinstance(value, Tensor) or not value.dim():
                continue
            start = min(max(0, message.start), value.shape[0])
            value = value[start : start + min(max(0, message.count), value.shape[0])]
        if not isinstance(value, Tensor):
            items.append(messages.StateItem(entry.variable, entry.key, value=value))
            continue
        size += value.nbytes
        if size > types.TRANSFER_BYTES and value.dim() and not message.key:
            ref = TensorRef(codec.dtype_name(value.dtype), tuple(value.shape))
        else:
            ref = outgoing.add(value)
        items.append(messages.StateItem(entry.variable, entry.key, tensor=ref))
    return messages.State(items=tuple(items)), outgoing.buffers


def sent_state(
    store: VariableStore, message: messages.WriteState, frame: Frame, memory: ClientMemory
) -> list[StateEntry]:
    """Return the state that a message brings; tensors whose rows follow are on ``meta``."""
    return [
        StateEntry(
            variable=item.variable,
            key=item.key,
            value=item.value if item.tensor is None else _tensor(store, item, frame, memory),
        )
        for item in message.items
    ]


def _tensor(
    store: VariableStore, item: messages.StateItem, frame: Frame, memory: ClientMemory
) -> Tensor:
    ref = item.tensor
    assert ref is not None
    if ref.buffer >= 0 or ref.segment:
        return memory.tensor(ref, frame)
    if ref.shape != tuple(store.read(item.variable).shape):
        raise ProtocolError(
            f"{item.key!r} of variable {item.variable!r} is to come in pieces, but its shape "
            f"{ref.shape!r} is not the variable's"
        )
    return torch.empty(ref.shape, dtype=codec.dtype_from(ref.dtype), device="meta")
