"""A worker that keeps Python's lock is busy, not lost; one that is stopped is (FLT-1)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import wait_until
from warm_start import Program

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem._wire.process_probe import is_running, own_process
from stratagem.errors import ClosureLostTooOften

pytestmark = pytest.mark.process

LIMIT_S = 120.0

# A process that says who it is.
CHILD = """
import time
from stratagem._wire.process_probe import own_process
print(own_process(), flush=True)
time.sleep(3600)
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Such a process, and what it has said."""
    process = Program([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_running_stopped_and_dead_processes_are_distinguished(
    child: tuple[subprocess.Popen[str], str],
) -> None:
    process, name = child
    assert is_running(name)
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: is_running(name) is False, LIMIT_S)
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: is_running(name) is True, LIMIT_S)
    process.kill()
    process.wait(LIMIT_S)
    assert is_running(name) is False


def test_processes_of_other_hosts_and_containers_are_not_local() -> None:
    """The same number may be another process there, or by now."""
    boot, numbering, pid, started = own_process().split(" ")
    assert is_running(f"other {numbering} {pid} {started}") is None
    assert is_running(f"{boot} pid:[1] {pid} {started}") is None
    assert is_running("") is None
    assert is_running(f"{boot} {numbering} {pid} {started}") is True
    assert is_running(f"{boot} {numbering} {pid} {int(started) + 1}") is False


def keep_the_lock(least_s: float) -> tuple[int, float]:
    """Runs on a worker: one call of native code, longer than that, that never gives the lock away."""
    import re
    import time

    took_s, length = 0.0, 16
    while took_s < least_s:
        length += 1
        began = time.thread_time()  # of the processor: a break of a busy machine is no long call
        re.match("(a+)+$", "a" * length + "b")
        took_s = time.thread_time() - began
    return sg.get_current_worker_index(), took_s


@pytest.mark.slow
def test_a_closure_that_keeps_pythons_lock_for_long_is_waited_for(
    cluster: LocalCluster, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker is not lost, nor does it take for silent whom it has not heard for so long."""
    limit_s = 1.0
    coordinator: ClusterCoordinator = connect(
        cluster, heartbeat_limit_s=limit_s, partition_limit_s=600.0
    )
    with caplog.at_level(logging.WARNING, "stratagem.coordinator"):
        value = coordinator.schedule(keep_the_lock, args=(3.2 * limit_s,))
        worker, took_s = value.fetch(timeout_s=LIMIT_S)
    assert took_s > 3 * limit_s
    assert coordinator.workers[worker].incarnation == 1
    assert "holds Python's lock (GIL)" in caplog.text


def test_a_busy_server_is_lost_after_the_limit(cluster: LocalCluster, connect: Any) -> None:
    """partition_limit_s=0: as it is for workers on other hosts."""
    coordinator: ClusterCoordinator = connect(
        cluster, heartbeat_limit_s=1.0, partition_limit_s=0.0, poison_limit=1
    )
    value = coordinator.schedule(keep_the_lock, args=(8.0,))
    with pytest.raises(ClosureLostTooOften, match="keep_the_lock"):
        coordinator.join(timeout_s=LIMIT_S)
    with pytest.raises(ClosureLostTooOften):
        value.fetch()
    assert any("no sign of life" in str(worker.last_error) for worker in coordinator.workers)
