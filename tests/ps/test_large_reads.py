"""Reads over the connection that are larger than one reply may be, and replies nobody reads yet."""

from __future__ import annotations

import pytest
import torch

from stratagem._ps import client as client_module
from stratagem._ps import server as server_module
from stratagem._ps import sessions
from stratagem._ps.client import PsClient
from stratagem._ps.link import Membership
from stratagem._ps.mapping import Place
from stratagem._ps.server import ParameterServer
from stratagem._wire import messages
from stratagem._wire.channel import connect

ROWS = 1 << 10


def test_many_values_of_one_server_are_read_in_several_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "PIECE_BYTES", 3 * 4 * ROWS)
    monkeypatch.setattr(sessions, "REPLY_LIMIT_BYTES", 4 * 4 * ROWS)
    who = Membership(session="s", task="/job:chief/task:0", is_owner=True)
    with (
        ParameterServer("127.0.0.1:0").start() as server,
        PsClient([("/job:ps/task:0", server.address)], who, shared_memory=False) as client,
    ):
        places = [Place(0, number, (ROWS,), torch.float32) for number in range(1, 12)]
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
        connect(server.address, timeout_s=10) as channel,
    ):
        channel.request(messages.Hello(), timeout_s=10)
        calls = [channel.begin(messages.Ping()) for _ in range(200)]
        for call in calls:
            assert isinstance(channel.collect(call, timeout_s=10).message, messages.Pong)
