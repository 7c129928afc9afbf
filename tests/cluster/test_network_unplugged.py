"""A worker behind a network that is unplugged: found by silence, its closure runs elsewhere.

Uses a network namespace joined to this one by a pair of virtual cables (``ip netns``, needs root).
Where that is not allowed the same silence is made by SIGSTOP in `test_worker_loss.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem._cluster.spec import ClusterSpec
from stratagem.cluster_resolver import SimpleClusterResolver

SRC = str(Path(__file__).parents[2] / "src")
KEY = "a key for the unplugged test"
SPACE = f"sg{os.getpid() % 100_000}"
HERE, THERE = "10.213.77.1", "10.213.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


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

    def test_unplugged_worker_is_found_by_its_silence(
        cable: str, connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Issue 4, section 4: no FIN, no RST, nothing; noticed within the limit."""
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

                coordinator = connect(Cluster, heartbeat_limit_s=3.0)
                assert coordinator._engine.queue.workers_up() == 2

                def where() -> int:
                    __import__("time").sleep(0.2)
                    return sg.get_current_worker_index()

                values = [coordinator.schedule(where) for _ in range(6)]
                assert set(coordinator.fetch(values)) == {0, 1}
                values = [coordinator.schedule(where) for _ in range(6)]
                ip("link", "set", cable, "down")
                coordinator.join(timeout_s=30)
                assert len(coordinator.fetch(values)) == 6
                assert "no sign of life" in str(coordinator._engine.links[1].last_error) or (
                    not coordinator._engine.queue.is_up(1)
                )
        finally:
            far.kill()
            far.wait(10)
