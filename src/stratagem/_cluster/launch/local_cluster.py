"""`LocalCluster`: a whole cluster on this machine, for work, tests and teaching."""

from __future__ import annotations

import functools
import numbers
import signal
from dataclasses import replace
from typing import Any, Final, final

from typing_extensions import override

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.resolvers import ClusterResolver, SimpleClusterResolver
from stratagem._cluster.launch.fork_launcher import ForkLauncher
from stratagem._cluster.launch.launcher import EventHandler, Launcher, TaskOrder
from stratagem._cluster.launch.open_files import check_open_files
from stratagem._cluster.launch.supervisor import TaskSupervisor
from stratagem._owner import Owner
from stratagem._wire import messages
from stratagem._wire.cluster_key import cluster_key
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClusterKey
from stratagem.config import ClusterOptions, cluster_key_text, log_as_environment_says
from stratagem.errors import MisuseError, WireError

START_TIMEOUT_S: Final = 60.0
"""For the whole start; 2 + 2 tasks take about 3 s on two idle cores."""


RETIRE_TIMEOUT_S: Final = 30.0
"""How long a worker may take to answer; a closure that holds Python's lock delays the answer."""


@final
class LocalCluster(Owner):
    """Workers and parameter servers on this machine, as processes or as threads.

    All tasks end with this process, even if it is killed with SIGKILL.

    Args:
        workers: number of workers.
        ps: number of parameter servers.
        in_process: run the same tasks as threads of this process, for debugging with pdb.
        restart: replace a process that exits (or stays stopped). A new parameter server has no variables:
            they are restored from the newest checkpoint, if there is a `CheckpointManager`.
        threads: torch threads of each task; 1 by default, because the tasks share this machine.
        start_timeout_s: how long the start may take.

    Raises:
        StartupError: a task was not ready in time, or exited while starting, or the limit of open files
            of this process is too low.

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
        check_open_files(workers + ps)
        log_as_environment_says()
        # Every user of the machine can connect to loopback, and workers run the functions that they receive.
        self._key = cluster_key_text() or ClusterKey.random().text()
        self._closed = False
        self._in_process = in_process
        stopped_limit_s = ClusterOptions.from_environment().heartbeat_limit_s if restart else 0.0
        self._start_timeout_s = start_timeout_s
        # The tasks belong to the user of this process, who may write anywhere anyway.
        self._order = TaskOrder(
            job="worker",
            index=0,
            key=self._key,
            threads=int(threads),
            any_optimizer=True,
            checkpoint_directories=("/",),
            stopped_limit_s=stopped_limit_s,
        )
        self._tasks = TaskSupervisor(
            functools.partial(_make_launcher, in_process, start_timeout_s),
            [
                replace(self._order, job=job, index=index)
                for job, count in (("ps", ps), ("worker", workers))
                for index in range(count)
            ],
            restart=("worker", "ps") if restart else (),
            start_timeout_s=start_timeout_s,
        )

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the tasks."""
        return self._tasks.cluster_spec()

    @property
    def resolver(self) -> ClusterResolver:
        """The resolver for a strategy of this process. It always returns the current addresses."""
        return _LocalResolver(self._tasks, self._key)

    def pid(self, job: str, index: int) -> int:
        """Process number of a task; this process's own if the cluster is in-process."""
        return self._tasks.pid(f"{job}:{index}")

    def kill_worker(self, index: int, signal_number: int = 9) -> None:
        """Send a signal (SIGKILL by default) to a worker, to test failure handling.

        Raises:
            MisuseError: the cluster is in-process.
        """
        self._tasks.stop(f"worker:{index}", signal_number)

    def kill_ps(self, index: int, signal_number: int = 9) -> None:
        """Send a signal (SIGKILL by default) to a parameter server.

        Raises:
            MisuseError: the cluster is in-process.
        """
        self._tasks.stop(f"ps:{index}", signal_number)

    def add_worker(self) -> int:
        """Start one more worker and return its index. A running coordinator uses it within a second.

        Raises:
            StartupError: the worker was not ready within the cluster's `start_timeout_s`.

        Example:
            >>> import stratagem as sg
            >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
            ...     cluster.add_worker(), cluster.add_worker()
            (1, 2)
        """
        check_open_files(len(self._tasks.indices("worker")) + len(self._tasks.indices("ps")) + 1)
        index = self._tasks.free_index("worker")
        self._tasks.add(replace(self._order, index=index), self._start_timeout_s)
        return index

    def remove_worker(self, index: int | None = None, *, drain: bool = True) -> int:
        """Remove a worker, by default the one with the highest index; return its index without waiting.

        Args:
            index: the worker.
            drain: let it finish the closure that it runs. Its process ends when the coordinator has released
                it, or at once without a coordinator. False: kill it; its closures run on other workers.

        Raises:
            ValueError: there is no such worker, or it is the last one.
            MisuseError: ``drain=False``, and the cluster is in-process.

        Example:
            >>> import stratagem as sg
            >>> with sg.LocalCluster(workers=3, ps=1, in_process=True) as cluster:
            ...     cluster.remove_worker(1), cluster.resolver.cluster_spec().task_indices("worker")
            (1, [0, 2])
        """
        workers = self._tasks.indices("worker")
        if index is None:
            index = workers[-1]
        if index not in workers:
            raise ValueError(f"there is no worker {index!r}: expected one of {workers}.")
        if len(workers) == 1:
            raise ValueError(
                f"worker {index} is the last one: a cluster needs a worker. Add another one first, or "
                "close the cluster."
            )
        task = f"worker:{index}"
        if not drain and self._in_process:
            raise MisuseError(
                f"{task} is a thread of this process, which cannot be killed: use remove_worker(drain=True)."
            )
        address = self._tasks.remove(task)
        if not drain or not _retire(address, self._key):
            self._tasks.launcher.stop(task, signal.SIGKILL)
        return index

    def wait_restarted(self, index: int, old_pid: int, timeout_s: float = 30.0) -> int:
        """Wait until the process id of worker `index` differs from `old_pid`; return the new one."""
        return self._tasks.wait_restarted(f"worker:{index}", old_pid, timeout_s)

    @override
    def close(self) -> None:
        """End every task. May be called again."""
        self._closed = True
        self._tasks.close()

    @override
    def __repr__(self) -> str:
        return f"<LocalCluster [{'closed' if self._closed else repr(self._tasks)}]>"


@final
class _LocalResolver(ClusterResolver):
    """Resolver of a cluster of this process."""

    def __init__(self, tasks: TaskSupervisor, key: str) -> None:
        super().__init__(rpc_layer="grpc")
        self._tasks = tasks
        self._key = key

    @override
    def cluster_spec(self) -> ClusterSpec:
        return self._tasks.cluster_spec()

    @override
    def cluster_key_text(self) -> str | None:
        return self._key

    @override
    def _accelerators(self) -> dict[str, int]:
        return {}

    @override
    def __reduce__(self) -> Any:
        return SimpleClusterResolver, (self.cluster_spec(),)  # without the key


def _retire(address: str, key: str) -> bool:
    """Ask a worker to end as soon as no coordinator uses it; return False if it does not answer."""
    try:
        with connect(address, key=cluster_key(key), timeout_s=RETIRE_TIMEOUT_S) as channel:
            channel.request(messages.Retire(), timeout_s=RETIRE_TIMEOUT_S)
    except WireError:
        return False
    return True


def _make_launcher(in_process: bool, start_timeout_s: float, on_event: EventHandler) -> Launcher:
    if not in_process:
        return ForkLauncher(on_event, start_timeout_s=start_timeout_s)
    # Imported only here: a process that starts others need not wait for torch.
    from stratagem._cluster.launch.thread_launcher import ThreadLauncher

    return ThreadLauncher(on_event)


def _check_count(name: str, count: object) -> None:
    """Refuse everything but whole numbers of at least 1; ``workers=True`` is a mistake."""
    if isinstance(count, bool) or not isinstance(count, numbers.Integral):
        raise TypeError(
            f"{name}={count!r} is a {type(count).__name__}: expected a whole number of at least 1, such "
            f"as LocalCluster({name}=2)."
        )
    if count < 1:
        raise ValueError(f"{name}={count!r}: expected a whole number of at least 1.")
