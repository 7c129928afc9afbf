"""A worker behind a network that is unplugged: found by silence, its closure runs elsewhere.

Twice. Always: a proxy between coordinator and worker that from one moment on passes nothing, neither bytes nor
ends of connections. Where namespaces can be made (``ip netns``, needs root): a real pair of virtual cables.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scheduling import workers_up
from waiting import Gate, pass_gate, wait_until

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem._cluster.coordinator import watch_threads
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem.cluster_resolver import SimpleClusterResolver
from stratagem.config import ClusterOptions

pytestmark = pytest.mark.process

SRC = str(Path(__file__).parents[2] / "src")
KEY = "a key for the unplugged test"
SPACE = f"sg{os.getpid() % 100_000}"
HERE, THERE = "10.213.77.1", "10.213.77.2"
NOTICED_S = 5.0


class Cable:
    """Passes bytes between whoever connects and one address, until it is unplugged."""

    def __init__(self, to: str) -> None:
        host, port = to.rsplit(":", 1)
        self._to = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self.address = "{}:{}".format(*self._listening.getsockname())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._other: dict[socket.socket, socket.socket] = {}
        self._dead: list[socket.socket] = []
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="test-cable")
        self._thread.start()

    def unplug(self) -> None:
        """From now on nothing passes, and nobody is told. Who is connected stays so for ever."""
        with self._lock:
            for end in (*self._other, self._listening):
                self._selector.unregister(end)
            self._dead += self._other
            self._other.clear()

    def plug(self) -> None:
        """New connections pass again."""
        with self._lock:
            self._selector.register(self._listening, selectors.EVENT_READ)

    def close(self) -> None:
        self._ended = True
        self._thread.join(10)
        for end in (*self._other, *self._dead, self._listening):
            end.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ended:
            ready = self._selector.select(0.02)
            with self._lock:  # unplugged is unplugged: what was ready may not pass any more
                for key, _ in ready:
                    if key.fileobj is self._listening:
                        self._accept()
                    elif key.fileobj in self._other:
                        self._pass(key.fileobj)

    def _accept(self) -> None:
        try:
            near, _ = self._listening.accept()
        except BlockingIOError:  # unplugged after it was seen
            return
        far = socket.create_connection(self._to, timeout=60)
        for one, other in ((near, far), (far, near)):
            self._other[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._other[end].sendall(data)
                return
        except OSError:
            pass
        for one in (end, self._other[end]):
            self._selector.unregister(one)
            del self._other[one]
            one.close()


def where(path: str) -> int:
    """Runs on a worker, which is busy until the gate is open."""
    pass_gate(path)
    return sg.get_current_worker_index()


def check_both_work(coordinator: ClusterCoordinator, path: Path) -> None:
    """Both workers run a closure at the same time."""
    with Gate(path) as gate:
        values = [coordinator.schedule(where, args=(gate.path,)) for _ in range(2)]
        gate.wait_for_arrival(2)
        gate.open()
        assert sorted(coordinator.fetch(values)) == [0, 1]


def check_found_by_silence(log: str) -> None:
    """Worker 1 was lost, once, by its silence."""
    found = re.findall(r"(/job:worker/task:\d) is lost: no sign of life for [\d.]+ s", log)
    assert found == ["/job:worker/task:1"]
    assert log.count(" is lost: ") == 1


def test_the_usual_limit_is_noticed_in_time() -> None:
    """Issue 4, section 4: missed heartbeats in at most 5 s, the look itself included."""
    assert ClusterOptions().heartbeat_limit_s + 5 * watch_threads.TICK_S <= NOTICED_S


@pytest.mark.slow
def test_worker_behind_a_dead_cable_is_found_by_its_silence_and_taken_back(
    cluster: LocalCluster,
    connect: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Issue 4, section 4: no FIN, no RST, nothing; noticed by missed heartbeats, run elsewhere."""
    near, far = cluster.cluster_spec.as_dict()["worker"]
    cable = Cable(far)
    try:

        class Cabled:
            resolver = SimpleClusterResolver(
                ClusterSpec({"worker": [near, cable.address]}), cluster_key=cluster._key
            )

        coordinator: ClusterCoordinator = connect(
            Cabled,
            heartbeat_limit_s=4.0,
            partition_limit_s=4.0,  # its process is on this host, where it runs
        )
        assert workers_up(coordinator) == 2
        check_both_work(coordinator, tmp_path / "first")
        with Gate(tmp_path / "unplugged") as gate:
            values = [coordinator.schedule(where, args=(gate.path,)) for _ in range(6)]
            gate.wait_for_arrival(2)
            cable.unplug()
            gate.open()
            coordinator.join(timeout_s=120)
            assert coordinator.fetch(values) == [0] * 6
        assert not coordinator.workers[1].connected
        check_found_by_silence(caplog.text)
        assert [worker.incarnation for worker in coordinator.workers] == [1, 1]
        cable.plug()
        wait_until(lambda: workers_up(coordinator) == 2)
        check_both_work(coordinator, tmp_path / "last")
        assert coordinator.workers[1].incarnation > 1
        coordinator.close()
    finally:
        cable.close()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


def can_make_networks() -> bool:
    """Whether this machine lets us make namespaces and cables."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    try:
        ip("netns", "add", f"{SPACE}t")
        ip("netns", "delete", f"{SPACE}t")
        ip("link", "add", f"{SPACE}x", "type", "veth", "peer", "name", f"{SPACE}y")
        ip("link", "delete", f"{SPACE}x")
    except (subprocess.CalledProcessError, OSError):
        return False
    return True


if can_make_networks():

    @pytest.fixture
    def cable() -> Iterator[str]:
        """A namespace reachable at THERE over a cable whose name is given."""
        ip("netns", "add", SPACE)
        try:
            ip("link", "add", f"{SPACE}a", "type", "veth", "peer", "name", f"{SPACE}b")
            ip("link", "set", f"{SPACE}b", "netns", SPACE)
            ip("addr", "add", f"{HERE}/24", "dev", f"{SPACE}a")
            ip("link", "set", f"{SPACE}a", "up")
            ip("-n", SPACE, "addr", "add", f"{THERE}/24", "dev", f"{SPACE}b")
            ip("-n", SPACE, "link", "set", f"{SPACE}b", "up")
            ip("-n", SPACE, "link", "set", "lo", "up")
            yield f"{SPACE}a"
        finally:
            ip("netns", "delete", SPACE)

    def spin(until_s: float, mark: str) -> int:
        """Runs on a worker: the far one computes on and on, though nobody will ever hear of it."""
        time = __import__("time")
        index = sg.get_current_worker_index()
        if index == 1:
            open(mark, "a").close()
        deadline = time.monotonic() + (until_s if index == 1 else 0.0)
        while time.monotonic() < deadline:
            pass
        return index

    @pytest.mark.slow
    def test_unplugged_worker_is_found_by_its_silence(
        cable: str,
        connect: Callable[..., Any],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        tmp_path: Path,
    ) -> None:
        """Issue 4, section 4: busy or not; the kernel says that nothing arrives there any more."""
        monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", KEY)
        spec = {"worker": ["127.0.0.1:0", f"{THERE}:7001"]}
        far = subprocess.Popen(
            [
                *("ip", "netns", "exec", SPACE, sys.executable, "-c"),
                f"import stratagem as sg; sg.Server({spec!r}, 'worker', 1).join()",
            ],
            env={**os.environ, "PYTHONPATH": SRC},
        )
        try:
            with sg.Server(spec, "worker", 0) as near:

                class Cluster:
                    resolver = SimpleClusterResolver(
                        ClusterSpec({"worker": [near.address, f"{THERE}:7001"]})
                    )

                coordinator = connect(Cluster, heartbeat_limit_s=4.0, connect_timeout_s=120.0)
                assert workers_up(coordinator) == 2
                check_both_work(coordinator, tmp_path / "both")
                # The near worker is quick, and may run many before the far one has its first.
                values, mark = [], tmp_path / "far"
                while not mark.exists():
                    values.append(coordinator.schedule(spin, args=(40.0, str(mark))))
                ip("link", "set", cable, "down")
                coordinator.join(timeout_s=120)
                assert coordinator.fetch(values) == [0] * len(values)
                assert not coordinator.workers[1].connected
                check_found_by_silence(caplog.text)
                assert "nothing sent to it arrives" in caplog.text
        finally:
            far.kill()
            far.wait(10)
