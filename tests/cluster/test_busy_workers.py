"""A worker that keeps Python's lock is busy, not lost; one that does nothing is (FLT-1)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import wait_until
from warm_start import Program

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem._wire.process_probe import CpuProbe, own_process
from stratagem.errors import ClosureLostTooOften

pytestmark = pytest.mark.process

LIMIT_S = 120.0

# A process that says who it is, then computes or sleeps: to be idle is what the second is for.
CHILD = """
import sys, time
from stratagem._wire.process_probe import own_process
print(own_process(), flush=True)
while True:
    time.sleep(3600) if sys.argv[1] == "sleep" else pow(3, 100_000)
"""


@pytest.fixture
def child() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], CpuProbe]]]:
    """Starts such a process, and feels its pulse."""
    started: list[subprocess.Popen[str]] = []

    def start(what: str) -> tuple[subprocess.Popen[str], CpuProbe]:
        process = Program([sys.executable, "-c", CHILD, what], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, CpuProbe(process.stdout.readline().strip())

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=LIMIT_S)


def wait_for_pulse(pulse: CpuProbe, wanted: bool) -> None:
    """Feels again and again until it is as wanted."""
    wait_until(lambda: pulse.computes(time.monotonic(), window_s=0.1) is wanted, LIMIT_S)


def test_busy_stopped_and_dead_processes_are_distinguished(child: Any) -> None:
    process, pulse = child("compute")
    assert pulse.is_local
    wait_for_pulse(pulse, True)
    os.kill(process.pid, signal.SIGSTOP)
    wait_for_pulse(pulse, False)
    os.kill(process.pid, signal.SIGCONT)
    wait_for_pulse(pulse, True)
    process.kill()
    process.wait(LIMIT_S)
    wait_for_pulse(pulse, False)


def test_a_process_that_sleeps_does_not_compute(child: Any) -> None:
    _, pulse = child("sleep")
    assert pulse.computes(0.0) is None  # a late look must not take "not known yet" for "no"
    assert pulse.computes(0.4) is None
    assert [pulse.computes(tenth / 10) for tenth in range(5, 30)] == [False] * 25


def test_processes_of_other_hosts_and_containers_are_not_local() -> None:
    """The same number may be another process there, or by now."""
    boot, numbering, pid, started = own_process().split(" ")
    assert not CpuProbe(f"other {numbering} {pid} {started}").is_local
    assert not CpuProbe(f"{boot} pid:[1] {pid} {started}").is_local
    assert not CpuProbe("").is_local
    later = CpuProbe(f"{boot} {numbering} {pid} {int(started) + 1}")
    assert later.is_local
    assert later._ticks() is None


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
        cluster, heartbeat_limit_s=limit_s, busy_limit_s=600.0
    )
    with caplog.at_level(logging.WARNING, "stratagem.coordinator"):
        value = coordinator.schedule(keep_the_lock, args=(3.2 * limit_s,))
        worker, took_s = value.fetch(timeout_s=LIMIT_S)
    assert took_s > 3 * limit_s
    assert coordinator.workers[worker].incarnation == 1
    assert "holds Python's lock (GIL)" in caplog.text


def test_a_busy_server_is_lost_after_the_limit(cluster: LocalCluster, connect: Any) -> None:
    """busy_limit_s=0: as it is for workers on other hosts."""
    coordinator: ClusterCoordinator = connect(
        cluster, heartbeat_limit_s=1.0, busy_limit_s=0.0, poison_limit=1
    )
    value = coordinator.schedule(keep_the_lock, args=(8.0,))
    with pytest.raises(ClosureLostTooOften, match="keep_the_lock"):
        coordinator.join(timeout_s=LIMIT_S)
    with pytest.raises(ClosureLostTooOften):
        value.fetch()
    assert any("no sign of life" in str(worker.last_error) for worker in coordinator.workers)
