"""Settings of a process that runs one task: the name that `top` and `ps` show, and torch's threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from stratagem import config
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._wire.connecting import split_address
from stratagem._wire.listener import is_loopback

_NAME_LIMIT = 15  # bytes of a process name in Linux


def name_process(name: str, *, forked: bool = False) -> None:
    """Set the name of this process, which `top` and ``ps -o comm`` show. Does nothing outside Linux.

    A forked process has the command line of the fork server; it gets the name instead, for ``ps -f`` and `pgrep`.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:_NAME_LIMIT])
        if forked:
            facts = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            start, end = int(facts[45]), int(facts[46])  # arg_start, arg_end: proc(5)
            if 0 < start < end:
                shown = f"stratagem: {name}".encode()[: end - start - 1]
                ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def threads_of_task(spec: ClusterSpec, job: str, index: int) -> int | None:
    """Return how many torch threads a task should use: its share of the cores of its host.

    None if the user has decided with ``OMP_NUM_THREADS``.

    Example:
        >>> spec = ClusterSpec({"worker": ["a:1", "a:2"], "ps": ["a:3", "b:1"]})
        >>> cores = len(os.sched_getaffinity(0))
        >>> threads_of_task(spec, "worker", 0) == max(1, cores // 3)
        True
    """
    if config.environment("OMP_NUM_THREADS"):
        return None
    own = _host(spec.task_address(job, index))
    here = sum(
        _host(spec.task_address(other, task)) == own
        for other in spec.jobs
        if other in ("worker", "ps")
        for task in spec.task_indices(other)
    )
    return max(1, len(os.sched_getaffinity(0)) // max(1, here))


def _host(address: str) -> str:
    host = split_address(address)[0]
    return "localhost" if is_loopback(host) else host
