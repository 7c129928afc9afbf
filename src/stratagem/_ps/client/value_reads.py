"""Reads of variables over the connections: one request per server carries everything asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from stratagem._ps import types
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.server_connection import Pending, ServerConnection
from stratagem._wire import codec, messages
from stratagem._wire.codec import Outgoing

_Reads = dict[int, list[tuple[int, messages.ReadItem]]]
"""Items to read by server, each with its index in the answer."""


def read_values(
    connections: Sequence[ServerConnection], places: Sequence[ShardLocation]
) -> list[tuple[Tensor, int]]:
    """Return whole values with their versions: large ones in pieces, many in several requests."""
    found: dict[int, tuple[Tensor, int]] = {}
    items: _Reads = {}
    asked: dict[int, int] = {}  # bytes, by server
    for index, place in enumerate(places):
        pieces = place.pieces()
        if len(pieces) > 1:
            found[index] = _read_pieces(connections[place.server], place, pieces)
            continue
        if items.get(place.server) and asked[place.server] + place.nbytes > types.TRANSFER_BYTES:
            found.update(_collect(connections, items, {}, _nothing))
            items, asked = {}, {}
        asked[place.server] = asked.get(place.server, 0) + place.nbytes
        items.setdefault(place.server, []).append((index, messages.ReadItem(place.variable)))
    found.update(_collect(connections, items, {}, _nothing))
    return [found[index] for index in range(len(places))]


def read_rows(
    connections: Sequence[ServerConnection],
    wanted: Sequence[tuple[ShardLocation, Tensor]],
    while_waiting: Callable[[], object],
) -> list[tuple[Tensor, int]]:
    """Return rows of variables with versions; `while_waiting` is called when all requests are sent."""
    items: _Reads = {}
    outgoing: dict[int, Outgoing] = {}
    for index, (place, ids) in enumerate(wanted):
        ref = outgoing.setdefault(place.server, Outgoing()).add(ids)
        item = messages.ReadItem(place.variable, ids=ref)
        items.setdefault(place.server, []).append((index, item))
    found = _collect(connections, items, outgoing, while_waiting)
    return [found[index] for index in range(len(wanted))]


def _read_pieces(
    connection: ServerConnection, place: ShardLocation, pieces: Sequence[tuple[int, int]]
) -> tuple[Tensor, int]:
    """Return a large value; its version is the last piece's, since others may write between pieces."""
    whole = torch.empty(place.shape, dtype=place.dtype)
    version = 0
    for start, count in pieces:
        item = messages.ReadItem(place.variable, start, count)
        frame = connection.request(messages.Read(items=(item,)))
        assert isinstance(frame.message, messages.Values)
        piece = codec.tensor_from(frame.message.values[0], frame)
        whole[start : start + count].copy_(piece)
        version = frame.message.versions[0]
    return whole, version


def _collect(
    connections: Sequence[ServerConnection],
    items: _Reads,
    outgoing: Mapping[int, Outgoing],
    while_waiting: Callable[[], object],
) -> dict[int, tuple[Tensor, int]]:
    """Send one Read per server; return the values by their index in the answer."""
    calls: list[tuple[int, list[int], Pending]] = []
    for server, some in items.items():
        message = messages.Read(items=tuple(item for _, item in some))
        buffers = outgoing[server].buffers if server in outgoing else ()
        pending = connections[server].begin(message, buffers)
        calls.append((server, [index for index, _ in some], pending))
    while_waiting()
    found: dict[int, tuple[Tensor, int]] = {}
    for server, indices, pending in calls:
        frame = connections[server].collect(pending)
        assert isinstance(frame.message, messages.Values)
        for index, ref, version in zip(
            indices, frame.message.values, frame.message.versions, strict=True
        ):
            found[index] = (codec.tensor_from(ref, frame), version)
    return found


def _nothing() -> None:
    """Do nothing while replies are on their way."""
