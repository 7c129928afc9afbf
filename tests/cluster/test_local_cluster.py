"""Local clusters start, serve, replace workers, and leave nothing behind however they end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from scheduling import workers_up
from waiting import wait_until
from warm_start import Program

import stratagem as sg
from stratagem import LocalCluster
from stratagem.config import ClusterOptions
from stratagem.errors import StartupError

pytestmark = pytest.mark.process

SRC = str(Path(__file__).parents[2] / "src")


def is_running(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] != "Z"


SCRIPT = """
import os, signal, sys, threading
import stratagem as sg
with sg.LocalCluster(workers=2, ps=2) as cluster:
    pids = [cluster.pid(job, i) for job in ("worker", "ps") for i in range(2)]
    print(*pids, cluster._tasks.launcher.pid, flush=True)
    how = sys.argv[1]
    if how == "exception":
        raise RuntimeError("on purpose")
    print("waiting", flush=True)
    threading.Event().wait(600)
"""


@pytest.mark.parametrize("how", ["exception", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_behind(how: str) -> None:
    """Issue 4, section 1: normal exit, exception, Ctrl-C, SIGKILL of the parent."""
    parent = Program(
        [sys.executable, "-c", SCRIPT, how],
        env={**os.environ, "PYTHONPATH": SRC},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 5
        if how.startswith("SIG"):
            assert parent.stdout.readline() == "waiting\n"
            assert all(is_running(pid) for pid in pids)
            parent.send_signal(getattr(signal, how))
        status = parent.wait(120)
    assert status != 0
    wait_until(lambda: not any(is_running(pid) for pid in pids))


FORKING = """
import os, sys, threading
import stratagem as sg
with sg.LocalCluster(workers=1, ps=1) as cluster:
    child = os.fork()  # has copies of the pipes to the fork server, and of all connections
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    pids = [cluster.pid(job, 0) for job in ("worker", "ps")]
    print(*pids, cluster._tasks.launcher.pid, flush=True)
    threading.Event().wait(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("printed", [0, 1 << 20])
def test_tasks_end_with_their_owner_though_a_child_of_it_holds_the_pipes(printed: int) -> None:
    """The fork server neither waits for the pipe's end nor for the child to read what tasks print."""
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING],
        env={**os.environ, "PYTHONPATH": SRC},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        worker, *others = (int(pid) for pid in parent.stdout.readline().split())
        parent.send_signal(signal.SIGSTOP)  # reads no more events, until it is killed
        writer = threading.Thread(target=_print_as, args=(worker, printed), daemon=True)
        writer.start()
        if not printed:
            writer.join()
        parent.kill()
        wait_until(lambda: not any(is_running(pid) for pid in (worker, *others)))
    writer.join(60)


def _print_as(pid: int, size: int) -> None:
    """Write lines to a process's standard output, until they are read or the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/1", "w") as stream:
        stream.write("a line of the task\n" * (size // 19))


@pytest.mark.parametrize("argument", ["workers", "ps", "threads"])
def test_a_number_of_tasks_is_a_whole_number(argument: str) -> None:
    """What was given, what is expected, how it is written."""
    wrong: Any
    for wrong in ("2", 1.5, True, None):
        words = re.escape(
            f"{argument}={wrong!r} has type {type(wrong).__name__}: expected a whole number"
        )
        with pytest.raises(TypeError, match=words):
            LocalCluster(**{argument: wrong})
    with pytest.raises(ValueError, match=f"{argument}=0: expected a whole number of at least 1"):
        LocalCluster(**{argument: 0})


STARTING = """
import stratagem as sg
from stratagem._cluster.launch import fork_launcher

fork_launcher._BOOT = "import time; time.sleep(600)"  # as on a machine where imports take very long
listen = fork_launcher.ForkLauncher._listen

def tell_and_listen(self):  # on the thread that is started last
    print(self.pid, flush=True)
    listen(self)

fork_launcher.ForkLauncher._listen = tell_and_listen
sg.LocalCluster(workers=1, ps=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "json"])
def test_a_program_imports_while_its_cluster_starts(first: str) -> None:
    """What its strategy and its first optimizer need; a process that only owns the cluster imports no torch."""
    code = (
        f"import sys, {first}, stratagem as sg; cluster = sg.LocalCluster(1, 1); cluster.close(); "
        "print([name in sys.modules for name in ('stratagem._strategies.parameter_server', 'torch._dynamo', 'torch')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.strip() == str([first == "torch"] * 3)


def test_ctrl_c_while_the_cluster_starts_returns_at_once() -> None:
    """The process that starts tasks is ended although it still imports, and leaves nothing."""
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTING],
        env={**os.environ, "PYTHONPATH": SRC},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGINT)
        assert parent.wait(120) == -signal.SIGINT
        said = parent.stderr.read()
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert "did not end" not in said  # it was not waited for
    assert not is_running(pid)


def test_tasks_die_with_the_process_that_forked_them(caplog: pytest.LogCaptureFixture) -> None:
    """Even when the fork server itself is killed."""
    with LocalCluster(workers=1, ps=1) as cluster:
        pids = [cluster.pid("worker", 0), cluster.pid("ps", 0)]
        os.kill(cluster._tasks.launcher.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_running(pid) for pid in pids))
        wait_until(lambda: repr(cluster).count("ended: the process that starts tasks is gone") == 2)
    assert "the process that starts tasks is gone" in caplog.text


def test_children_of_a_worker_end_with_it(cluster: LocalCluster, connect: Any) -> None:
    """A process a closure started does not outlive its worker."""
    coordinator = connect(cluster)

    def start_child() -> tuple[int, int]:
        import os
        import subprocess

        return os.getpid(), subprocess.Popen(["sleep", "600"]).pid

    worker, child = coordinator.schedule(start_child).fetch(timeout_s=120)
    index = 0 if cluster.pid("worker", 0) == worker else 1
    assert is_running(child)
    cluster.kill_worker(index)
    cluster.wait_restarted(index, worker)
    wait_until(lambda: not is_running(child))


def test_workers_are_replaced_while_one_has_closed_its_pipe(connect: Any) -> None:
    """A task's pipe may end before the task does: its number is then that of another one's."""

    def close_pipe() -> int:
        import os

        for number in range(3, 64):
            try:
                is_pipe = os.readlink(f"/proc/self/fd/{number}").startswith("pipe:")
            except FileNotFoundError:
                continue
            if is_pipe:
                os.close(number)
        return os.getpid()

    with LocalCluster(workers=3, ps=1) as cluster:
        coordinator = connect(cluster)
        known = f"/proc/{cluster._tasks.launcher.pid}/fd"
        before = len(os.listdir(known))
        closed = coordinator.schedule(close_pipe).fetch(timeout_s=120)
        wait_until(lambda: len(os.listdir(known)) < before)
        pids = [cluster.pid("worker", index) for index in range(3)]
        for index, pid in enumerate(pids):
            if pid != closed:
                cluster.kill_worker(index)
                assert cluster.wait_restarted(index, pid) != pid


def test_torch_computes_with_many_threads_after_the_fork(connect: Any) -> None:
    """OpenMP works in forked tasks, with as many threads as asked for."""
    with LocalCluster(workers=1, ps=1, threads=2) as cluster:
        coordinator = connect(cluster)

        def multiply() -> tuple[int, float]:
            import torch

            a = torch.ones(512, 512)
            for _ in range(5):
                b = a @ a
            return torch.get_num_threads(), float(b.sum())

        assert coordinator.schedule(multiply).fetch(timeout_s=40) == (2, 512.0**3)


def test_tasks_have_the_command_line_of_their_program(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may parse it where it is imported, which is also on workers and servers."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--rate", "0.1"])
    with LocalCluster(workers=1, ps=1) as cluster:
        seen = connect(cluster).schedule(lambda: __import__("sys").argv).fetch(timeout_s=40)
    assert seen == ["train.py", "--rate", "0.1"]


def test_in_process_cluster_runs_the_same_roles_as_threads(connect: Any) -> None:
    """For pdb: closures run in this very process."""
    with LocalCluster(workers=2, ps=1, in_process=True) as cluster:
        coordinator = connect(cluster)
        assert coordinator.schedule(os.getpid).fetch(timeout_s=120) == os.getpid()
        assert coordinator.fetch(
            [coordinator.schedule(lambda n: n + 1, args=(n,)) for n in range(50)]
        ) == [*range(1, 51)]
        with pytest.raises(RuntimeError, match="only processes can be signalled"):
            cluster.kill_worker(0)
        assert "worker:1 ready" in repr(cluster)
    assert repr(cluster) == "<LocalCluster [closed]>"
    with pytest.raises(sg.errors.MisuseError, match="this cluster is closed"):
        cluster.add_worker()


def test_a_strategy_names_what_it_got_instead_of_a_resolver() -> None:
    """The cluster itself and a dict of addresses are likely mistakes."""
    with LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        for given in (cluster, {"worker": ["a:1"], "ps": ["b:1"]}):
            with pytest.raises(
                TypeError, match=rf"has type {type(given).__name__}: expected a resolver"
            ):
                sg.ParameterServerStrategy(given)


def test_a_task_that_cannot_start_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """StartupError says which task, how it ended and what it printed; nothing is left."""
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", "short")
    with pytest.raises(
        StartupError,
        match=r"(?s)could not start.*worker:0 exited with status 1.*the cluster key has",
    ):
        LocalCluster(workers=1, ps=1)


@pytest.mark.parametrize("options", [{"workers": 0}, {"ps": 0}, {"threads": 0}])
def test_impossible_sizes_are_refused(options: dict[str, int]) -> None:
    """With the name and the value."""
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}=0"):
        LocalCluster(**options)


def test_unknown_tasks_are_refused(cluster: LocalCluster) -> None:
    """With a list of those there are."""
    with pytest.raises(ValueError, match="there is no task 'worker:9'"):
        cluster.pid("worker", 9)


@pytest.mark.slow
def test_fifty_idle_workers_can_connect() -> None:
    """Issue 4, section 5: fifty workers, two servers, one machine; each worker writes to both."""
    options = ClusterOptions(heartbeat_limit_s=60.0, connect_timeout_s=240.0)
    with LocalCluster(workers=50, ps=2) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                counts = [sg.Variable(0.0), sg.Variable(0.0)]
            assert len({count.device for count in counts}) == 2

            def count_me() -> int:
                for count in counts:
                    count.assign_add(1.0)
                return sg.get_current_worker_index()

            with sg.ClusterCoordinator(strategy, options=options) as coordinator:
                assert workers_up(coordinator) == 50
                everywhere = coordinator.create_per_worker_resource(count_me)
                wait_until(lambda: [float(count) for count in counts] == [50.0, 50.0])
                values = [
                    coordinator.schedule(lambda me, n: (me, n), args=(everywhere, n))
                    for n in range(200)
                ]
                assert [n for _, n in coordinator.fetch(values)] == list(range(200))


def test_processes_are_named_after_their_task(cluster: LocalCluster) -> None:
    """Issue 17, point 8."""
    names = {
        task: Path(f"/proc/{cluster.pid(*task)}/comm").read_text().strip()
        for task in (("worker", 0), ("worker", 1), ("ps", 0))
    }
    assert list(names.values()) == ["sg-worker-0", "sg-worker-1", "sg-ps-0"]
    shown = Path(f"/proc/{cluster.pid('worker', 1)}/cmdline").read_bytes().rstrip(b"\0")
    assert shown == b"stratagem: sg-worker-1"
