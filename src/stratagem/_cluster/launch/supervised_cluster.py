"""`SupervisedCluster`: base class of the clusters that this process starts and supervises."""

from __future__ import annotations

import abc
import numbers
import signal
from typing import Final

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.resolvers import ClusterResolver, LiveResolver
from stratagem._cluster.launch.supervisor import TaskSupervisor
from stratagem._owner import Owner
from stratagem.errors import MisuseError, WireError

RETIRE_TIMEOUT_S: Final = 30.0
"""How long a worker may take to answer; a closure that holds Python's lock delays the answer."""


class SupervisedCluster(Owner):
    """Workers and parameter servers that this process started and supervises."""

    _tasks: TaskSupervisor
    _key: str
    _in_process = False

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the tasks."""
        return self._tasks.cluster_spec()

    @property
    def resolver(self) -> ClusterResolver:
        """The resolver for a strategy of this process. It always returns the current addresses."""
        key = self._key  # the resolver must not keep this cluster alive
        return LiveResolver(self._tasks.cluster_spec, lambda: key)

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

    @abc.abstractmethod
    def add_worker(self) -> int:
        """Start one more worker and return its index. A running coordinator uses it within a second."""

    def remove_worker(self, index: int | None = None, *, drain: bool = True) -> int:
        """Remove a worker, by default the one with the highest index; return its index without waiting.

        Args:
            index: the worker.
            drain: let the worker finish its current closure. Its process ends when the coordinator has released
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


def _retire(address: str, key: str) -> bool:
    """Ask a worker to end as soon as no coordinator uses it; return False if it does not answer."""
    # Not at the top: a process that only owns a cluster imports no torch.
    from stratagem._wire import messages
    from stratagem._wire.cluster_key import cluster_key
    from stratagem._wire.connecting import connect

    try:
        with connect(address, key=cluster_key(key), timeout_s=RETIRE_TIMEOUT_S) as channel:
            channel.request(messages.Retire(), timeout_s=RETIRE_TIMEOUT_S)
    except WireError:
        return False
    return True


def check_count(name: str, count: object) -> None:
    """Raise unless a value is a whole number of at least 1; ``workers=True`` is a mistake."""
    if isinstance(count, bool) or not isinstance(count, numbers.Integral):
        raise TypeError(
            f"{name}={count!r} has type {type(count).__name__}: expected a whole number of at least 1, such "
            f"as {name}=2."
        )
    if count < 1:
        raise ValueError(f"{name}={count!r}: expected a whole number of at least 1.")
