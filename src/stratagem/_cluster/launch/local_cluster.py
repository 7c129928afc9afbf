"""`LocalCluster`: a whole cluster on this machine, for work, tests and teaching."""

from __future__ import annotations

import functools
import numbers
from typing import Any, Final, final

from typing_extensions import override

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.resolvers import ClusterResolver, SimpleClusterResolver
from stratagem._cluster.launch.fork_launcher import ForkLauncher
from stratagem._cluster.launch.launcher import EventHandler, Launcher, TaskOrder
from stratagem._cluster.launch.open_files import check_open_files
from stratagem._cluster.launch.supervisor import TaskSupervisor
from stratagem._owner import Owner
from stratagem._wire.handshake import ClusterKey
from stratagem.config import ClusterOptions, cluster_key_text, log_as_environment_says

START_TIMEOUT_S: Final = 60.0
"""For the whole start; 2 + 2 tasks take about 3 s on two idle cores."""


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
        stopped_limit_s = ClusterOptions.from_environment().heartbeat_limit_s if restart else 0.0
        self._tasks = TaskSupervisor(
            functools.partial(_make_launcher, in_process, start_timeout_s),
            [
                TaskOrder(
                    job=job,
                    index=index,
                    key=self._key,
                    threads=int(threads),
                    any_optimizer=True,
                    # The tasks belong to the user of this process, who may write anywhere anyway.
                    checkpoint_directories=("/",),
                    stopped_limit_s=stopped_limit_s,
                )
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
