"""Descriptors and memory run out: who is in is served, the others wait or are told, nothing ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from server_probe import ping
from waiting import wait_until

from stratagem._ps.client.mapping import ShardLocation
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership
from stratagem._wire import frames, messages
from stratagem._wire.channel import Channel
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClusterKey
from stratagem.config import ClusterOptions

pytestmark = pytest.mark.process

LIMIT_S = 120.0
CHIEF = Membership(session="s", task="/job:chief/task:0", is_owner=True)
W = ShardLocation(0, 1, (2,), torch.float32)

# A server, or a worker, that may have few descriptors, or little memory beyond what it has now.
TASK = """
import resource, sys, threading
import stratagem._ps.server.shard_optimizer
from stratagem._cluster.worker.worker import Worker
from stratagem._ps.server.loop import ParameterServer
from stratagem._wire.handshake import ClusterKey
kind, files, spare = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if kind == "worker":
    task = Worker("127.0.0.1:0", index=0, key=ClusterKey.from_text("the key of this test"))
else:
    task = ParameterServer("127.0.0.1:0", task="/job:ps/task:0")
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if spare:
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(task.address, flush=True)
task.serve()
"""


class Task:
    """One of them, in a process of its own; what it logs goes to a file."""

    def __init__(self, log: Path, kind: str, *, files: int = 0, spare_bytes: int = 0) -> None:
        self._log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", TASK, kind, str(files), str(spare_bytes)],
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def complaints(self) -> int:
        return self._log.read_text().count("accepts no more connections")

    def log(self) -> str:
        return self._log.read_text()

    def stranger(self) -> socket.socket:
        host, port = self.address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=LIMIT_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Task]]:
    started: list[Task] = []

    def make(kind: str, **limits: int) -> Task:
        started.append(Task(tmp_path / f"{len(started)}.log", kind, **limits))
        return started[-1]

    try:
        yield make
    finally:
        for task in started:
            task.process.kill()
            task.process.communicate(timeout=LIMIT_S)


FILES = 40


@pytest.mark.slow
def test_a_server_without_descriptors_serves_open_connections(
    start: Callable[..., Task],
) -> None:
    """The log says so once in a while, with the remedy; a spinning server would say it for ever."""
    server = start("ps", files=FILES)
    with PsClient([("/job:ps/task:0", server.address)], CHIEF) as client:
        client.create(W, "w", value=torch.ones(2))
        client.await_servers(ClusterOptions())
        began = time.monotonic()
        strangers = [server.stranger() for _ in range(2 * FILES)]
        try:
            wait_until(server.complaints)
            for _ in range(1000):
                batch = client.batch()
                batch.assign(0, 1, "add", torch.ones(2))
                client.send(batch)
                client.wait_for_writes()
                client.check_servers(ClusterOptions())
            client.await_servers(ClusterOptions())
            client.check_servers(ClusterOptions())
            assert client.read([W])[0][0].tolist() == [1001.0, 1001.0]
            assert 1 <= server.complaints() <= 1 + (time.monotonic() - began) // 5.0
            assert "ulimit -n, now 40" in server.log()
        finally:
            for one in strangers:
                one.close()
        other = Membership(session="t", task="/job:chief/task:0", is_owner=True)
        with PsClient([("/job:ps/task:0", server.address)], other) as late:
            assert ping(late) is not None
    assert server.process.poll() is None


@pytest.mark.slow
def test_a_worker_without_descriptors_takes_in_its_coordinator_later(
    start: Callable[..., Task],
) -> None:
    """The other listening socket."""
    worker = start("worker", files=FILES)
    began = time.monotonic()
    strangers = [worker.stranger() for _ in range(2 * FILES)]
    try:
        wait_until(worker.complaints)
    finally:
        for one in strangers:
            one.close()
    key = ClusterKey.from_text("the key of this test")
    with connect(worker.address, key=key, timeout_s=LIMIT_S) as channel:
        stats = channel.request(messages.AskStats(), timeout_s=LIMIT_S).message
    assert isinstance(stats, messages.Stats)
    assert stats.facts["task"] == "/job:worker/task:0"
    assert 1 <= worker.complaints() <= 1 + (time.monotonic() - began) // 5.0


def joined(server: Task, session: str) -> Channel:
    channel = connect(server.address, timeout_s=LIMIT_S)
    try:
        channel.request(messages.Hello(task="big"), timeout_s=LIMIT_S)
        channel.request(messages.JoinSession(session=session), timeout_s=LIMIT_S)
    except BaseException:
        channel.close()
        raise
    return channel


def test_a_server_without_memory_for_a_message_says_so_and_goes_on(
    start: Callable[..., Task],
) -> None:
    """The sender gets MemoryError on a connection that still works; nothing was written."""
    spare, size = 256 << 20, 512 << 20
    server = start("ps", spare_bytes=spare)
    with PsClient([("/job:ps/task:0", server.address)], CHIEF) as client:
        client.create(W, "w", value=torch.ones(2))
        with joined(server, "s") as channel:
            large = messages.Write(
                origin=messages.WriteId("big", 1, 1),
                operations=messages.encode_operations(
                    (messages.Assign(1, "add", messages.TensorRef("uint8", (size,), 0)),)
                ),
            )
            for _ in range(2):  # and again: what came before is thrown away whole
                with pytest.raises(MemoryError, match=f"no memory is left for the {size} bytes"):
                    channel.request(large, [bytes(size)], timeout_s=LIMIT_S)
            small = messages.Write(
                origin=messages.WriteId("big", 1, 2),
                operations=messages.encode_operations(
                    (messages.Assign(1, "add", messages.TensorRef("float32", (2,), 0)),)
                ),
            )
            written = channel.request(small, [torch.ones(2).numpy().data], timeout_s=LIMIT_S)
            assert written.message == messages.Written(versions={1: 2})
        assert client.read([W])[0][0].tolist() == [2.0, 2.0]
    assert server.process.poll() is None


@pytest.mark.slow
def test_connections_that_would_exhaust_memory_are_refused(
    start: Callable[..., Task],
) -> None:
    """Hundreds of half-sent messages of 16 MB each: some are hung up on, with the reason logged."""
    server = start("ps", spare_bytes=256 << 20)
    head = frames.PREFIX.pack(frames.MAGIC, frames.REQUEST, 0, 1, 1 << 24, 0)
    with PsClient([("/job:ps/task:0", server.address)], CHIEF) as client:
        client.create(W, "w", value=torch.ones(2))
        eaters: list[Channel] = []
        refused = 0
        try:
            while refused < 3:
                assert len(eaters) < 200
                try:
                    eaters.append(joined(server, "s"))
                    eaters[-1]._stream.sock.sendall(head)
                except OSError:  # ConnectionLost is one
                    refused += 1
                for one in list(eaters):
                    try:
                        one._stream.sock.send(
                            b"x"
                        )  # with more to read the server makes room for all
                        one.receive(timeout_s=0.0)
                    except OSError:
                        refused += 1
                        eaters.remove(one)
                        one.close()
            wait_until(lambda: "no memory is left" in server.log())
            assert client.versions(0) == {1: 1}
        finally:
            for one in eaters:
                one.close()
        assert client.read([W])[0][0].tolist() == [1.0, 1.0]
        with joined(server, "s") as channel:
            assert channel.request(messages.Ping(), timeout_s=LIMIT_S) is not None
    assert server.process.poll() is None
