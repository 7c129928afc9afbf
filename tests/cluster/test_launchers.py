"""Every launcher keeps the contract, and a cluster can be built on any of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from subprocess_launcher import SubprocessLauncher
from waiting import wait_until

from stratagem._cluster.launch.fork_launcher import ForkLauncher
from stratagem._cluster.launch.launcher import Launcher, TaskEvent, TaskOrder
from stratagem._cluster.launch.supervisor import TaskSupervisor
from stratagem._cluster.launch.thread_launcher import ThreadLauncher
from stratagem._wire.connecting import connect as dial
from stratagem._wire.handshake import ClusterKey
from stratagem.cluster_resolver import SimpleClusterResolver
from stratagem.errors import MisuseError, StartupError, WireError

pytestmark = pytest.mark.process

KEY = "a key for the launchers' tests"
START_S = 200.0

PROCESSES: dict[str, Callable[..., Launcher]] = {
    "fork server": ForkLauncher,
    "subprocess": SubprocessLauncher,
}


class Log:
    """Keeps the events of a launcher."""

    def __init__(self) -> None:
        self.events: list[TaskEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: TaskEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, kind: str, task: str, count: int = 1) -> TaskEvent:
        """The count-th such event."""

        def found() -> list[TaskEvent]:
            return [one for one in self.events if (one.kind, one.task) == (kind, task)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, START_S), self.events
            return found()[count - 1]


@pytest.fixture(params=PROCESSES)
def started(request: pytest.FixtureRequest) -> Iterator[tuple[Launcher, Log]]:
    log = Log()
    launcher = PROCESSES[request.param](log)
    yield launcher, log
    launcher.close()


def answers(address: str) -> bool:
    try:
        dial(address, key=ClusterKey.from_text(KEY), timeout_s=60.0).close()
    except WireError:
        return False
    return True


def test_a_task_is_started_ready_and_exited(started: tuple[Launcher, Log]) -> None:
    """In this order, with the same process number, at the address it listens on."""
    launcher, log = started
    launcher.spawn(TaskOrder(job="ps", index=3, key=KEY))
    ready = log.wait_for("ready", "ps:3")
    assert answers(ready.address)
    launcher.stop("ps:3", signal.SIGKILL)
    exited = log.wait_for("exited", "ps:3")
    kinds = [one.kind for one in log.events if one.kind != "output"]
    assert kinds == ["started", "ready", "exited"]
    assert log.events[0].pid == ready.pid == exited.pid
    assert exited.text
    assert not answers(ready.address)
    launcher.stop("ps:3", signal.SIGKILL)  # it is gone: nothing happens


def test_a_task_has_its_own_environment_key_and_threads(started: tuple[Launcher, Log]) -> None:
    """Set for this task only, from its start."""
    launcher, log = started
    for index, limit in enumerate(("98304", "131072")):
        order = TaskOrder(
            job="ps", index=index, key=KEY, environment={"STRATAGEM_FRAME_BYTES": limit}
        )
        launcher.spawn(order)
    pids = [log.wait_for("ready", f"ps:{index}").pid for index in range(2)]
    assert len(set(pids)) == 2
    assert "STRATAGEM_FRAME_BYTES" not in os.environ
    from stratagem._wire import messages

    for index, limit in enumerate((98304, 131072)):
        address = log.wait_for("ready", f"ps:{index}").address
        with dial(address, key=ClusterKey.from_text(KEY), timeout_s=120) as channel:
            welcome = channel.request(messages.Hello(purpose="control")).message
        assert isinstance(welcome, messages.Welcome)
        assert welcome.frame_bytes == limit


def test_a_task_that_cannot_start_exits_and_says_why(started: tuple[Launcher, Log]) -> None:
    launcher, log = started
    launcher.spawn(TaskOrder(job="worker", index=0, key="short"))
    log.wait_for("exited", "worker:0")
    printed = "\n".join(one.text for one in log.events if one.kind == "output")
    assert "the cluster key has" in printed
    assert not any(one.kind == "ready" for one in log.events)


def test_closing_kills_every_task_and_returns_when_they_are_gone(
    started: tuple[Launcher, Log],
) -> None:
    launcher, log = started
    for index in range(2):
        launcher.spawn(TaskOrder(job="worker", index=index, key=KEY))
    pids = [log.wait_for("ready", f"worker:{index}").pid for index in range(2)]
    launcher.stop("worker:1", signal.SIGSTOP)
    launcher.close()
    launcher.close()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    launcher.spawn(TaskOrder(job="worker", index=2, key=KEY))
    assert not any(one.task == "worker:2" for one in log.events)


def test_threads_keep_the_contract_but_for_signals() -> None:
    log = Log()
    launcher = ThreadLauncher(log)
    try:
        launcher.spawn(TaskOrder(job="ps", index=0, key=KEY))
        ready = log.wait_for("ready", "ps:0")
        assert ready.pid == os.getpid()
        assert answers(ready.address)
        with pytest.raises(MisuseError, match="only processes can be signalled"):
            launcher.stop("ps:0", signal.SIGKILL)
    finally:
        launcher.close()
    assert not answers(ready.address)


class Cluster:
    """What `connect` needs: a resolver of the supervised tasks."""

    def __init__(self, tasks: TaskSupervisor) -> None:
        self.resolver = SimpleClusterResolver(tasks.cluster_spec(), cluster_key=KEY)


@pytest.mark.parametrize("kind", PROCESSES)
def test_a_cluster_on_any_launcher_works_and_replaces_its_workers(kind: str, connect: Any) -> None:
    orders = [TaskOrder(job="worker", index=index, key=KEY) for index in range(2)]
    with TaskSupervisor(
        PROCESSES[kind], orders, restart=("worker",), start_timeout_s=START_S
    ) as tasks:
        coordinator = connect(Cluster(tasks))
        assert coordinator.fetch(
            [coordinator.schedule(lambda n: n + 1, args=(n,)) for n in range(20)]
        ) == [*range(1, 21)]
        old, address = tasks.pid("worker:0"), tasks.cluster_spec().task_address("worker", 0)
        tasks.stop("worker:0", signal.SIGKILL)
        assert tasks.wait_restarted("worker:0", old, START_S) != old
        assert tasks.cluster_spec().task_address("worker", 0) == address
        assert "worker:0 ready" in repr(tasks)
        assert "incarnation 2" in repr(tasks)
        wait_until(lambda: coordinator.workers[0].incarnation > 1 and coordinator.done())
        assert coordinator.schedule(os.getpid).fetch(timeout_s=120) != old


def test_a_supervisor_that_cannot_start_leaves_nothing_behind() -> None:
    """The error names the task, how it ended and what it printed."""
    orders = [TaskOrder(job="ps", index=0, key=KEY), TaskOrder(job="nobody", index=0, key=KEY)]
    with pytest.raises(StartupError, match=r"(?s)nobody:0 code 1 .*job 'nobody' needs no server"):
        TaskSupervisor(SubprocessLauncher, orders, start_timeout_s=START_S)


# The supervisor's own decisions, with a launcher that only notes.


class Notes:
    """A launcher without tasks."""

    def __init__(self, on_event: Callable[[TaskEvent], None]) -> None:
        self.on_event = on_event
        self.orders: list[TaskOrder] = []
        self.ready_at: str | None = "10.0.0.7:99"

    def spawn(self, order: TaskOrder) -> None:
        self.orders.append(order)
        self.on_event(TaskEvent(kind="started", task=order.task, pid=len(self.orders)))
        if self.ready_at is not None:
            self.on_event(
                TaskEvent(
                    kind="ready", task=order.task, pid=len(self.orders), address=self.ready_at
                )
            )

    def stop(self, task: str, signal_number: int) -> None:
        self.on_event(TaskEvent(kind="exited", task=task, text=f"signal {signal_number}"))

    def close(self) -> None:
        pass


def supervise(**options: Any) -> tuple[TaskSupervisor, Notes]:
    orders = [TaskOrder(job="worker", index=0), TaskOrder(job="ps", index=0)]
    tasks = TaskSupervisor(Notes, orders, start_timeout_s=1.0, **options)
    assert isinstance(tasks.launcher, Notes)
    return tasks, tasks.launcher


def test_a_task_may_come_back_at_another_address() -> None:
    """Another machine, for a launcher that has several."""
    tasks, notes = supervise(restart=("worker",))
    notes.ready_at = "10.0.0.8:11"
    tasks.stop("worker:0", 9)
    assert tasks.cluster_spec() == {"worker": ["10.0.0.8:11"], "ps": ["10.0.0.7:99"]}
    assert tasks.pid("worker:0") == 3
    tasks.stop("ps:0", 9)
    assert len(notes.orders) == 3, "servers are not replaced"
    assert "ps:0 signal 9" in repr(tasks)
    with pytest.raises(StartupError, match=r"ps:0 was not replaced within 0\.01 s"):
        tasks.wait_restarted("ps:0", 2, 0.01)


def test_a_task_that_fails_again_and_again_is_given_up() -> None:
    tasks, notes = supervise(restart=("worker",))
    notes.ready_at = None
    for _ in range(50):
        tasks.stop("worker:0", 1)
    assert 10 < len(notes.orders) < 40


def test_nothing_is_replaced_after_close_or_when_the_launcher_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks, notes = supervise(restart=("worker",))
    notes.on_event(TaskEvent(kind="lost", text="the agent is gone"))
    assert "the agent is gone, and the tasks with it" in caplog.text
    assert repr(tasks).count("ended: the agent is gone") == 2
    tasks, notes = supervise(restart=("worker",))
    tasks.close()
    tasks.stop("worker:0", 9)
    assert len(notes.orders) == 2
