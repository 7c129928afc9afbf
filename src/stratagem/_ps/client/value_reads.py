"""Read variables over connections, with one request per server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stratagem import config
from stratagem._ps import types
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.server_connection import ServerConnection
from stratagem._wire import codec, messages
from stratagem._wire.codec import Outgoing
from stratagem._wire.frames import Placing
from stratagem._wire.messages import Frame, TensorRef


def read_values(
    connections: Sequence[ServerConnection], places: Sequence[ShardLocation]
) -> list[tuple[Tensor, int]]:
    """Return whole values with their versions."""
    newer = read_newer(connections, [(place, -1) for place in places])
    found = []
    for place in places:
        memory, version = newer[place.server, place.variable]
        assert memory is not None
        ref = TensorRef(codec.dtype_name(place.dtype), place.shape)
        found.append((codec.tensor_over(ref, memory), version))
    return found


def read_rows(
    connections: Sequence[ServerConnection],
    wanted: Sequence[tuple[ShardLocation, Tensor]],
    while_waiting: Callable[[], object],
) -> list[tuple[Tensor, int]]:
    """Return rows of variables with versions; `while_waiting` is called when all requests are sent."""
    narrow = config.wire_dtype()
    asked: dict[int, tuple[list[int], list[messages.ReadItem], Outgoing]] = {}
    for index, (place, ids) in enumerate(wanted):
        indices, items, outgoing = asked.setdefault(place.server, ([], [], Outgoing()))
        indices.append(index)
        items.append(messages.ReadItem(place.variable, ids=outgoing.add(ids), dtype=narrow))
    calls = []
    for server, (indices, items, outgoing) in asked.items():
        message = messages.Read(items=tuple(items))
        calls.append((server, indices, connections[server].begin(message, outgoing.buffers)))
    while_waiting()
    found: dict[int, tuple[Tensor, int]] = {}
    for server, indices, pending in calls:
        frame = connections[server].collect(pending)
        assert isinstance(frame.message, messages.Values)
        for index, ref, version in zip(
            indices, frame.message.values, frame.message.versions, strict=True
        ):
            rows = codec.tensor_from(ref, frame)
            found[index] = (rows.to(wanted[index][0].dtype) if narrow else rows), version
    return [found[index] for index in range(len(wanted))]


def narrow_dtype() -> torch.dtype | None:
    """Return the type in which gradients and rows are sent over connections; None: their own."""
    name = config.wire_dtype()
    return codec.dtype_from(name) if name else None


Known = Sequence[tuple[ShardLocation, int]]
"""Variables, and the versions that a client has."""

Newer = tuple[memoryview | None, int]
"""The bytes of a value that differs from the one a client has, or None; and its version."""


PlaceOfRead = Callable[[int, int], memoryview | None]
"""Returns the memory for the new value of a variable, by server and variable; None: new memory."""

Placer = PlaceOfRead | None
Reads = Mapping[int, Sequence[messages.ReadItem]] | None
"""Values to read, by server."""


def place_values(
    place: PlaceOfRead, server: int, read: Sequence[messages.ReadItem], message: bytes
) -> Placing | None:
    """Find the memory of the values that come with the answer to a write."""
    reply = messages.decode(message)
    if not isinstance(reply, messages.Written) or reply.values is None:
        return None
    pairs = zip(reply.values.values, read, strict=False)
    sent = [(ref.buffer, item.variable) for ref, item in pairs if ref.buffer >= 0]
    if [buffer for buffer, _ in sent] != list(range(len(sent))):
        return None
    return Placing([place(server, variable) for _, variable in sent], reply)


def newer_items(wanted: Known) -> dict[int, list[messages.ReadItem]]:
    """Return what to ask each server for: values whose version is not the known one."""
    items: dict[int, list[messages.ReadItem]] = {}
    for place, known in wanted:
        item = messages.ReadItem(place.variable, known=known)
        items.setdefault(place.server, []).append(item)
    return items


def newer_values(values: messages.Values, frame: Frame) -> list[Newer]:
    """Return the answer to `newer_items` of one server: the received memory."""
    return [
        (frame.buffer(ref.buffer) if ref.buffer >= 0 else None, version)
        for ref, version in zip(values.values, values.versions, strict=True)
    ]


def read_newer(
    connections: Sequence[ServerConnection], wanted: Known
) -> dict[tuple[int, int], Newer]:
    """Return values, by server and variable, that differ from the versions the caller has; all servers at once.

    A value that is larger than a transfer is not asked for at once, but version by version and piece by piece.
    """
    found: dict[tuple[int, int], Newer] = {}
    small: list[tuple[ShardLocation, int]] = []
    for place, known in wanted:
        pieces = place.pieces()
        if len(pieces) == 1:
            small.append((place, known))
            continue
        connection = connections[place.server]
        if known >= 0:
            reply = connection.request(messages.AskVersions(variables=(place.variable,))).message
            assert isinstance(reply, messages.Versions)
            if reply.versions[place.variable] == known:
                found[place.server, place.variable] = (None, known)
                continue
        value, version = _read_pieces(connection, place, pieces)
        found[place.server, place.variable] = (codec.bytes_of(value), version)
    calls = []
    for server, items in newer_items(small).items():
        sizes = {one.variable: one.nbytes for one, _ in small if one.server == server}
        for some in _in_transfers(items, sizes):
            pending = connections[server].begin(messages.Read(items=tuple(some)))
            calls.append((server, some, pending))
    for server, some, pending in calls:
        frame = connections[server].collect(pending)
        assert isinstance(frame.message, messages.Values)
        for item, newer in zip(some, newer_values(frame.message, frame), strict=True):
            found[server, item.variable] = newer
    return found


def _in_transfers(
    items: Sequence[messages.ReadItem], sizes: Mapping[int, int]
) -> Iterator[list[messages.ReadItem]]:
    """Divide items so that the values of each part are at most one transfer."""
    some: list[messages.ReadItem] = []
    size = 0
    for item in items:
        if some and size + sizes[item.variable] > types.TRANSFER_BYTES:
            yield some
            some, size = [], 0
        some.append(item)
        size += sizes[item.variable]
    if some:
        yield some


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
