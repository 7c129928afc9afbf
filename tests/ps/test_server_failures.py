"""Sessions, connections and servers that end or break: nothing is lost silently, nothing counts twice."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
import torch
from one_server import CHIEF, STEADY, WORKER, W, add_one, listed, stop
from server_probe import stats
from waiting import wait_until
from warm_start import Program

import stratagem as sg
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.server.loop import ParameterServer
from stratagem._wire.handshake import ClusterKey
from stratagem.config import ClusterOptions
from stratagem.errors import NotFoundError, ParameterServerLost

LIMIT_S = 120.0


# Sessions.


def test_the_end_of_a_session_frees_its_variables(server: ParameterServer) -> None:
    """And the same server serves the next strategy."""
    for _ in range(2):
        with PsClient(listed(server), CHIEF) as chief:
            chief.create(W, "w", value=torch.ones(2))
            assert server.session_count == 1
        wait_until(lambda: server.session_count == 0)
    with pytest.raises(NotFoundError, match="session 's' is not open"):
        PsClient(listed(server), WORKER)


def test_a_coordinator_gone_for_longer_than_its_lease_ends_the_session(
    server: ParameterServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its workers are told; the log says why."""
    chief = PsClient(listed(server), CHIEF)
    chief.create(W, "w", value=torch.ones(2))
    with PsClient(listed(server), WORKER, incarnation=1) as worker:
        with caplog.at_level(logging.INFO, "stratagem.ps"):
            chief._disconnect()  # as if it were killed: no goodbye
            wait_until(lambda: "its coordinator has been gone for 0.2 s" in caplog.text)
        wait_until(lambda: server.session_count == 0)
        with pytest.raises(NotFoundError, match="joined no session"):
            worker.versions(0)


def test_a_coordinator_back_within_its_lease_finds_its_variables(server: ParameterServer) -> None:
    """A lease is there to be taken up again."""
    patient = Membership(session="s", task="/job:chief/task:0", is_owner=True, lease_s=60.0)
    first = PsClient(listed(server), patient)
    first.create(W, "w", value=torch.ones(2))
    first._disconnect()
    with PsClient(listed(server), patient) as second:
        assert second.read([W])[0][0].tolist() == [1.0, 1.0]
        add_one(second)
        assert second.wait_for_writes() == {(0, 1): 2}


def test_sessions_do_not_see_each_other(server: ParameterServer) -> None:
    """The same variable number in two strategies is two variables."""
    other = Membership(session="t", task="/job:chief/task:0", is_owner=True)
    with PsClient(listed(server), CHIEF) as one, PsClient(listed(server), other) as two:
        one.create(W, "w", value=torch.ones(2))
        two.create(W, "w", value=torch.zeros(2))
        add_one(one)
        assert one.read([W])[0][0].tolist() == [2.0, 2.0]
        assert two.read([W])[0][0].tolist() == [0.0, 0.0]


# Broken connections.


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "bytes"])
def test_writes_are_repeated_after_a_broken_connection_and_count_once(
    server: ParameterServer, shared: bool
) -> None:
    """The connection breaks after the server applied the writes, before it was heard."""
    with PsClient(listed(server), STEADY, shared_memory=shared) as client:
        client.create(W, "w", value=torch.zeros(2))
        for round_number in range(1, 4):
            before = client.outbox.duplicates
            for _ in range(3):
                add_one(client)
            wait_until(lambda n=round_number: server.facts["applied"] == 1 + 3 * n)  # type: ignore[misc]
            channel = client._connections[0]._channel
            assert channel is not None
            assert channel._stream.sock.recv(1 << 16)  # the acknowledgements came, and are lost
            channel._stream.sock.shutdown(socket.SHUT_RDWR)
            client.wait_for_writes()
            # The last acknowledgement may have come after the others were read.
            assert before < client.outbox.duplicates <= before + 3
            assert client.read([W])[0][0].tolist() == [3.0 * round_number] * 2
        assert server.facts["applied"] == 10


def test_a_connection_broken_between_steps_is_mended(server: ParameterServer) -> None:
    """Nothing outstanding: the next request finds out and connects again."""
    with PsClient(listed(server), STEADY) as client:
        client.create(W, "w", value=torch.zeros(2))
        channel = client._connections[0]._channel
        assert channel is not None
        channel._stream.sock.shutdown(socket.SHUT_RDWR)
        add_one(client)
        client.wait_for_writes()
        assert client.read([W])[0][0].tolist() == [1.0, 1.0]


def test_a_server_come_back_empty_is_lost(server: ParameterServer) -> None:
    """Another life on the same address has none of the variables: that must not pass unnoticed."""
    client = PsClient(listed(server), STEADY)
    try:
        client.create(W, "w", value=torch.zeros(2))
        server.close()
        with ParameterServer(server.address, task=server.task).start():
            with pytest.raises(ParameterServerLost, match="was restarted") as caught:
                client.versions(0)
            assert caught.value.variables == ("w",)
            assert caught.value.identity == server.life
    finally:
        client.close()


@contextmanager
def other_key(address: str) -> Iterator[None]:
    with ParameterServer(address, key=ClusterKey.random()).start():
        yield


@contextmanager
def worker(address: str) -> Iterator[None]:
    with sg.Server({"worker": [address]}):
        yield


@pytest.mark.parametrize("somebody", [other_key, worker])
def test_a_server_is_lost_if_another_process_has_its_address(
    server: ParameterServer, somebody: Callable[[str], AbstractContextManager[None]]
) -> None:
    """FLT-10: they answer, and refuse; to whoever asks for a variable, or watches."""
    with ExitStack() as stack:
        asking, watching = (stack.enter_context(PsClient(listed(server), STEADY)) for _ in range(2))
        asking.create(W, "w", value=torch.zeros(2))
        server.close()
        with somebody(server.address):
            with pytest.raises(ParameterServerLost) as caught:
                asking.versions(0)
            assert caught.value.variables == ("w",)
            with pytest.raises(ParameterServerLost):
                wait_until(lambda: watching.check_servers(ClusterOptions()))


@pytest.mark.process
def test_a_killed_server_is_lost_with_its_variables_named(
    server_process: tuple[subprocess.Popen[str], str],
) -> None:
    """While a request is outstanding; never a hang. What was mapped can still be looked at."""
    child, address = server_process
    with PsClient([("/job:ps/task:0", address)], CHIEF) as client:
        client.create(W, "layer/weight", value=torch.ones(2))
        (mapped,) = client.map([W])
        assert mapped is not None
        assert mapped.tensor.tolist() == [1.0, 1.0]
        stop(child.pid)
        add_one(client)
        killer = threading.Timer(0.1, child.kill)
        killer.start()
        with pytest.raises(ParameterServerLost, match="layer/weight") as caught:
            client.wait_for_writes()
        killer.join()
        assert caught.value.task == "/job:ps/task:0"
        assert "restore the last checkpoint" in str(caught.value)
        with pytest.raises(ParameterServerLost):
            wait_until(lambda: client.check_servers(ClusterOptions()))
        assert mapped.tensor.tolist() == [1.0, 1.0]
        del mapped


@pytest.mark.process
def test_a_missing_server_is_reported_as_lost(
    server_process: tuple[subprocess.Popen[str], str],
) -> None:
    """Refused at once: no word of a limit that nobody waited for."""
    child, address = server_process
    with PsClient([("/job:ps/task:0", address)], CHIEF) as client:
        client.create(W, "w", value=torch.ones(2))
        child.kill()
        child.wait(LIMIT_S)
        with pytest.raises(ParameterServerLost, match=r"is gone: .*refused") as caught:
            wait_until(lambda: client.check_servers(ClusterOptions()))
        assert "within" not in str(caught.value)
        assert caught.value.variables == ("w",)


@pytest.mark.process
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "bytes"])
@pytest.mark.parametrize("applied", [True, False], ids=["applied before", "applied after"])
def test_writes_stay_unacknowledged_when_ctrl_c_ends_the_wait(
    server_process: tuple[subprocess.Popen[str], str], shared: bool, applied: bool
) -> None:
    """Their slots are not filled anew while the server may read them; each counts once."""
    child, address = server_process
    with PsClient([("/job:ps/task:0", address)], STEADY, shared_memory=shared) as client:
        client.create(W, "w", value=torch.zeros(2))
        link = client._connections[0]
        if applied:  # the server's answers are on their way, but not yet read
            for _ in range(3):
                add_one(client)
            wait_until(lambda: stats(client)["applied"] == 4)
            channel = link._channel
            assert channel is not None
            assert channel._stream.sock.recv(1 << 16)  # read by nobody who could note them
        else:
            stop(child.pid)
            for _ in range(3):
                add_one(client)

        def ctrl_c() -> None:
            wait_until(lambda: link._channel is not None and link._channel._has_reader)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=ctrl_c, name="test-ctrl-c")
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.wait_for_writes()
        thread.join(LIMIT_S)
        assert not client.outbox.is_idle
        batch = client.batch()
        batch.assign(0, 1, "add", torch.full((2,), 10.0))
        if not applied:
            batch.copy_in()  # before the server reads anything: slots used again would show
            os.kill(child.pid, signal.SIGCONT)
        client.send(batch)
        assert client.wait_for_writes() == {(0, 1): 5}
        assert client.outbox.is_idle
        assert client.read([W])[0][0].tolist() == [13.0, 13.0]


@pytest.mark.process
def test_ctrl_c_at_any_instant_loses_no_write_and_repeats_none(
    server_process: tuple[subprocess.Popen[str], str],
) -> None:
    """Hundreds of interruptions, wherever they strike in the wait."""
    _, address = server_process
    draw, armed, struck = random.Random(11), threading.Event(), []
    main = threading.main_thread().ident
    assert main is not None

    def strike(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            struck.append(1)
            raise KeyboardInterrupt

    def disturb() -> None:
        while not ended.wait(draw.random() * 0.002):
            signal.pthread_kill(main, signal.SIGUSR1)

    ended = threading.Event()
    before = signal.signal(signal.SIGUSR1, strike)
    thread = threading.Thread(target=disturb, name="test-disturb")
    try:
        with PsClient([("/job:ps/task:0", address)], STEADY) as client:
            client.create(W, "w", value=torch.zeros(2))
            thread.start()
            rounds = 0
            while len(struck) < 200:
                rounds += 1
                assert rounds < 100_000
                add_one(client)
                try:
                    try:
                        armed.set()
                        client.wait_for_writes()
                    finally:
                        armed.clear()
                except KeyboardInterrupt:  # also one that strikes before `clear`
                    pass
            client.wait_for_writes()
            assert client.read([W])[0][0].tolist() == [float(rounds)] * 2
            assert client.versions(0) == {1: rounds + 1}
    finally:
        ended.set()
        thread.join(LIMIT_S)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.process
def test_a_lost_server_ends_the_wait_for_a_reply(
    server_process: tuple[subprocess.Popen[str], str],
) -> None:
    """A request waits for a stopped server; the checks of another thread find out, long before."""
    child, address = server_process
    with PsClient([("/job:ps/task:0", address)], CHIEF) as client, ThreadPoolExecutor(1) as pool:
        client.create(W, "w", value=torch.ones(2))
        stop(child.pid)
        add_one(client)
        waiting = pool.submit(client.wait_for_writes)
        options = ClusterOptions(heartbeat_s=0.05, heartbeat_limit_s=0.2)
        with pytest.raises(ParameterServerLost):
            wait_until(lambda: client.check_servers(options))
        with pytest.raises(ParameterServerLost, match=r"has not answered for"):
            waiting.result(LIMIT_S)


@pytest.mark.process
def test_a_worker_killed_leaves_server_and_others_unharmed(
    server_process: tuple[subprocess.Popen[str], str],
) -> None:
    """A real worker process, killed while it pushes as fast as it can."""
    _, address = server_process
    pusher = (
        "import torch, sys\n"
        "from stratagem._ps.client.ps_client import PsClient\n"
        "from stratagem._ps.client.server_connection import Membership\n"
        "who = Membership(session='s', task='/job:worker/task:0')\n"
        f"client = PsClient([('/job:ps/task:0', {address!r})], who, incarnation=1)\n"
        "while True:\n"
        "    batch = client.batch()\n"
        "    batch.assign(0, 1, 'add', torch.ones(2))\n"
        "    client.send(batch)\n"
        "    client.wait_for_writes()\n"
    )
    with PsClient([("/job:ps/task:0", address)], CHIEF) as chief:
        chief.create(W, "w", value=torch.zeros(2))
        worker = Program([sys.executable, "-c", pusher])
        try:
            wait_until(lambda: chief.versions(0)[1] > 50)
        finally:
            worker.kill()
            worker.wait(LIMIT_S)
        chief.fence("/job:worker/task:0", 1)
        value, version = chief.read([W])[0]
        assert value.tolist() == [version - 1.0] * 2  # every write whole, none half
        add_one(chief)
        assert chief.wait_for_writes() == {(0, 1): version + 1}
