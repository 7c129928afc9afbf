"""A real Ray with several nodes, simulated on this machine; nodes can be removed and added.

One Ray serves all tests of a module: it takes ten seconds to start. Its files are in a directory of their own with a
short path, because the paths of Ray's sockets have at most 107 characters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import police
from waiting import wait_until

# A lost node is noticed in 2 s instead of 14.
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}

_STORE_BYTES = 100 << 20  # of each node's object store


# No report to Ray's makers, and no token in the home directory. With "0", processes without GPUs keep the devices that they see, the coming default.
_SET = {
    "RAY_TMPDIR": "",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_SET_BY_RAY = ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE")  # and left so after its shutdown


class RayNodes:
    """Nodes of one Ray. The head has the resource "head", every other node "late"."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: int = 4, **options: Any) -> Any:
        """Add a node and wait until it is alive."""
        return self._cluster.add_node(
            num_cpus=cpus, object_store_memory=_STORE_BYTES, resources={"late": 100}, **options
        )

    def remove(self, node: Any) -> None:
        """Kill a node's processes, like a machine that fails."""
        self._cluster.remove_node(node, allow_graceful=False)


def _users_of(directory: str) -> list[int]:
    """Return the processes whose command line names a directory."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if directory.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
    return found


def _start_head(make: Any, arguments: dict[str, Any]) -> Any:
    """Start the head; once more if it failed: two Rays that start at a time may choose the same port."""
    before = police._children()
    try:
        return make(initialize_head=True, head_node_args=dict(arguments))
    except (SystemExit, Exception):
        for pid, _ in police._children() - before:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return make(initialize_head=True, head_node_args=dict(arguments))


@contextmanager
def ray_nodes(cpus: int = 4) -> Iterator[RayNodes]:
    """Start a Ray with a head only, and connect this process to it."""
    directory = tempfile.mkdtemp(prefix="sgray", dir="/tmp")
    before = {name: os.environ.get(name) for name in (*_SET, *_SET_BY_RAY)}
    police.uncounted_kinds.update(("socket", "anon_inode"))
    os.environ.update({**_SET, "RAY_TMPDIR": directory})
    try:
        import ray
        from ray.cluster_utils import Cluster

        head = {
            "num_cpus": cpus,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "resources": {"head": 100},
            "memory": 64 << 30,  # a number that Ray counts with; no process needs it
            "_system_config": QUICK,
        }
        cluster = _start_head(Cluster, head)
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            yield RayNodes(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # Ray's processes create directories for their logs again while they end.
        wait_until(lambda: not _users_of(directory))
        shutil.rmtree(directory)
