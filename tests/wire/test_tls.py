"""Encrypted connections: certificates are checked both ways, and frames of every size arrive."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from accepting import accepting

from stratagem._commands.certificates import make_certificates
from stratagem._wire import frames
from stratagem._wire.channel import Channel
from stratagem._wire.cluster_key import cluster_key
from stratagem._wire.connecting import connect, split_address
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.listener import Listener
from stratagem._wire.messages import Ping
from stratagem._wire.tls import Tls, TlsFiles, files_from_environment
from stratagem.errors import AuthenticationError, ConnectionLost, ProtocolError

LIMIT_S = 60.0
SECRET = b"the key of this cluster"


def files(directory: Path, name: str = "task") -> TlsFiles:
    return TlsFiles(
        cert=str(directory / f"{name}.pem"),
        key=str(directory / f"{name}-key.pem"),
        ca=str(directory / "ca.pem"),
    )


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    make_certificates(directory, ["task"], days=1)
    make_certificates(directory, ["late"], days=1)  # signed by the same authority, later
    return directory


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other")
    make_certificates(directory, ["task"], days=1)
    return directory


@contextmanager
def pair(server: ClusterKey, client: ClusterKey) -> Iterator[tuple[Channel, Channel]]:
    """Two ends of one connection."""
    with Listener("127.0.0.1:0", key=server) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout_s=LIMIT_S)
        with connect(listener.address, key=client, timeout_s=LIMIT_S) as near:
            far = accepted.result(LIMIT_S)
            assert far is not None
            with far:
                yield near, far


def test_frames_of_every_size_arrive_in_both_directions_at_once(ours: Path) -> None:
    """Large frames are sent while the same channel receives; small ones share records."""
    key = ClusterKey(SECRET, tls=Tls(files(ours)))
    other = ClusterKey(SECRET, tls=Tls(files(ours, "late")))
    sizes = [0, 1, 100, 16_384, 16_385, 300_000, 5_000_000, 3, 70_000, 1 << 20, 7]

    def send(channel: Channel) -> None:
        for size in sizes:
            data = bytes((size + index) % 251 for index in range(min(size, 4096)))
            data *= -(-size // len(data)) if data else 1
            channel.notify(Ping(), [memoryview(data)[:size], b"x" * 10, b""], timeout_s=LIMIT_S)

    def receive(channel: Channel) -> list[tuple[int, bytes]]:
        found = []
        for _ in sizes:
            frame = channel.receive(timeout_s=LIMIT_S)
            assert frame is not None
            data = bytes(frame.buffer(0))
            begin = bytes((len(data) + index) % 251 for index in range(min(len(data), 4096)))
            assert data == (begin * -(-len(data) // len(begin)))[: len(data)] if begin else not data
            found.append((len(data), bytes(frame.buffer(1))))
        return found

    with pair(key, other) as (near, far), ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(send, near), pool.submit(send, far)]
        results = [pool.submit(receive, near), pool.submit(receive, far)]
        for job in jobs:
            job.result(LIMIT_S)
        for result in results:
            assert result.result(LIMIT_S) == [(size, b"x" * 10) for size in sizes]


def test_frames_that_share_a_record_are_all_delivered(ours: Path) -> None:
    """Bytes that are decrypted already make no socket readable; the channel finds them anyway."""
    key = ClusterKey(SECRET, tls=Tls(files(ours)))
    with pair(key, key) as (near, far):
        for _ in range(500):
            near.enqueue(frames.NOTIFY, 0, Ping(), [b"y" * 40])
        assert near.flush()
        for _ in range(500):
            frame = far.receive(timeout_s=LIMIT_S)
            assert frame is not None
            assert bytes(frame.buffer(0)) == b"y" * 40


def test_nothing_readable_crosses_the_network(ours: Path) -> None:
    """A relay sees neither the handshake's magic nor the contents."""
    key = ClusterKey(SECRET, tls=Tls(files(ours)))
    seen = bytearray()

    def relay(from_: socket.socket, to: socket.socket) -> None:
        while data := from_.recv(1 << 16):
            seen.extend(data)
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)

    with (
        Listener("127.0.0.1:0", key=key) as listener,
        socket.create_server(("127.0.0.1", 0)) as door,
        ThreadPoolExecutor(3) as pool,
    ):
        accepted = pool.submit(listener.accept, timeout_s=LIMIT_S)
        dialled = pool.submit(
            connect, f"127.0.0.1:{door.getsockname()[1]}", key=key, timeout_s=LIMIT_S
        )
        front, _ = door.accept()
        with front, socket.create_connection(split_address(listener.address)) as back:
            threads = [
                threading.Thread(target=relay, args=ends) for ends in ((front, back), (back, front))
            ]
            for thread in threads:
                thread.start()
            with dialled.result(LIMIT_S) as near:
                far = accepted.result(LIMIT_S)
                assert far is not None
                with far:
                    near.notify(Ping(), [b"secret weights" * 100])
                    frame = far.receive(timeout_s=LIMIT_S)
                    assert frame is not None
                    assert bytes(frame.buffer(0)) == b"secret weights" * 100
            for thread in threads:
                thread.join(LIMIT_S)
    assert len(seen) > 1400
    assert b"stratgm" not in seen
    assert b"secret" not in seen


@pytest.mark.parametrize("wrong", ["server", "client"])
def test_a_certificate_of_another_authority_is_refused(
    ours: Path, theirs: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Although both sides have the right key."""
    good = ClusterKey(SECRET, tls=Tls(files(ours)))
    bad = ClusterKey(
        SECRET,
        tls=Tls(
            TlsFiles(
                cert=str(theirs / "task.pem"),
                key=str(theirs / "task-key.pem"),
                ca=str(ours / "ca.pem"),
            )
        ),
    )
    server, client = (bad, good) if wrong == "server" else (good, bad)
    with Listener("127.0.0.1:0", key=server) as listener, accepting(listener) as accepted:
        with pytest.raises(AuthenticationError, match="certificate"):
            connect(listener.address, key=client, timeout_s=LIMIT_S)
    assert accepted == []
    assert listener.refused == 1


def test_the_key_is_still_proved_inside(ours: Path) -> None:
    """A certificate of the cluster without its key opens no connection."""
    tls = Tls(files(ours))
    with Listener("127.0.0.1:0", key=ClusterKey(SECRET, tls=tls)) as listener:
        with accepting(listener) as accepted:
            with pytest.raises(AuthenticationError, match="keys differ"):
                connect(
                    listener.address,
                    key=ClusterKey(b"another key, as long", tls=tls),
                    timeout_s=LIMIT_S,
                )
            assert accepted == []


@pytest.mark.parametrize("encrypts", ["server", "client"])
def test_one_side_without_tls_is_told_what_to_set(ours: Path, encrypts: str) -> None:
    plain, secure = ClusterKey(SECRET), ClusterKey(SECRET, tls=Tls(files(ours)))
    server, client = (secure, plain) if encrypts == "server" else (plain, secure)
    with Listener("127.0.0.1:0", key=server) as listener, accepting(listener) as accepted:
        with pytest.raises((ProtocolError, ConnectionLost), match="STRATAGEM_TLS_CERT"):
            connect(listener.address, key=client, timeout_s=LIMIT_S)
        assert accepted == []


def test_files_from_the_environment(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three variables, or none."""
    assert files_from_environment() is None
    found = files(ours)
    monkeypatch.setenv("STRATAGEM_TLS_CERT", found.cert)
    monkeypatch.setenv("STRATAGEM_TLS_KEY", found.key)
    with pytest.raises(ValueError, match="STRATAGEM_TLS_CA not set"):
        files_from_environment()
    monkeypatch.setenv("STRATAGEM_TLS_CA", found.ca)
    assert files_from_environment() == found
    assert "TLS" in repr(cluster_key(SECRET.decode()))


def test_bad_files_are_refused_by_name(ours: Path, theirs: Path, tmp_path: Path) -> None:
    good = files(ours)
    with pytest.raises(ValueError, match=r"missing\.pem"):
        Tls(TlsFiles(cert="missing.pem", key=good.key, ca=good.ca))
    with pytest.raises(ValueError, match="not a certificate and its private key"):
        Tls(TlsFiles(cert=good.cert, key=files(theirs).key, ca=good.ca))
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(ValueError, match="not a certificate of an authority"):
        Tls(TlsFiles(cert=good.cert, key=good.key, ca=str(junk)))
    open_key = tmp_path / "open.pem"
    open_key.write_bytes(Path(good.key).read_bytes())
    open_key.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        Tls(TlsFiles(cert=good.cert, key=str(open_key), ca=good.ca))


def test_existing_certificates_are_not_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["task"], days=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match="Nothing was written"):
        make_certificates(tmp_path, ["task"], days=1)
    with pytest.raises(FileExistsError, match="authority"):
        make_certificates(tmp_path, ["ca"], days=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert (tmp_path / "ca-key.pem").stat().st_mode & 0o777 == 0o600
