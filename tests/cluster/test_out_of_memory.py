"""A worker runs out of memory: an error of the user's if Python notices, a lost worker if the kernel does.

The second twice: always by SIGKILL in the middle of a growing allocation, and by the kernel itself where memory
cgroups can be made (root, ``/sys/fs/cgroup`` writable).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scheduling import workers_up
from waiting import wait_until

from stratagem import ClusterCoordinator, LocalCluster

pytestmark = pytest.mark.process

STEP = 8 << 20
SPARE = 64 << 20


def want_too_much(how: str, spare: int) -> object:
    """Runs on a worker whose memory is limited for the time being."""
    import resource

    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        return bytearray(4 * spare) if how == "python" else torch.ones(4 * spare).sum()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("python", MemoryError, "raised by"),
        ("torch", RuntimeError, "allocate memory"),  # torch has no type of its own for it
    ],
)
def test_an_allocation_that_fails_is_an_error_of_the_closure(
    how: str, error: type[Exception], text: str, cluster: LocalCluster, connect: Any, views: Any
) -> None:
    """CCO-20: with its type, the worker's name and its traceback; the worker lives."""
    coordinator: ClusterCoordinator = connect(cluster, views=views)
    before = [cluster.pid("worker", index) for index in range(2)]
    value = coordinator.schedule(want_too_much, args=(how, SPARE))
    with pytest.raises(error, match=text) as caught:
        coordinator.join(timeout_s=120)
    assert any("raised by /job:worker/task:" in note for note in caught.value.__notes__)
    assert "in want_too_much" in str(caught.value.__cause__)
    with pytest.raises(error):
        value.fetch()
    values = [coordinator.schedule(os.getpid) for _ in range(20)]
    assert set(coordinator.fetch(values)) <= set(before)
    assert [worker.incarnation for worker in coordinator.workers] == [1, 1]
    assert views.fences == []


def grow_once(mark: str, cgroup: str, step: int) -> str:
    """Runs on a worker: takes more and more memory at the first call, nothing at the second."""
    try:
        descriptor = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return "survived"
    if cgroup:
        with open(f"{cgroup}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    os.write(descriptor, str(os.getpid()).encode())
    taken = []
    while len(taken) < 512:  # 4 GB; somebody ends this long before
        taken.append(bytearray(os.urandom(step)))
        if not cgroup:  # slowly: the test kills this process while it still grows
            __import__("time").sleep(0.01)
    return "nobody was killed"


def check_ran_elsewhere(
    cluster: LocalCluster, coordinator: Any, views: Any, old: list[int]
) -> None:
    """FLT-1: fenced once, run again, replaced."""
    assert coordinator.errors == []
    ((worker, life),) = views.fences
    assert life == 1
    assert cluster.wait_restarted(worker, old[worker]) != old[worker]
    wait_until(lambda: workers_up(coordinator) == 2)
    assert coordinator.schedule(lambda: 1).fetch(timeout_s=120) == 1


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, IndexError):
        return 0


def test_a_worker_killed_in_the_middle_of_an_allocation_is_replaced(
    cluster: LocalCluster, connect: Any, views: Any, tmp_path: Path
) -> None:
    """SIGKILL, as the kernel sends it, while the memory of the closure grows."""
    coordinator = connect(cluster, views=views)
    old = [cluster.pid("worker", index) for index in range(2)]
    usual = max(resident(pid) for pid in old)
    mark = tmp_path / "mark"
    value = coordinator.schedule(grow_once, args=(str(mark), "", STEP))
    wait_until(lambda: mark.exists() and mark.read_text())
    victim = old.index(int(mark.read_text()))
    wait_until(lambda: resident(old[victim]) > usual + SPARE)
    cluster.kill_worker(victim)
    coordinator.join(timeout_s=120)
    assert value.fetch() == "survived"
    check_ran_elsewhere(cluster, coordinator, views, old)


# The kernel itself.

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
ROOT, LIMIT, EVENTS = (
    (V1, "memory.limit_in_bytes", "memory.oom_control")
    if (V1 / "memory.limit_in_bytes").exists()
    else (V2, "memory.max", "memory.events")
)


def make_group(name: str) -> Path | None:
    """A memory cgroup with little room in it, and none to swap; None where that is not allowed."""
    group = ROOT / name
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        (group / LIMIT).write_text(str(SPARE))
        swap = group / ("memory.swappiness" if ROOT == V1 else "memory.swap.max")
        if swap.exists():
            swap.write_text("0")
        assert re.search(r"^oom_kill 0$", (group / EVENTS).read_text(), re.MULTILINE)
    except (OSError, AssertionError):
        group.rmdir()
        return None
    return group


def can_make_groups() -> bool:
    group = make_group(f"sg-probe-{os.getpid()}")
    if group is None:
        return False
    group.rmdir()
    return True


if can_make_groups():

    @pytest.fixture
    def small() -> Iterator[Path]:
        """A group whose processes are killed when they take more than `SPARE`."""
        group = make_group(f"sg-test-{os.getpid()}")
        assert group is not None
        try:
            yield group
        finally:
            wait_until(lambda: not (group / "cgroup.procs").read_text())
            group.rmdir()

    def test_a_worker_killed_by_the_kernel_for_want_of_memory_is_replaced(
        small: Path, cluster: LocalCluster, connect: Any, views: Any, tmp_path: Path
    ) -> None:
        """Issue 4, section 4: a real out-of-memory kill, counted by the kernel."""
        coordinator = connect(cluster, views=views)
        old = [cluster.pid("worker", index) for index in range(2)]
        value = coordinator.schedule(grow_once, args=(str(tmp_path / "mark"), str(small), STEP))
        coordinator.join(timeout_s=120)
        assert value.fetch() == "survived"
        check_ran_elsewhere(cluster, coordinator, views, old)
        assert re.search(r"^oom_kill [1-9]", (small / EVENTS).read_text(), re.MULTILINE)
