"""Reads over the connection that are larger than one reply may be, and replies nobody reads yet."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem._ps import types
from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.server import loop as server_module
from stratagem._ps.server import value_replies
from stratagem._ps.server.data_connection import DataConnection
from stratagem._ps.server.lent_replies import LentReplies
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.server_options import ServerOptions
from stratagem._ps.types import GroupSpec, StateEntry
from stratagem._wire import codec, frames, messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.frames import Limits
from stratagem.errors import ProtocolError

ROWS = 1 << 10


def test_many_values_of_one_server_are_read_in_several_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(types, "TRANSFER_BYTES", 3 * 4 * ROWS)
    monkeypatch.setattr(value_replies, "REPLY_LIMIT_BYTES", 4 * 4 * ROWS)
    who = Membership(session="s", task="/job:chief/task:0", is_owner=True)
    with (
        ParameterServer("127.0.0.1:0").start() as server,
        PsClient([("/job:ps/task:0", server.address)], who, shared_memory=False) as client,
    ):
        places = [ShardLocation(0, number, (ROWS,), torch.float32) for number in range(1, 12)]
        for place in places:
            client.create(place, f"w{place.variable}", value=torch.full((ROWS,), place.variable))
        found = client.read(places)
        assert [float(value[-1]) for value, _ in found] == list(range(1, 12))
        assert {tuple(value.shape) for value, _ in found} == {(ROWS,)}


def test_requests_behind_unread_replies_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a limit of 0 every reply is "too much unread", and the last flush may send all of it.
    monkeypatch.setattr(server_module, "UNSENT_LIMIT_BYTES", 0)
    with (
        ParameterServer("127.0.0.1:0").start() as server,
        connect(server.address, timeout_s=60) as channel,
    ):
        channel.request(messages.Hello(), timeout_s=60)
        calls = [channel.begin(messages.Ping()) for _ in range(200)]
        for call in calls:
            assert isinstance(channel.collect(call, timeout_s=60).message, messages.Pong)


LARGE = 1 << 24
"""Elements of a variable that no socket takes at once."""


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Channel]:
    """Channels whose queues were copied."""
    found: list[Channel] = []
    copy = Channel.keep_unsent

    def noted(self: Channel) -> None:
        found.append(self)
        copy(self)

    monkeypatch.setattr(Channel, "keep_unsent", noted)
    return found


def add(client: PsClient, place: ShardLocation) -> None:
    """Add 1 to a variable, and wait until that is done."""
    batch = client.batch()
    batch.assign(place.server, place.variable, "add", torch.ones(place.shape))
    client.send(batch)
    client.wait_for_writes()


def replace(client: PsClient, place: ShardLocation) -> None:
    """Delete a variable, and create another one in its memory."""
    client.delete([place])
    client.create(ShardLocation(0, 2, place.shape, torch.float32), "v", value=torch.zeros(LARGE))


def read_only(client: PsClient, place: ShardLocation) -> None:
    """Read versions and values, which changes nothing."""
    client.versions(0)
    client.read([place])


@pytest.mark.parametrize(
    ("meanwhile", "are_copied"), [(add, True), (replace, True), (read_only, False)]
)
def test_a_reply_that_nobody_reads_yet_keeps_its_value(
    copies: list[Channel],
    meanwhile: Callable[[PsClient, ShardLocation], None],
    are_copied: bool,
) -> None:
    """It is sent from the variable's memory, and copied if anything may change that."""
    who = Membership(session="s", task="/job:chief/task:0", is_owner=True)
    with (
        ParameterServer("127.0.0.1:0").start() as server,
        PsClient([("/job:ps/task:0", server.address)], who, shared_memory=False) as client,
        connect(server.address, timeout_s=60) as slow,
    ):
        place = ShardLocation(0, 1, (LARGE,), torch.float32)
        client.create(place, "w", value=torch.ones(LARGE))
        slow.request(messages.Hello(task="/job:worker/task:0"), timeout_s=60)
        slow.request(messages.JoinSession(session="s"), timeout_s=60)
        copies.clear()
        call = slow.begin(messages.Read(items=(messages.ReadItem(1),)))
        assert select.select([slow], [], [], 60)[0]  # the server has begun to answer
        meanwhile(client, place)
        frame = slow.collect(call, timeout_s=60)
        assert isinstance(frame.message, messages.Values)
        value = codec.tensor_from(frame.message.values[0], frame)
        assert value.min() == value.max() == 1.0
        assert bool(copies) is are_copied


@pytest.mark.parametrize("is_checkpointing", [True, False])
def test_a_reply_is_copied_at_once_while_another_thread_may_restore_the_variable(
    copies: list[Channel], is_checkpointing: bool
) -> None:
    ours, theirs = socket.socketpair()
    with Channel(ours, peer="client") as channel, theirs:
        connection = DataConnection(channel, "/job:worker/task:0", shared_memory=False)
        session: Any = SimpleNamespace(is_checkpointing=is_checkpointing)
        connection.session = session
        lent = LentReplies()
        channel.enqueue(frames.REPLY, 1, messages.Ok(), [bytes(1 << 26)])
        lent.flush(connection)
        assert len(copies) == is_checkpointing
        lent.before(messages.Write)
        assert copies == [channel]
        lent.before(messages.Write)
        assert copies == [channel]


def test_optimizer_state_larger_than_a_frame_travels_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(types, "TRANSFER_BYTES", 100 * 4)
    limits = Limits(frame_bytes=4 * ROWS)  # what one of the two moments needs
    who = Membership(session="s", task="/job:chief/task:0", is_owner=True)
    with (
        ParameterServer("127.0.0.1:0", options=ServerOptions(limits=limits)).start() as server,
        PsClient([("/job:ps/task:0", server.address)], who) as client,
    ):
        place = ShardLocation(0, 1, (ROWS,), torch.float32)
        client.create(place, "w", value=torch.zeros(ROWS))
        groups = [GroupSpec(variables=(1,), settings={"lr": 0.1})]
        client.create_optimizer(0, 1, "torch.optim.Adam", groups)
        state = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.arange(float(ROWS)),
            "exp_avg_sq": torch.arange(float(ROWS)) + 0.5,
        }
        entries = [StateEntry(variable=1, key=key, value=value) for key, value in state.items()]
        client.write_state(0, 1, entries)
        found = {entry.key: entry.value for entry in client.read_state(0, 1, [1])}
        assert found.keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found[key]), value), key


def test_state_of_another_shape_allocates_nothing() -> None:
    who = Membership(session="s", task="/job:chief/task:0", is_owner=True)
    with (
        ParameterServer("127.0.0.1:0").start() as server,
        PsClient([("/job:ps/task:0", server.address)], who) as client,
    ):
        client.create(ShardLocation(0, 1, (4,), torch.float32), "w", value=torch.zeros(4))
        groups = [GroupSpec(variables=(1,), settings={"lr": 0.1})]
        client.create_optimizer(0, 1, "torch.optim.Adam", groups)
        huge = messages.StateItem(1, "exp_avg", messages.TensorRef("float32", (1 << 40,)))
        with pytest.raises(ProtocolError, match="not the variable's"):
            client.ask(0, messages.WriteState(optimizer=1, items=(huge,)))
