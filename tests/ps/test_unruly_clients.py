"""Clients that misbehave, are many or have no key: one server, and what it lets them do."""

from __future__ import annotations

import threading

import pytest
import torch
from one_server import CHIEF, W, add_one, listed
from server_probe import ping
from waiting import wait_until

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.server.loop import ParameterServer
from stratagem._ps.server.server_options import ServerOptions
from stratagem._wire import frames, messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClusterKey
from stratagem.errors import (
    AuthenticationError,
    ConnectionLost,
    ParameterServerLost,
    ProtocolError,
)

LIMIT_S = 120.0


# Clients that misbehave.


def hello(server: ParameterServer, purpose: str = "data") -> Channel:
    channel = connect(server.address, timeout_s=LIMIT_S)
    channel.request(messages.Hello(purpose=purpose, task="test"), timeout_s=LIMIT_S)
    return channel


def test_pings_are_answered_while_a_long_step_runs(
    server: ParameterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work thread is stuck in one message; the other one answers."""
    entered, leave = threading.Event(), threading.Event()

    def long_step(*_: object) -> tuple[messages.Message, tuple[()]]:
        entered.set()
        assert leave.wait(LIMIT_S)
        return messages.Ok(), ()

    with PsClient(listed(server), CHIEF) as client:
        (session,) = server._sessions.sessions()
        monkeypatch.setattr(session, "handle", long_step)
        pending = client._connections[0].begin(messages.AskVersions())
        assert entered.wait(LIMIT_S)
        assert ping(client) is not None
        with hello(server):  # new connections are let in meanwhile
            pass
        leave.set()
        client._connections[0].collect(pending)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (messages.Pong(), "began with Pong, expected Hello"),
        (messages.Hello(purpose="mischief"), "came for 'mischief'"),
    ],
)
def test_a_connection_must_begin_with_hello(
    server: ParameterServer,
    caplog: pytest.LogCaptureFixture,
    message: messages.Message,
    reason: str,
) -> None:
    """Dropped, with a logged reason; who took it for another kind of task is told what it is."""
    with connect(server.address, timeout_s=LIMIT_S) as channel:
        if not isinstance(message, messages.Hello):
            with pytest.raises(ProtocolError, match="a parameter server, which does not know Pong"):
                channel.request(message, timeout_s=LIMIT_S)
        with pytest.raises(ConnectionLost):
            channel.request(message, timeout_s=LIMIT_S)
    wait_until(lambda: reason in caplog.text)


@pytest.mark.slow
def test_a_connection_that_says_nothing_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It proved the key, then fell silent. The limit is the partition limit."""
    monkeypatch.setenv("STRATAGEM_PARTITION_LIMIT_S", "4")
    with ParameterServer("127.0.0.1:0").start() as server:
        with connect(server.address, timeout_s=LIMIT_S) as channel:
            with pytest.raises(ConnectionLost):
                channel.receive(timeout_s=LIMIT_S)
        wait_until(lambda: "said nothing for 4 s" in caplog.text)


@pytest.mark.parametrize("purpose", ["data", "control"])
def test_garbage_after_the_handshake_ends_that_connection_only(
    server: ParameterServer, purpose: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Others go on."""
    with PsClient(listed(server), CHIEF) as client:
        client.create(W, "w", value=torch.ones(2))
        with hello(server, purpose) as bad:
            bad._stream.sock.send(b"\x00" * 100)
            with pytest.raises(ConnectionLost):
                bad.receive(timeout_s=LIMIT_S)
        assert client.read([W])[0][0].tolist() == [1.0, 1.0]
    wait_until(lambda: "does not speak this protocol" in caplog.text)


def test_messages_of_others_are_refused(server: ParameterServer) -> None:
    """A pickled object, or a message for workers, is nothing a parameter server opens."""
    evil = messages.Packed(payload=b"cos\nsystem\n(S'true'\ntR.")
    with PsClient(listed(server), CHIEF) as client:
        with hello(server) as channel:
            channel.request(messages.JoinSession(session="s"), timeout_s=LIMIT_S)
            with pytest.raises(ProtocolError, match="a Packed is not a message"):
                channel.request(evil, timeout_s=LIMIT_S)
        assert ping(client) is not None


def test_memory_that_was_never_announced_is_refused(server: ParameterServer) -> None:
    """A reference into memory nobody mapped is an error of the sender; nothing is written."""
    with PsClient(listed(server), CHIEF) as client:
        client.create(W, "w", value=torch.ones(2))
        with hello(server) as channel:
            channel.request(messages.JoinSession(session="s"), timeout_s=LIMIT_S)
            ref = messages.TensorRef("float32", (2,), segment=77, offset=4160)
            write = messages.Write(
                origin=messages.WriteId("x", 1, 1),
                operations=messages.encode_operations((messages.Assign(1, "add", ref),)),
            )
            with pytest.raises(ProtocolError, match="segment 77, never announced"):
                channel.request(write, timeout_s=LIMIT_S)
        assert client.read([W])[0][0].tolist() == [1.0, 1.0]


def test_a_client_that_does_not_read_its_replies_is_slowed_not_buffered(
    server: ParameterServer,
) -> None:
    """Its requests wait once 64 MiB are unread; the server's memory does not grow, others go on."""
    big = ShardLocation(0, 1, (1 << 22,), torch.float32)  # 16 MiB
    with PsClient(listed(server), CHIEF) as client:
        client.create(big, "big", value=torch.ones(1 << 22))
        with hello(server) as greedy:
            greedy.request(messages.JoinSession(session="s"), timeout_s=LIMIT_S)
            read = messages.Read(items=(messages.ReadItem(1),))
            data = b"".join(frames.encode_frame(frames.REQUEST, 1, messages.encode(read), []))
            greedy._stream.sock.send(data * 100)  # asks for 1.6 GB and reads none of it
            connection = next(one for one in server._connections if one.task == "test")
            wait_until(
                lambda: connection.channel.outgoing_bytes > 1 << 25 and len(connection.inbox) > 0
            )
            assert connection.channel.outgoing_bytes < (1 << 26) + (1 << 25)
            assert client.versions(0) == {1: 1}
            assert len(connection.inbox) > 80
        wait_until(lambda: connection not in server._connections)
        assert client.versions(0) == {1: 1}


def test_fifty_clients(server: ParameterServer) -> None:
    """All joined, all served."""
    with PsClient(listed(server), CHIEF) as chief:
        chief.create(W, "w", value=torch.zeros(2))
        clients = []
        try:
            for index in range(50):
                who = Membership(session="s", task=f"/job:worker/task:{index}")
                clients.append(PsClient(listed(server), who, incarnation=1))
            for client in clients:
                add_one(client)
            for client in clients:
                client.wait_for_writes()
            assert chief.read([W])[0][0].tolist() == [50.0, 50.0]
            assert "51 connections" in repr(server)
        finally:
            for client in clients:
                client.close()


# Keys, life and end.


def test_a_server_with_a_key_accepts_only_clients_with_that_key() -> None:
    """Data and control connections alike."""
    key = ClusterKey.random()
    with ParameterServer("127.0.0.1:0", key=key).start() as server:
        keyed = Membership(session="s", task="/job:chief/task:0", is_owner=True, key=key)
        with PsClient(listed(server), keyed) as client:
            assert ping(client) is not None
        with pytest.raises(AuthenticationError):
            PsClient(listed(server), CHIEF)


def test_listening_beyond_loopback_without_a_key_is_refused() -> None:
    """Nothing is left open by the attempt."""
    with pytest.raises(PermissionError, match="STRATAGEM_CLUSTER_KEY"):
        ParameterServer("0.0.0.0:0")


def test_servers_close_at_any_time() -> None:
    """Never started, started, twice, from inside a context, with clients connected."""
    never = ParameterServer("127.0.0.1:0")
    never.close()
    never.close()
    server = ParameterServer("127.0.0.1:0").start()
    client = PsClient(listed(server), CHIEF)
    try:
        server.close()
        assert "closed" in repr(server)
        with pytest.raises(ParameterServerLost):
            client.versions(0)
    finally:
        client.close()


def test_stop_ends_serve_in_another_thread() -> None:
    """As a signal handler would."""
    server = ParameterServer("127.0.0.1:0", options=ServerOptions())
    thread = threading.Thread(target=server.serve, name="test-serve")
    thread.start()
    with PsClient(listed(server), CHIEF) as client:
        assert ping(client) is not None
    server.stop()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    server.close()
