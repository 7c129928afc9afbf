"""Writes to a server that cannot map the client's memory, from the start or from some moment on."""

from __future__ import annotations

import socket

import pytest
import torch
from one_server import STEADY, W, add_one, listed
from waiting import wait_until

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.send_buffers import SMALLEST_SEGMENT_BYTES
from stratagem._ps.client.write_batch import SlotGradient
from stratagem._ps.inline_write import inline_write
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.server_options import ServerOptions
from stratagem._ps.types import GroupSpec
from stratagem._wire import messages, shm
from stratagem._wire.frames import Limits
from stratagem._wire.messages import SegmentRef, TensorRef
from stratagem.errors import ParameterServerLost


def disconnect(client: PsClient) -> None:
    channel = client._connections[0]._channel
    assert channel is not None
    channel._stream.sock.shutdown(socket.SHUT_RDWR)


def unmap(patch: pytest.MonkeyPatch) -> None:
    """Let the server fail to map memory of clients, as in a container of its own."""
    opened = shm.open_segment

    def refused(ref: SegmentRef, *, shared: bool) -> shm.MappedSegment | None:
        return None if shared else opened(ref, shared=shared)

    patch.setattr(shm, "open_segment", refused)


def test_memory_that_was_released_is_not_announced_again(server: ParameterServer) -> None:
    """A new connection announces the memory that there is now, else it could never be made."""
    with PsClient(listed(server), STEADY) as client:
        client.create(W, "w", value=torch.zeros(2))
        large = ShardLocation(0, 2, (SMALLEST_SEGMENT_BYTES // 4,), torch.float32)
        client.create(large, "large", value=torch.ones(large.shape))
        connection = client._connections[0]
        announced = connection.announced
        assert len(announced) > 1
        client.batch()  # nothing is unacknowledged: one segment replaces all of them
        assert not set(client.outbox.buffers.refs()) & set(announced)
        pending = connection.begin(messages.Ping())
        disconnect(client)
        assert isinstance(connection.collect(pending).message, messages.Pong)
        add_one(client)
        client.wait_for_writes()
        assert client.read([W])[0][0].tolist() == [1.0, 1.0]
        assert client.outbox.destinations[0].shares_memory


def test_memory_is_announced_on_a_connection_that_a_write_makes(server: ParameterServer) -> None:
    """The write that finds the connection broken was made for a server that has mapped the memory."""
    with PsClient(listed(server), STEADY) as client:
        client.create(W, "w", value=torch.zeros(2))
        batch = client.batch()
        batch.assign(0, 1, "add", torch.ones(2))
        client._connections[0].fail("did not answer a ping")
        client._connections[0].announced = client.outbox.buffers.refs()
        client.send(batch)
        client.wait_for_writes()
        assert client.read([W])[0][0].tolist() == [1.0, 1.0]


def test_writes_go_on_when_the_server_cannot_map_memory_any_more(
    server: ParameterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated, new and kept ones; none is lost and none is applied twice."""
    with PsClient(listed(server), STEADY) as client:
        client.create(W, "w", value=torch.zeros(2))
        client.create_optimizer(0, 1, "torch.optim.SGD", [GroupSpec((1,), {"lr": 1.0})])
        slot = client.outbox.buffers.new_slot((2,), torch.float32)
        slot.view.fill_(-10.0)
        kept = client.batch()
        kept.push(0, 1, [SlotGradient(1, slot)])
        client.send(kept)
        client.wait_for_writes()
        add_one(client)
        wait_until(lambda: server.facts["applied"] == 3)
        channel = client._connections[0]._channel
        assert channel is not None
        assert channel._stream.sock.recv(1 << 16)  # the acknowledgement came, and is lost
        with monkeypatch.context() as patched:
            unmap(patched)
            disconnect(client)
            client.wait_for_writes()  # repeats the write
            assert client.outbox.duplicates == 1
            add_one(client)
            disconnect(client)
            client.wait_for_writes()
            client.send(kept)
            client.wait_for_writes()
            assert client.read([W])[0][0].tolist() == [22.0, 22.0]
            assert not client.outbox.destinations[0].shares_memory


def test_new_memory_that_cannot_be_mapped_is_sent_instead(
    server: ParameterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is intact; the client announces a further segment."""
    with PsClient(listed(server), STEADY) as client:
        client.create(W, "w", value=torch.zeros(2))
        large = ShardLocation(0, 2, (SMALLEST_SEGMENT_BYTES // 4,), torch.float32)
        client.create(large, "large")
        with monkeypatch.context() as patched:
            unmap(patched)
            client.assign(large, torch.full(large.shape, 3.0))
            add_one(client)
            client.wait_for_writes()
        assert client.read([large])[0][0].unique().tolist() == [3.0]
        assert client.read([W])[0][0].tolist() == [1.0, 1.0]


def test_a_value_too_large_for_a_message_is_refused_with_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ServerOptions(limits=Limits(frame_bytes=1 << 16))
    large = ShardLocation(0, 2, (1 << 15,), torch.float32)
    with ParameterServer("127.0.0.1:0", task="/job:ps/task:0", options=options).start() as server:
        with PsClient(listed(server), STEADY) as client:
            client.create(W, "w", value=torch.zeros(2))
            client.create(large, "large")
            batch = client.batch()
            batch.assign(0, 2, "add", torch.ones(large.shape))
            what = "131072 bytes .* at most 65536 .* STRATAGEM_FRAME_BYTES"
            with monkeypatch.context() as patched:
                unmap(patched)
                disconnect(client)
                client.send(batch)  # finds out that the connection is broken
                with pytest.raises(ParameterServerLost, match=what):
                    client.wait_for_writes()
                with pytest.raises(ValueError, match=r"131072 bytes .* at most 65536"):
                    client.batch().assign(0, 2, "add", torch.ones(large.shape))
                add_one(client)
                client.wait_for_writes()
            assert client.read([W])[0][0].tolist() == [1.0, 1.0]


def test_every_field_of_a_write_survives() -> None:
    """Above all `held`: a backup that made a held step at once would have another state."""
    far, near = TensorRef("float32", (1,), segment=3, offset=64), TensorRef("int64", (1,), 0)
    gradient = messages.GradientRef(1, far, near, True, 7)
    joined = messages.JoinedRef((1, 2), (1, 0), far, near, True)
    operations = [
        messages.Push(4, (gradient,), {0: {"lr": 0.5}}, (joined,), True),
        messages.Scatter(1, "mul", near, far),
        messages.Assign(1, "sub", far),
        messages.AssignRows(1, 5, far),
    ]
    write = messages.Write(
        origin=messages.WriteId("w", 1, 2, 3, 4),
        operations=messages.encode_operations(operations),
        read=(messages.ReadItem(1),),
    )
    values = b"abcd"
    inlined, buffers = inline_write(write, [b"12345678"], lambda _: values)
    assert buffers == [b"12345678", *[values] * 5]

    def at(index: int) -> TensorRef:
        return TensorRef("float32", (1,), index)

    assert (inlined.origin, inlined.read) == (write.origin, write.read)
    assert messages.decode_operations(inlined.operations) == (
        messages.Push(
            4,
            (messages.GradientRef(1, at(1), near, True, 7),),
            {0: {"lr": 0.5}},
            (messages.JoinedRef((1, 2), (1, 0), at(2), near, True),),
            True,
        ),
        messages.Scatter(1, "mul", near, at(3)),
        messages.Assign(1, "sub", at(4)),
        messages.AssignRows(1, 5, at(5)),
    )
