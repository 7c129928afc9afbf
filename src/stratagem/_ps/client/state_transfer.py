"""Transfer optimizer state between a client and one parameter server, large tensors in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratagem._ps import types
from stratagem._ps.client.server_connection import ServerConnection
from stratagem._ps.types import StateEntry, StateValue, row_pieces
from stratagem._wire import codec, messages
from stratagem._wire.codec import Outgoing
from stratagem._wire.messages import TensorRef


def read(
    connection: ServerConnection, optimizer: int, variables: Sequence[int]
) -> list[StateEntry]:
    """Return what an optimizer keeps for these variables; one request per variable."""
    entries = []
    for variable in variables:
        message = messages.ReadState(optimizer=optimizer, variables=(variable,))
        frame = connection.request(message)
        assert isinstance(frame.message, messages.State)
        for item in frame.message.items:
            value: StateValue = item.value
            if item.tensor is not None and item.tensor.buffer < 0:
                value = _read_pieces(connection, optimizer, item, item.tensor)
            elif item.tensor is not None:
                value = codec.tensor_from(item.tensor, frame)
            entries.append(StateEntry(variable=item.variable, key=item.key, value=value))
    return entries


def _read_pieces(
    connection: ServerConnection, optimizer: int, item: messages.StateItem, ref: TensorRef
) -> Tensor:
    whole = torch.empty(ref.shape, dtype=codec.dtype_from(ref.dtype))
    for start, count in row_pieces(whole.shape[0], whole.nbytes):
        message = messages.ReadState(
            optimizer=optimizer, variables=(item.variable,), key=item.key, start=start, count=count
        )
        frame = connection.request(message)
        assert isinstance(frame.message, messages.State)
        (piece,) = frame.message.items
        assert piece.tensor is not None
        whole[start : start + count].copy_(codec.tensor_from(piece.tensor, frame))
    return whole


def write(connection: ServerConnection, optimizer: int, entries: Sequence[StateEntry]) -> None:
    """Replace what an optimizer keeps for the variables of the entries."""
    by_variable: dict[int, list[StateEntry]] = {}
    for entry in entries:
        by_variable.setdefault(entry.variable, []).append(entry)
    for some in by_variable.values():
        outgoing = Outgoing()
        items = []
        large: list[tuple[StateEntry, Tensor]] = []
        size = 0
        for entry in some:
            value = entry.value
            if not isinstance(value, Tensor):
                items.append(messages.StateItem(entry.variable, entry.key, value=value))
                continue
            size += value.nbytes
            if size > types.TRANSFER_BYTES and value.dim():
                large.append((entry, value))
                ref = TensorRef(codec.dtype_name(value.dtype), tuple(value.shape))
            else:
                ref = outgoing.add(value)
            items.append(messages.StateItem(entry.variable, entry.key, tensor=ref))
        message = messages.WriteState(optimizer=optimizer, items=tuple(items))
        connection.request(message, outgoing.buffers)
        for entry, value in large:
            _write_pieces(connection, optimizer, entry, value)


def _write_pieces(
    connection: ServerConnection, optimizer: int, entry: StateEntry, value: Tensor
) -> None:
    for start, count in row_pieces(value.shape[0], value.nbytes):
        outgoing = Outgoing()
        ref = outgoing.add(value[start : start + count])
        item = messages.StateItem(entry.variable, entry.key, tensor=ref)
        message = messages.WriteState(optimizer=optimizer, items=(item,), start=start)
        connection.request(message, outgoing.buffers)
