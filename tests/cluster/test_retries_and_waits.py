"""Closures that are tried again, waits with an end, values that were lost (FLT-4, FLT-10, FLT-11 …)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import Gate, pass_gate, wait_until

import stratagem as sg
from stratagem import LocalCluster
from stratagem._cluster.coordinator import closure_table
from stratagem._cluster.coordinator.remote_values import RemoteValueStatus
from stratagem.errors import (
    ClosureCancelled,
    DeadlineExceeded,
    ParameterServerLost,
    StratagemError,
)

pytestmark = pytest.mark.process

Connect = Callable[..., sg.ClusterCoordinator]


def count_up(mark: str) -> int:
    """One more than at the last call, whichever process calls."""
    with open(mark, "a+", encoding="ascii") as file:
        file.write("x")
        file.seek(0)
        return len(file.read())


def fail_at_first(mark: str, times: int, error: Exception) -> int:
    """Runs on a worker: raises at its first calls; afterwards says how many there were."""
    calls = count_up(mark)
    if calls <= times:
        raise error
    return calls


def trouble(task: int) -> ParameterServerLost:
    return ParameterServerLost(f"ps {task} is gone", task=f"/job:ps/task:{task}", variables=[])


def test_the_first_reports_about_a_server_are_not_believed(
    cluster: LocalCluster, connect: Connect, tmp_path: Path
) -> None:
    """FLT-10: two per server are taken for passing and the closure is retried; the third is raised."""
    coordinator = connect(cluster)
    mark = str(tmp_path / "first")
    assert coordinator.schedule(fail_at_first, (mark, 2, trouble(0))).fetch(timeout_s=120) == 3
    assert coordinator.errors == []
    # The count is each server's own ...
    mark = str(tmp_path / "other")
    assert coordinator.schedule(fail_at_first, (mark, 2, trouble(1))).fetch(timeout_s=120) == 3
    # ... and never starts again: one more about either of them is believed.
    for task in (0, 1):
        mark = str(tmp_path / f"third {task}")
        coordinator.schedule(fail_at_first, (mark, 1, trouble(task)))
        with pytest.raises(ParameterServerLost) as caught:
            coordinator.join(timeout_s=120)
        assert caught.value.task == f"/job:ps/task:{task}"
        assert len(Path(mark).read_text()) == 1


@pytest.mark.parametrize(
    ("limit", "tolerated"), [(-1, 0), (0, 0), (1, 0), (3, 2)], ids=["default", "0", "1", "3"]
)
def test_missed_deadlines_are_tolerated_as_often_as_said(
    cluster: LocalCluster, connect: Connect, tmp_path: Path, limit: int, tolerated: int
) -> None:
    """FLT-11: N - 1 of them; by default N is a tenth of the workers, and 0 tolerates none."""
    coordinator = connect(cluster, transient_timeouts=limit)
    late = DeadlineExceeded("no answer within 1 s")
    mark = str(tmp_path / "late")
    if tolerated:
        value = coordinator.schedule(fail_at_first, (mark, tolerated, late))
        assert value.fetch(timeout_s=120) == tolerated + 1
    coordinator.schedule(fail_at_first, (str(tmp_path / "one more"), 1, late))
    with pytest.raises(DeadlineExceeded, match="no answer within 1 s"):
        coordinator.join(timeout_s=120)


@pytest.mark.parametrize(("exactly_once", "expected"), [(False, 3.0), (True, 1.0)])
def test_a_retried_closure_repeats_its_writes_unless_they_are_to_count_once(
    tmp_path: Path, exactly_once: bool, expected: float
) -> None:
    """FLT-10, CCO-13: what it wrote to other servers before the trouble is there when it runs again."""
    with LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                healthy, troubled = sg.Variable(0.0), sg.Variable(0.0)
            coordinator = sg.ClusterCoordinator(strategy)
            mark = str(tmp_path / "mark")

            def step() -> None:
                healthy.assign_add(1.0)
                fail_at_first(mark, 2, trouble(1))
                troubled.assign_add(1.0)

            coordinator.schedule(step, exactly_once=exactly_once)
            coordinator.join(timeout_s=120)
            assert float(troubled) == 1.0
            assert float(healthy) == expected


@pytest.mark.parametrize(("interval_s", "warnings"), [(math.inf, 1), (0.0, 2)])
def test_retries_of_a_worker_are_logged_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    interval_s: float,
    warnings: int,
) -> None:
    """A lost server makes dozens of retries until it is restored; a log needs one line."""
    monkeypatch.setattr(closure_table, "RETRY_LOG_S", interval_s)
    with LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            coordinator = sg.ClusterCoordinator(strategy)
            given = (str(tmp_path / "mark"), 2, trouble(0))
            assert coordinator.schedule(fail_at_first, given).fetch(timeout_s=120) == 3
    text = "runs again, because /job:worker/task:0 cannot reach /job:ps/task:0"
    assert sum(text in one.getMessage() for one in caplog.records) == warnings
    assert str(trouble(0)) not in caplog.text  # advice for a run that has ended


def test_a_worker_lost_while_its_resources_are_rebuilt_gets_them_all_the_same(
    connect: Connect, tmp_path: Path
) -> None:
    """FLT-4: the procedure is repeated, however often the rebuilding worker dies."""
    mark = str(tmp_path / "built")

    def build() -> str:
        # Building 1 is the first; 2 and 3 are those after a loss.
        if count_up(mark) in (2, 3):
            os._exit(1)
        return f"built by {os.getpid()}"

    with LocalCluster(workers=1, ps=1) as cluster:
        coordinator = connect(cluster)
        resource = coordinator.create_per_worker_resource(build)
        use = lambda mine: mine
        first = coordinator.schedule(use, args=(resource,)).fetch(timeout_s=120)
        cluster.kill_worker(0)
        wait_until(lambda: len(Path(mark).read_text()) >= 4, timeout_s=60.0)
        wait_until(lambda: resource.values[0].status is RemoteValueStatus.READY)
        again = coordinator.schedule(use, args=(resource,)).fetch(timeout_s=120)
        assert again == f"built by {cluster.pid('worker', 0)}"
        assert again != first
        assert coordinator.errors == []


def test_a_value_lost_with_its_worker_is_cancelled_every_time(
    connect: Connect,
) -> None:
    """RMV-3: get and fetch of an ABORTED value raise, and so does every later call."""
    with LocalCluster(workers=1, ps=1, restart=False) as cluster:
        coordinator = connect(cluster)
        resource = coordinator.create_per_worker_resource(lambda: [1])
        coordinator.schedule(len, args=(resource,)).fetch(timeout_s=120)
        cluster.kill_worker(0)
        (value,) = resource.values
        wait_until(lambda: value.status is RemoteValueStatus.ABORTED)
        for use in (value.get, value.fetch, value.get):
            with pytest.raises(ClosureCancelled, match="worker") as caught:
                use()
            assert isinstance(caught.value, StratagemError)


def test_per_worker_values_are_made_of_remote_values(coordinator: sg.ClusterCoordinator) -> None:
    """RMV-5."""
    made = coordinator.create_per_worker_resource(int)
    assert len(sg.PerWorkerValues(made.values).values) == 2
    for wrong in ([1, 2], [*made.values, None]):
        with pytest.raises(AssertionError, match="expected RemoteValues"):
            sg.PerWorkerValues(wrong)  # type: ignore[arg-type]


def test_join_gives_up_after_its_limit_and_cancels_nothing(
    coordinator: sg.ClusterCoordinator, gate: Gate
) -> None:
    """CCO-27: without a limit join waits as long as it takes; with one it says that time is up."""

    def pass_it(path: str) -> str:
        pass_gate(path)
        return "through"

    value = coordinator.schedule(pass_it, args=(gate.path,))
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"join: not done within 0\.05 s"):
            coordinator.join(timeout_s=0.05)
    assert not coordinator.done()
    assert value.status is RemoteValueStatus.NOT_READY
    gate.open()
    coordinator.join()
    assert value.fetch() == "through"
