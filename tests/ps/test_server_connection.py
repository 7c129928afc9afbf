"""Connections that break, time out or move: made again, and every write counts once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Self

import pytest
import torch
from one_server import STEADY, WORKER, W, add_one, stop
from server_probe import ping
from waiting import wait_until

from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.server.loop import ParameterServer
from stratagem.errors import ParameterServerLost

pytestmark = pytest.mark.process

LIMIT_S = 120.0

Process = tuple[subprocess.Popen[str], str]


@pytest.fixture(params=[True, False], ids=["shared memory", "bytes"])
def shared(request: pytest.FixtureRequest) -> bool:
    assert isinstance(request.param, bool)
    return request.param


@pytest.fixture
def chief(server_process: Process) -> Iterator[PsClient]:
    _, address = server_process
    with PsClient([("/job:ps/task:0", address)], STEADY) as client:
        client.create(W, "w", value=torch.zeros(2))
        yield client


def add(client: PsClient, value: float) -> None:
    batch = client.batch()
    batch.assign(0, 1, "add", torch.full((2,), value))
    client.send(batch)


def value_of(client: PsClient) -> list[float]:
    return client.read([W])[0][0].tolist()


def wait_briefly(worker: PsClient) -> None:
    """Wait for acknowledgements, 0.3 s instead of a minute."""
    connection = worker._connections[0]
    limit_s, connection._timeout_s = connection._timeout_s, 0.3
    try:
        worker.wait_for_writes()
    finally:
        connection._timeout_s = limit_s


# A server that is stopped for longer than requests may take.


def test_a_server_that_was_stopped_for_too_long_is_used_again(
    server_process: Process, chief: PsClient, shared: bool
) -> None:
    """The request fails in time; the next one connects again, and the server has all variables."""
    child, address = server_process
    servers = [("/job:ps/task:0", address)]
    with PsClient(servers, WORKER, incarnation=1, shared_memory=shared) as worker:
        for round_ in range(1, 4):
            stop(child.pid)
            outbox = worker.outbox
            outbox.begin_closure(round_, exactly_once=True, gathers=False)
            add(worker, 1.0)
            with pytest.raises(ParameterServerLost, match=r"did not reply within 0\.3 s") as caught:
                wait_briefly(worker)
            assert "tries to connect again" in str(caught.value)
            outbox.end_closure()
            assert outbox.is_idle
            assert "broken" in repr(worker._connections[0])
            os.kill(child.pid, signal.SIGCONT)
            # The closure runs again; whether its first write arrives before or after, it counts once.
            outbox.begin_closure(round_, exactly_once=True, gathers=False)
            add(worker, 1.0)
            worker.wait_for_writes()
            outbox.end_closure()
            assert value_of(chief) == [float(round_)] * 2
        assert "open" in repr(worker._connections[0])


def test_memory_that_a_stopped_server_may_still_read_is_not_written_again(
    server_process: Process, chief: PsClient
) -> None:
    """It wakes up and applies a write that timed out long ago: with the values it was sent with."""
    child, address = server_process
    with PsClient([("/job:ps/task:0", address)], WORKER, incarnation=1) as worker:
        assert worker.outbox.destinations[0].shares_memory
        slot = worker.outbox.buffers.new_slot((2,), torch.float32)
        add(worker, 1.0)
        worker.wait_for_writes()  # the server has mapped the memory
        stop(child.pid)
        add(worker, 1.0)
        with pytest.raises(ParameterServerLost):
            wait_briefly(worker)
        assert worker.outbox.buffers.generation == 1
        fresh = worker.outbox.buffers.new_slot((2,), torch.float32)
        assert fresh.ref.segment != slot.ref.segment
        batch = worker.batch()
        for _ in range(20):
            batch.assign(0, 1, "add", torch.full((2,), 1000.0))
        batch.copy_in()  # into whatever memory the client uses now
        os.kill(child.pid, signal.SIGCONT)
        wait_until(lambda: chief.versions(0)[1] == 3)
        assert value_of(chief) == [2.0, 2.0]


def test_all_outstanding_requests_fail_together_and_later_ones_do_not(
    server_process: Process, chief: PsClient
) -> None:
    child, address = server_process
    with PsClient([("/job:ps/task:0", address)], WORKER, incarnation=1) as worker:
        outbox = worker.outbox
        stop(child.pid)
        for closure in (1, 2, 3):
            outbox.begin_closure(closure, exactly_once=True, gathers=False)
            add(worker, 1.0)
            outbox.end_closure()
        wait_briefly(worker)  # the errors belong to the closures
        assert sorted(outbox.failures) == [1, 2, 3]
        assert {type(error) for error in outbox.failures.values()} == {ParameterServerLost}
        os.kill(child.pid, signal.SIGCONT)
        add(worker, 10.0)
        worker.wait_for_writes()
        wait_until(lambda: value_of(chief)[0] in (10.0, 13.0))


def test_a_reconnected_worker_is_still_fenced(server_process: Process, chief: PsClient) -> None:
    child, address = server_process
    with PsClient([("/job:ps/task:0", address)], WORKER, incarnation=1) as worker:
        stop(child.pid)
        add(worker, 1.0)
        with pytest.raises(ParameterServerLost):
            wait_briefly(worker)
        os.kill(child.pid, signal.SIGCONT)
        chief.fence(WORKER.task, 1)
        before = value_of(chief)
        add(worker, 1.0)
        with pytest.raises(Exception, match="was refused"):
            worker.wait_for_writes()
        assert value_of(chief) == before


# Servers that move.


class Forwarder:
    """Listens on a port of its own and passes bytes on to another address, both ways."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="test-forwarder")]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            self._sockets += [near, far]
            for one, other in ((near, far), (far, near)):
                thread = threading.Thread(
                    target=self._copy, args=(one, other), name="test-forwarder"
                )
                self._threads.append(thread)
                thread.start()

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed meanwhile

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(LIMIT_S)
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other side was first
            one.close()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_a_server_that_moved_to_another_port_is_found_again(server: ParameterServer) -> None:
    """The address is asked for at every attempt; outstanding writes are repeated and count once."""
    first = Forwarder(server.address)
    address = [first.address]
    with PsClient([(server.task, lambda: address[0])], STEADY, shared_memory=False) as client:
        client.create(W, "w", value=torch.zeros(2))
        for _ in range(3):
            add_one(client)
        with Forwarder(server.address) as second:
            address[0] = second.address
            first.close()
            client.wait_for_writes()
            add_one(client)
            client.wait_for_writes()
            assert value_of(client) == [4.0, 4.0]
            assert client._connections[0].last_address == second.address
            assert ping(client) is not None
            client.close()


def test_a_server_restarted_at_another_port_is_found_and_recognised() -> None:
    """It has lost its variables: the error says so, and a new session finds it."""
    address = [""]
    with ParameterServer("127.0.0.1:0").start() as before:
        address[0] = before.address
        client = PsClient([("/job:ps/task:0", lambda: address[0])], STEADY)
        client.create(W, "w", value=torch.zeros(2))
    with ParameterServer("127.0.0.1:0").start() as after:
        address[0] = after.address
        with pytest.raises(ParameterServerLost, match="was restarted and has lost its variables"):
            client.versions(0)
        client.close()
        with PsClient([("/job:ps/task:0", lambda: address[0])], STEADY) as again:
            again.create(W, "w", value=torch.ones(2))
            assert value_of(again) == [1.0, 1.0]


def test_an_address_may_be_unknown_at_first(server: ParameterServer) -> None:
    """A resolver that asks another service fails until the service knows the task."""
    asked = []

    def address() -> str:
        asked.append(1)
        if len(asked) < 3:
            raise LookupError("task ps 0 is not registered")
        return server.address

    with PsClient([(server.task, address)], STEADY, connect_timeout_s=LIMIT_S) as client:
        client.create(W, "w", value=torch.ones(2))
        assert len(asked) >= 3


def test_a_task_that_is_never_found_is_named_with_the_reason() -> None:
    def address() -> str:
        raise LookupError("no such task")

    with pytest.raises(ParameterServerLost, match="/job:ps/task:0 is not known: no such task"):
        PsClient([("/job:ps/task:0", address)], STEADY, connect_timeout_s=0.2)
    with pytest.raises(ParameterServerLost, match="no such task"):
        PsClient([("/job:ps/task:0", address)], WORKER, connect_timeout_s=0.2)
