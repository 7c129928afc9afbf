"""The listening side: strangers are refused with a logged reason, and disturb nobody."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from accepting import accepting

from stratagem._wire import listener as listener_module
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClientHandshake, ClusterKey
from stratagem._wire.listener import PENDING_LIMIT, Listener, is_loopback
from stratagem._wire.messages import Ping
from stratagem.errors import AuthenticationError, ConnectionLost, ProtocolError

LIMIT_S = 120.0
KEY = ClusterKey(b"the key of this cluster")
OTHER = ClusterKey(b"the key of another cluster")


def raw_connection(listener: Listener) -> socket.socket:
    host, port = listener.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def read_to_end(sock: socket.socket) -> bytes:
    """Everything until the other side hangs up."""
    data = b""
    try:
        while part := sock.recv(1000):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_same_key_gets_in() -> None:
    """And is counted."""
    with Listener("127.0.0.1:0", key=KEY) as listener, accepting(listener) as accepted:
        connect(listener.address, key=KEY, timeout_s=LIMIT_S).close()
        while not accepted:
            select.select([], [], [], 0.001)
        assert (listener.accepted, listener.refused) == (1, 0)


@pytest.mark.parametrize("key", [OTHER, None], ids=["another key", "no key"])
def test_wrong_key_is_refused_and_logged(
    key: ClusterKey | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets AuthenticationError; the log of the server has its address and the reason."""
    with Listener("127.0.0.1:0", key=KEY) as listener, accepting(listener) as accepted:
        with caplog.at_level(logging.WARNING, "stratagem.wire"):
            with pytest.raises(AuthenticationError, match="cluster key"):
                connect(listener.address, key=key, timeout_s=LIMIT_S)
        assert accepted == []
    assert "refused 127.0.0.1" in caplog.text
    assert "key" in caplog.text


def test_other_version_is_refused_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """On both sides."""
    with Listener("127.0.0.1:0", key=KEY, version=7) as listener, accepting(listener) as accepted:
        with pytest.raises(ProtocolError, match="version 7, this process speaks 3"):
            connect(listener.address, key=KEY, timeout_s=LIMIT_S)
        assert accepted == []
    assert "version 3, this process speaks 7" in caplog.text


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n" * 10, bytes(200), b"\xff" * 48])
def test_garbage_is_refused_without_an_answer(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A scanner learns nothing; the log shows what it sent."""
    with Listener("127.0.0.1:0", key=KEY) as listener, accepting(listener) as accepted:
        with raw_connection(listener) as sock:
            sock.sendall(garbage)
            assert read_to_end(sock) == b""
        assert accepted == []
    assert "does not speak this protocol" in caplog.text


@pytest.mark.slow
def test_half_open_connections_are_closed_and_delay_no_other_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Silent, half-greeting and half-proving peers wait beside honest ones, then are cut."""
    monkeypatch.setenv("STRATAGEM_PARTITION_LIMIT_S", "4")
    with Listener("127.0.0.1:0", key=KEY) as listener, accepting(listener) as accepted:
        opening = ClientHandshake(KEY, who="s").opening()
        with raw_connection(listener) as silent, raw_connection(listener) as half:
            with raw_connection(listener) as unproved:
                half.sendall(opening[:10])
                unproved.sendall(opening)
                connect(listener.address, key=KEY, timeout_s=LIMIT_S).close()
                assert read_to_end(silent) == b""
                assert read_to_end(half) == b""
                assert len(read_to_end(unproved)) == 48
        connect(listener.address, key=KEY, timeout_s=LIMIT_S).close()
        while len(accepted) < 2:
            select.select([], [], [], 0.001)
        assert listener.refused == 3
    assert "did not prove the cluster key within 4 s" in caplog.text


def test_a_thousand_refused_connections_are_two_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The first is logged at once, the others together: a port scan does not fill the disk."""
    with Listener("127.0.0.1:0", key=KEY) as listener, accepting(listener):
        for _ in range(1000):
            with raw_connection(listener) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n" * 3)
                assert read_to_end(sock) == b""
        assert listener.refused == 1000
    lines = [one.getMessage() for one in caplog.records if "refused 127.0.0.1" in one.getMessage()]
    assert 1 <= len(lines) <= 20  # a loaded machine needs more than one interval
    counts = [
        int(line.partition(" others")[0].rpartition("(")[2]) for line in lines if "others" in line
    ]
    assert sum(counts) + len(lines) == 1000
    assert all("does not speak this protocol" in line for line in lines)


def test_a_flood_of_silent_connections_blocks_no_client() -> None:
    """The oldest silent ones make room; an honest client still gets in."""
    with Listener("127.0.0.1:0", key=KEY) as listener, accepting(listener) as accepted:
        flood = [raw_connection(listener) for _ in range(PENDING_LIMIT + 40)]
        try:
            connect(listener.address, key=KEY, timeout_s=LIMIT_S).close()
            while not accepted:
                select.select([], [], [], 0.001)
            assert listener.refused >= 40
            assert len(listener._pending) <= PENDING_LIMIT
        finally:
            for sock in flood:
                sock.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "", "[::]"])
def test_listening_beyond_loopback_needs_a_key(host: str) -> None:
    """Refused with the reason and the way out."""
    with pytest.raises(PermissionError, match="STRATAGEM_CLUSTER_KEY"):
        Listener(f"{host}:0")


def test_listening_beyond_loopback_with_a_key_is_allowed() -> None:
    """The key is what was missing."""
    with Listener("0.0.0.0:0", key=KEY) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout_s=LIMIT_S)
        port = listener.address.rsplit(":", 1)[1]
        with connect(f"127.0.0.1:{port}", key=KEY, timeout_s=LIMIT_S) as client:
            server = accepted.result(LIMIT_S)
            assert server is not None
            with server:
                client.notify(Ping())
                assert server.receive(timeout_s=LIMIT_S) is not None


def test_loopback_is_judged_by_address_not_by_name() -> None:
    """localhost and 127/8 are; unknown names and wildcards are not."""
    assert is_loopback("localhost")
    assert is_loopback("127.3.2.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("no-such-host.invalid")


def test_a_port_in_use_is_an_error_of_the_system() -> None:
    """Two listeners on one port."""
    with Listener("127.0.0.1:0") as listener, pytest.raises(OSError, match="in use"):
        Listener(listener.address)


def test_repr_counts() -> None:
    """State at a glance, for the log."""
    with Listener("127.0.0.1:0") as listener:
        assert "0 in the handshake, 0 accepted, 0 refused" in repr(listener)
    listener.close()
    assert "closed" in repr(listener)


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Takes every descriptor this process may have, after lowering how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 16, hard))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_it_pauses_instead_of_spinning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An event loop is not woken for a connection that cannot be taken; later it is taken."""
    monkeypatch.setattr(listener_module, "PAUSE_S", 3600.0)
    with Listener("127.0.0.1:0", key=KEY) as listener:
        with raw_connection(listener) as waiting:
            with no_descriptors_left():
                assert select.select([listener], [], [], LIMIT_S)[0]
                assert listener.progress() == []
                assert not select.select([listener], [], [], 0.0)[0]
                for _ in range(3):  # tried again: still no room, and no second line in the log
                    listener._paused_until = 0.0
                    assert listener.progress() == []
                    assert listener._paused_until > time.monotonic()
            assert caplog.text.count("accepts no more connections") == 1
            assert "ulimit -n" in caplog.text
            listener._paused_until = 0.0
            listener.progress()
            assert "1 in the handshake" in repr(listener)
            waiting.close()


def test_connecting_without_descriptors_says_so() -> None:
    """The error names the limit and the way out, not only the address."""
    with Listener("127.0.0.1:0", key=KEY) as listener, no_descriptors_left():
        with pytest.raises(
            ConnectionLost, match=r"no file descriptor left \(limit \d+\).*ulimit -n"
        ):
            connect(listener.address, key=KEY, timeout_s=LIMIT_S)
