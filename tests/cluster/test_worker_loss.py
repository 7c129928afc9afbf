"""Workers die in every way we know, and it does not matter (FLT-1 … FLT-7)."""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from scheduling import workers_up
from waiting import Gate, pass_gate, wait_until

import stratagem as sg
from stratagem import ClusterCoordinator, LocalCluster
from stratagem._cluster.coordinator.remote_values import RemoteValueStatus
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem.cluster_resolver import SimpleClusterResolver
from stratagem.errors import (
    ClosureAborted,
    ClosureCancelled,
    ClosureLostTooOften,
    UnavailableError,
    WorkerLost,
)

pytestmark = pytest.mark.process


def hurt_once(mark: str, how: str) -> str:
    """Runs on a worker: does something fatal at the first call, nothing at the second."""
    import ctypes
    import os

    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "survived"
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "os._exit":
        os._exit(7)
    elif how == "abort":
        os.abort()
    return "not reached"


@pytest.mark.parametrize(
    "how",
    [
        "SIGKILL",
        pytest.param("SIGSTOP", marks=pytest.mark.slow),
        "segfault",
        "os._exit",
        "abort",
    ],
)
def test_closure_of_a_lost_worker_runs_elsewhere(
    how: str, cluster: LocalCluster, connect: Any, views: Any, tmp_path: Path
) -> None:
    """FLT-1, FLT-6: noticed, fenced once, run elsewhere; join neither raises nor waits for the dead."""
    coordinator = connect(cluster, views=views)
    before = [cluster.pid("worker", index) for index in range(2)]
    value = coordinator.schedule(hurt_once, args=(str(tmp_path / "mark"), how))
    others = [coordinator.schedule(lambda n: n, args=(n,)) for n in range(20)]
    coordinator.join(timeout_s=120)
    assert value.fetch() == "survived"
    assert coordinator.fetch(others) == list(range(20))
    assert coordinator.errors == []
    ((worker, life),) = views.fences
    assert life == 1
    assert cluster.wait_restarted(worker, before[worker]) != before[worker]
    wait_until(lambda: workers_up(coordinator) == 2)


def test_worker_is_lost_between_closures_too(cluster: LocalCluster, connect: Any) -> None:
    """An idle worker that dies is replaced and nobody notices."""
    coordinator = connect(cluster)
    assert coordinator.schedule(lambda: 1).fetch() == 1
    old = cluster.pid("worker", 0)
    cluster.kill_worker(0)
    cluster.wait_restarted(0, old)
    coordinator.join()
    wait_until(lambda: workers_up(coordinator) == 2)
    assert coordinator.fetch([coordinator.schedule(lambda n: n, args=(n,)) for n in range(9)]) == [
        *range(9)
    ]


def test_closure_that_kills_three_workers_is_named(cluster: LocalCluster, connect: Any) -> None:
    """Not an endless loop: ClosureLostTooOften names the closure and its victims."""
    coordinator = connect(cluster)

    def lethal() -> None:
        import os

        os._exit(1)

    innocent = coordinator.schedule(lambda: "fine")
    wait_until(lambda: innocent.status is RemoteValueStatus.READY)  # else it may be cancelled
    value = coordinator.schedule(lethal)
    with pytest.raises(ClosureLostTooOften, match=r"lethal .* was lost with 3 workers") as caught:
        coordinator.join(timeout_s=120)
    assert "lethal" in caught.value.closure
    assert len(caught.value.workers) == 3
    with pytest.raises(ClosureLostTooOften):
        value.fetch()
    assert innocent.fetch() == "fine"
    wait_until(lambda: workers_up(coordinator) == 2)
    assert coordinator.schedule(lambda: 2).fetch(timeout_s=120) == 2


@pytest.fixture
def patient_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster whose stopped workers are not replaced before the test kills them."""
    monkeypatch.setenv("STRATAGEM_HEARTBEAT_LIMIT_S", "600")
    with LocalCluster(workers=2, ps=1) as made:
        yield made


@pytest.mark.slow
def test_resources_are_aborted_and_rebuilt_from_their_beginning(
    patient_cluster: LocalCluster, connect: Any
) -> None:
    """FLT-2, FLT-3: ABORTED with the loss as cause; the replaced worker starts at element 0."""
    cluster = patient_cluster
    coordinator = connect(cluster, heartbeat_limit_s=3.0)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: range(10_000)))

    def take(it: Any) -> tuple[int, int]:
        return sg.get_current_worker_index(), next(it)

    seen = coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(100)])
    reached = {w: max((n for here, n in seen if here == w), default=-1) for w in range(2)}
    assert max(reached.values()) > 10
    victim = max(reached, key=lambda worker: reached[worker])
    old = cluster.pid("worker", victim)
    coordinator.join()
    cluster.kill_worker(victim, signal.SIGSTOP)  # down for a while, so that ABORTED can be seen
    wait_until(lambda: iterator.values[victim].status is RemoteValueStatus.ABORTED)
    with pytest.raises(ClosureAborted) as caught:
        iterator.values[victim].get()
    assert isinstance(caught.value.original_exception, WorkerLost)
    cluster.kill_worker(victim, signal.SIGKILL)
    cluster.wait_restarted(victim, old)
    wait_until(lambda: iterator.values[victim].status is RemoteValueStatus.READY)
    rows: list[int] = []
    while not rows:
        more = coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(20)])
        rows = [n for here, n in more if here == victim]
    assert min(rows) == 0, "iterators of a replaced worker restart"


@pytest.mark.slow
def test_user_error_wins_over_a_loss(cluster: LocalCluster, connect: Any, tmp_path: Path) -> None:
    """FLT-5, FLT-7: closures lost while an error waits to be raised are cancelled."""
    coordinator = connect(cluster)
    old = cluster.pid("worker", 0)

    def fail() -> None:
        raise ValueError("mine")

    mark = str(tmp_path / "mark")
    slow = coordinator.schedule(hurt_once, args=(mark, "SIGSTOP"))
    wait_until(lambda: (tmp_path / "mark").exists())
    coordinator.schedule(fail)
    with pytest.raises(ValueError, match="mine"):
        coordinator.join(timeout_s=120)
    with pytest.raises(ClosureCancelled):
        slow.fetch()
    assert coordinator.schedule(lambda: 1).fetch(timeout_s=120) == 1
    del old
    wait_until(lambda: workers_up(coordinator) == 2)


def test_no_worker_at_all_is_an_error_not_a_hang(connect: Any) -> None:
    """Closures do not wait for ever when nobody can run them."""
    with LocalCluster(workers=1, ps=1, restart=False) as cluster:
        coordinator = connect(cluster, worker_wait_s=0.5)
        cluster.kill_worker(0)
        wait_until(lambda: workers_up(coordinator) == 0)
        value = coordinator.schedule(lambda: 1)
        with pytest.raises(UnavailableError, match="no worker has answered"):
            coordinator.join(timeout_s=120)
        with pytest.raises(ClosureCancelled):
            value.fetch()
        assert "killed by SIGKILL" in repr(cluster)


def test_the_watchdog_logs_the_stacks_of_all_threads(
    cluster: LocalCluster, connect: Any, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """WDG-1: logs stacks when nothing finishes, raises nothing."""
    coordinator = connect(cluster, watchdog_s=0.3)
    with caplog.at_level("WARNING", logger="stratagem.coordinator"):
        coordinator.schedule(pass_gate, args=(gate.path,))
        wait_until(lambda: "stratagem-watch-closures" in caplog.text)
        gate.open()
        coordinator.join()
    assert "no closure finished for" in caplog.text
    assert "in flight" in caplog.text
    assert "stratagem-watch-closures" in caplog.text


@pytest.mark.slow
def test_random_kills_lose_no_closure(cluster: LocalCluster, connect: Any) -> None:
    """A thousand closures; whenever some are done, a worker is killed. Each result is there."""
    coordinator = connect(cluster, poison_limit=50)
    draw = random.Random(7)

    def work(n: int) -> int:
        __import__("time").sleep(0.002)  # its work: a kill finds closures that run
        return n

    values = [coordinator.schedule(work, args=(n,)) for n in range(1000)]
    for done in range(100, 900, 100):
        wait_until(lambda done=done: values[done].status is RemoteValueStatus.READY)  # type: ignore[misc]
        cluster.kill_worker(draw.randrange(2))
    coordinator.join(timeout_s=120)
    assert coordinator.fetch(values) == list(range(1000))
    wait_until(lambda: workers_up(coordinator) == 2)


def test_coordinator_sees_a_loss_by_eof_not_by_waiting(cluster: LocalCluster, connect: Any) -> None:
    """A killed process is noticed by its socket, long before the heartbeat's limit."""
    coordinator: ClusterCoordinator = connect(cluster, heartbeat_limit_s=1000.0)
    old = cluster.pid("worker", 1)
    cluster.kill_worker(1)
    wait_until(lambda: coordinator.workers[1].last_error is not None)
    cluster.wait_restarted(1, old)
    wait_until(lambda: workers_up(coordinator) == 2)


def link_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith("-link")]


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that answers nothing, as that of a machine cut off: its line of callers is full."""
    with socket.socket() as deaf, ExitStack() as callers:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        host, port = deaf.getsockname()
        for _ in range(8):  # more than the kernel keeps in line: the rest gets no answer at all
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((host, port))
        yield f"{host}:{port}"


@pytest.mark.slow
def test_close_does_not_wait_for_a_worker_that_cannot_be_reached(
    cluster: LocalCluster, connect: Any
) -> None:
    """Its link is in the middle of an attempt that would take 6 s; the limit here is shorter."""
    with black_hole() as nowhere:
        jobs = cluster.cluster_spec.as_dict()
        spec = ClusterSpec({"worker": [jobs["worker"][0], nowhere, nowhere, nowhere]})

        class Partly:
            resolver = SimpleClusterResolver(spec, cluster_key=cluster._key)

        # It waits 6 s for the others to come; so the second attempt of each has just begun.
        coordinator: ClusterCoordinator = connect(
            Partly, connect_timeout_s=6.0, close_timeout_s=4.0
        )
        assert coordinator.schedule(lambda: 1).fetch(timeout_s=120) == 1
        assert len(link_threads()) == 4
        coordinator.close()
        assert link_threads() == []
