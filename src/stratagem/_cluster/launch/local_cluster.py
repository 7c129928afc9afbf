"""`LocalCluster`: a complete cluster on this machine."""

from __future__ import annotations

import functools
import os
import secrets
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from typing_extensions import override

from stratagem._cluster.launch.fork_launcher import ForkLauncher
from stratagem._cluster.launch.launcher import EventHandler, Launcher, TaskOrder, check_open_files
from stratagem._cluster.launch.supervised_cluster import SupervisedCluster, check_count
from stratagem._cluster.launch.supervisor import TaskSupervisor
from stratagem.config import ClusterOptions, cluster_key_text, log_as_environment_says
from stratagem.errors import CheckpointTimeout, MisuseError

if TYPE_CHECKING:
    from stratagem._checkpoint.evaluations import Evaluation
    from stratagem._checkpoint.evaluator import Evaluator

START_TIMEOUT_S: Final = 60.0
"""For the whole start; 2 + 2 tasks take about 1.5 s on two idle cores."""


@final
class LocalCluster(SupervisedCluster):
    """Workers, parameter servers and an optional evaluator on this machine, as processes or as threads.

    All tasks end with this process, even if it is killed with SIGKILL.

    Args:
        workers: number of workers.
        ps: number of parameter servers.
        in_process: run the same tasks as threads of this process, for debugging with pdb.
        restart: replace a process that exits (or stays stopped). A new parameter server has no variables:
            they are restored from the newest checkpoint, if there is a `CheckpointManager`.
        threads: torch threads of each task; 1 by default, because the tasks share this machine.
        start_timeout_s: how long the start may take.
        evaluator: an `Evaluator` to run in a separate task during training; see `wait_evaluated`.

    Raises:
        TypeError: `evaluator` is not an `Evaluator`, or cannot be pickled.
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
        evaluator: Evaluator | None = None,
    ) -> None:
        for name, count in (("workers", workers), ("ps", ps), ("threads", threads)):
            check_count(name, count)
        check_open_files(workers + ps)
        log_as_environment_says()
        # Every user of the machine can connect to loopback, and workers run the functions that they receive.
        self._key = cluster_key_text() or secrets.token_hex(32)
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
            owner=os.getpid(),
        )
        orders = [
            replace(self._order, job=job, index=index)
            for job, count in (("ps", ps), ("worker", workers))
            for index in range(count)
        ]
        self._evaluated: Path | None = None
        self._files: tempfile.TemporaryDirectory[str] | None = None
        try:
            if evaluator is not None:
                self._files = tempfile.TemporaryDirectory(prefix="stratagem-")
                orders.append(_order_evaluator(self._order, evaluator, Path(self._files.name)))
                self._evaluated = evaluator.directory
            self._tasks = TaskSupervisor(
                functools.partial(_make_launcher, in_process, start_timeout_s),
                orders,
                restart=("worker", "ps", "evaluator") if restart else (),
                start_timeout_s=start_timeout_s,
            )
        except BaseException:
            if self._files is not None:
                self._files.cleanup()
            raise

    @override
    def add_worker(self) -> int:
        """Start one more worker and return its index. A running coordinator uses it within a second.

        Raises:
            MisuseError: the cluster is closed.
            StartupError: the worker was not ready within the cluster's `start_timeout_s`.

        Example:
            >>> import stratagem as sg
            >>> with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
            ...     cluster.add_worker(), cluster.add_worker()
            (1, 2)
        """
        if self._closed:
            raise MisuseError("add_worker: this cluster is closed. Start another sg.LocalCluster.")
        check_open_files(len(self._tasks.indices("worker")) + len(self._tasks.indices("ps")) + 1)
        index = self._tasks.free_index("worker")
        self._tasks.add(replace(self._order, index=index), self._start_timeout_s)
        return index

    def wait_evaluated(self, timeout_s: float = 3600.0) -> list[Evaluation]:
        """Wait until the evaluator has evaluated the final checkpoint (or `max_evaluations`); return all results.

        Call this after ``manager.save(step, final=True)``: closing the cluster ends the evaluator.

        Raises:
            MisuseError: the cluster has no evaluator.
            CheckpointTimeout: the evaluator has not finished within the limit.
            ClusterError: the evaluator raised an error.

        Example:
            >>> import tempfile, torch, stratagem as sg
            >>> directory, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
            >>> evaluator = sg.Evaluator(
            ...     directory,
            ...     lambda: torch.nn.Linear(2, 1),
            ...     lambda model: {"bias": model.bias.item()},
            ... )
            >>> with sg.LocalCluster(1, 1, in_process=True, evaluator=evaluator) as cluster:
            ...     with sg.CheckpointManager(sg.Checkpoint(model=model), directory) as manager:
            ...         _ = manager.save(10, final=True)
            ...     [result] = cluster.wait_evaluated(timeout_s=60)
            >>> result.step, result.metrics["bias"] == model.bias.item()
            (10, True)
        """
        from stratagem._checkpoint import evaluations

        if self._evaluated is None:
            raise MisuseError(
                "this cluster has no evaluator: LocalCluster(evaluator=sg.Evaluator(...))."
            )
        if not self._tasks.wait_ended("evaluator:0", timeout_s):
            raise CheckpointTimeout(
                f"the evaluator of {self._evaluated} has not finished within {timeout_s:g} s. It stops after a "
                "checkpoint that was saved with final=True, or after max_evaluations."
            )
        return evaluations.read(self._evaluated)

    @override
    def close(self) -> None:
        """End every task. May be called again."""
        self._closed = True
        self._tasks.close()
        if self._files is not None:
            self._files.cleanup()

    @override
    def __repr__(self) -> str:
        return f"<LocalCluster [{'closed' if self._closed else repr(self._tasks)}]>"


def _make_launcher(in_process: bool, start_timeout_s: float, on_event: EventHandler) -> Launcher:
    if not in_process:
        return ForkLauncher(on_event, start_timeout_s=start_timeout_s)
    # Imported only here: a process that starts others need not wait for torch.
    from stratagem._cluster.launch.thread_launcher import ThreadLauncher

    return ThreadLauncher(on_event)


def _order_evaluator(order: TaskOrder, evaluator: object, folder: Path) -> TaskOrder:
    """Return the order for the task of an evaluator."""
    from stratagem._checkpoint.evaluator import Evaluator
    from stratagem._cluster.launch.tasks import write_evaluator

    if not isinstance(evaluator, Evaluator):
        raise TypeError(
            f"evaluator={evaluator!r}: expected an sg.Evaluator(directory, build, evaluate), or None."
        )
    write_evaluator(evaluator, folder / "evaluator")
    return replace(order, job="evaluator", index=0, evaluator=str(folder / "evaluator"))
