"""`LocalCluster`: a whole cluster on this machine, for work, tests and teaching.

It decides which tasks there are and replaces workers that die; processes themselves are started and
watched by `processes.py`, roles made by `tasks.py`.
"""

from __future__ import annotations

import logging
import numbers
import threading
import time
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from stratagem import metrics
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.resolvers import SimpleClusterResolver
from stratagem._cluster.launch.fork_server import ForkServer, TaskEvent, TaskOrder, send_signal
from stratagem._owner import Owner
from stratagem._wire.handshake import ClusterKey
from stratagem.config import ClusterOptions, cluster_key_text, log_as_environment_says
from stratagem.errors import StartupError

if TYPE_CHECKING:
    from stratagem._cluster.launch.tasks import Task

_log = logging.getLogger("stratagem.cluster")

START_TIMEOUT_S: Final = 60.0
"""For the whole start; 2 + 2 tasks take about 3 s on two idle cores."""


@final
class LocalCluster(Owner):
    """Workers and parameter servers on this machine, as processes or as threads.

    Nothing is left behind however this process ends, SIGKILL included.

    Args:
        workers: how many workers.
        ps: how many parameter servers.
        in_process: run the same tasks as threads of this process, for debugging with pdb.
        restart: replace a worker process that dies (or stays stopped).
        threads: torch threads of each task; 1 by default, because the tasks share this machine.
        start_timeout_s: how long the start may take.

    Raises:
        StartupError: a task was not ready in time, or died while starting.

    Example:
        >>> import stratagem as sg
        >>> with sg.LocalCluster(workers=2, ps=1, in_process=True) as cluster:
        ...     cluster.resolver.cluster_spec().num_tasks("worker")
        2
    """

    def __init__(
        self,
        workers: int = 2,
        ps: int = 1,
        *,
        in_process: bool = False,
        restart: bool = True,
        threads: int = 1,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        for name, count in (("workers", workers), ("ps", ps), ("threads", threads)):
            _check_count(name, count)
        log_as_environment_says()
        # Loopback is open to every user of the machine, and workers run what they are sent.
        self._key = cluster_key_text() or ClusterKey.random().text()
        self._restart = restart
        self._threads = int(threads)
        self._changed = threading.Condition()
        self._states: dict[str, _TaskState] = {
            f"{job}:{index}": _TaskState(job, index)
            for job, count in (("ps", ps), ("worker", workers))
            for index in range(count)
        }
        self._closed = False
        self._fork_server: ForkServer | None = None
        self._tasks: list[tuple[Task, threading.Thread]] = []
        self._options = ClusterOptions.from_environment()
        try:
            if in_process:
                self._start_threads()
            else:
                self._start_processes(start_timeout_s)
        except BaseException:  # Ctrl-C too: processes already started must not stay behind
            self.close()
            raise

    # ------------------------------------------------------------------ for the user

    @property
    def cluster_spec(self) -> ClusterSpec:
        """Where the tasks are."""
        jobs: dict[str, list[str]] = {"worker": [], "ps": []}
        for state in self._states.values():
            jobs[state.job].append(state.address)
        return ClusterSpec(jobs)

    @property
    def resolver(self) -> SimpleClusterResolver:
        """For a strategy: this process is the chief."""
        return SimpleClusterResolver(self.cluster_spec, rpc_layer="grpc", cluster_key=self._key)

    def pid(self, job: str, index: int) -> int:
        """Process number of a task; this process's own if the cluster is in-process."""
        return self._state(job, index).pid

    def kill_worker(self, index: int, signal_number: int = 9) -> None:
        """Sends a signal (SIGKILL by default) to a worker, for tests of what follows."""
        self._signal("worker", index, signal_number)

    def kill_ps(self, index: int, signal_number: int = 9) -> None:
        """Sends a signal (SIGKILL by default) to a parameter server."""
        self._signal("ps", index, signal_number)

    def wait_restarted(self, index: int, old_pid: int, timeout_s: float = 30.0) -> int:
        """Waits until worker `index` runs with another process number than `old_pid`; gives it."""
        state = self._state("worker", index)
        with self._changed:
            if not self._changed.wait_for(
                lambda: state.ready and state.pid != old_pid, timeout=timeout_s
            ):
                raise StartupError(
                    f"worker {index} was not replaced within {timeout_s:g} s: {state!r}."
                )
            return state.pid

    @override
    def close(self) -> None:
        """Ends every task. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._fork_server is not None:
            self._fork_server.close()
        for task, _ in self._tasks:
            task.close()
        for _, thread in self._tasks:
            thread.join(10.0)

    @override
    def __repr__(self) -> str:
        tasks = "closed" if self._closed else ", ".join(map(repr, self._states.values()))
        return f"<LocalCluster [{tasks}]>"

    # ------------------------------------------------------------------ threads

    def _start_threads(self) -> None:
        # Only here: whoever starts processes need not wait for torch to be imported twice.
        from stratagem._cluster.launch.tasks import make_task

        for state in self._states.values():
            task = make_task(
                state.job, state.index, "127.0.0.1:0", key=self._key, forward_output=False
            )
            thread = threading.Thread(
                target=task.serve, name=f"stratagem-{state.job}-{state.index}", daemon=True
            )
            thread.start()
            self._tasks.append((task, thread))
            state.began(pid=0)
            state.came_up(task.address)

    # ------------------------------------------------------------------ processes

    def _start_processes(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._fork_server = ForkServer(self._on_event, start_timeout_s=timeout_s)
        for state in self._states.values():
            self._spawn(state)
        with self._changed:
            self._changed.wait_for(
                lambda: all(state.ready or state.ended for state in self._states.values()),
                timeout=deadline - time.monotonic(),
            )
            missing = [state for state in self._states.values() if not state.ready]
        if missing:
            raise StartupError(
                f"the cluster could not start (limit {timeout_s:g} s): "
                + "; ".join(f"{state!r}{state.last_lines()}" for state in missing)
            )

    def _spawn(self, state: _TaskState) -> None:
        assert self._fork_server is not None
        self._fork_server.spawn(
            TaskOrder(
                job=state.job,
                index=state.index,
                address=state.address or "127.0.0.1:0",
                key=self._key,
                threads=self._threads,
                stopped_limit_s=(
                    self._options.heartbeat_limit_s
                    if self._restart and state.job == "worker"
                    else 0.0
                ),
            )
        )

    def _on_event(self, event: TaskEvent) -> None:
        """On the listening thread: keeps the books, and replaces workers."""
        if event.kind == "lost":
            _log.error("the process that starts tasks is gone, and the tasks with it")
            with self._changed:
                for state in self._states.values():
                    state.went_down("ended with the process that starts tasks")
                self._changed.notify_all()
            return
        state = self._states[event.task]
        if event.kind == "line":
            state.keep_line(event.text)
            task = f"/job:{state.job}/task:{state.index}"
            logging.getLogger(f"stratagem.tasks.{task}").info("[%s] %s", task, event.text)
            return
        with self._changed:
            if event.kind == "spawned":
                state.began(event.pid)
            elif event.kind == "ready":
                state.came_up(event.text)
            elif event.kind == "exited":
                was_ready = state.ready
                state.went_down(event.text)
                if not self._closed:
                    self._after_death(state, was_ready)
            self._changed.notify_all()

    def _after_death(self, state: _TaskState, was_ready: bool) -> None:
        metrics.event("task_ended", task=f"{state.job}:{state.index}", how=state.ended)
        _log.warning("%r%s", state, state.last_lines())
        # A task that never became ready would fail again: its address may be taken, or its imports
        # broken. Only a life that had begun is replaced, or one that may get its old address soon.
        if self._restart and state.job == "worker" and (was_ready or state.retries > 0):
            state.retries = 20 if was_ready else state.retries - 1
            self._spawn(state)

    def _signal(self, job: str, index: int, number: int) -> None:
        state = self._state(job, index)
        if self._fork_server is None:
            raise RuntimeError(
                f"{job} {index} is a thread of this process: only processes can be signalled. Use "
                "LocalCluster(in_process=False)."
            )
        send_signal(state.pid, number)

    def _state(self, job: str, index: int) -> _TaskState:
        state = self._states.get(f"{job}:{index}")
        if state is None:
            raise ValueError(f"no task {index!r} in job {job!r}: there are {list(self._states)}.")
        return state


def _check_count(name: str, count: object) -> None:
    """True is a number to Python; who writes workers=True means something else."""
    if isinstance(count, bool) or not isinstance(count, numbers.Integral):
        raise TypeError(
            f"{name}={count!r} is a {type(count).__name__}: expected a whole number of at least 1, such "
            f"as LocalCluster({name}=2)."
        )
    if count < 1:
        raise ValueError(f"{name}={count!r}: expected a whole number of at least 1.")


class _TaskState:
    """What is known about one task."""

    def __init__(self, job: str, index: int) -> None:
        self.job = job
        self.index = index
        self.address = ""
        self.pid = 0
        self.ready = False
        self.ended = ""
        self.lives = 0
        self.retries = 0
        self._lines: list[str] = []

    def began(self, pid: int) -> None:
        self.pid = pid
        self.ended = ""
        self.lives += 1
        self._lines.clear()

    def came_up(self, address: str) -> None:
        self.address = address
        self.ready = True

    def went_down(self, how: str) -> None:
        self.ready = False
        self.ended = how

    def keep_line(self, text: str) -> None:
        self._lines = [*self._lines[-19:], text]

    def last_lines(self) -> str:
        return "".join(f"\n    {line}" for line in self._lines)

    @override
    def __repr__(self) -> str:
        how = "ready" if self.ready else self.ended or "starting"
        life = f", life {self.lives}" if self.lives > 1 else ""
        return f"{self.job}:{self.index} {how} (pid {self.pid}{life}) at {self.address or '?'}"
