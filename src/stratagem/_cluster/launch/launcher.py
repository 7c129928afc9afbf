"""The `Launcher` interface: starts and stops the tasks of a cluster.

A launcher starts one process (or thread) per order and reports what happens to it; `TaskSupervisor` decides.
`fork_launcher.py` starts processes on this machine, `thread_launcher.py` threads of this process.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from stratagem.errors import StartupError


@dataclass(frozen=True, kw_only=True)
class TaskOrder:
    """Order to start one task. Plain data: it may be sent to another machine."""

    job: str
    index: int
    address: str = "127.0.0.1:0"  # to listen on; with port 0 a free one is taken
    key: str = ""  # of the cluster
    threads: int = 1  # of torch
    environment: Mapping[str, str] = field(default_factory=dict)  # set for this task only
    any_optimizer: bool = False  # of any module: the coordinator is a program of the same user
    checkpoint_directories: Sequence[str] = ()  # below which a parameter server may write
    stopped_limit_s: float = 0.0  # kill the task when it was stopped (SIGSTOP) so long; 0: never
    owner: int = 0  # process of the cluster, by which `stratagem top` tells clusters apart
    evaluator: str = ""  # file of a packed `Evaluator`, for the job "evaluator"

    @property
    def task(self) -> str:
        """Name of the task, such as ``worker:0``."""
        return f"{self.job}:{self.index}"

    @property
    def ends(self) -> bool:
        """True if the task ends by itself, and is replaced only if a signal killed it."""
        return self.job == "evaluator"


@dataclass(frozen=True, kw_only=True)
class TaskEvent:
    """Report of a launcher about one task.

    - ``started``: the process `pid` exists.
    - ``ready``: the task listens at `address`.
    - ``output``: it printed the line `text`.
    - ``exited``: the process is gone; `text` says how it ended, `code` is its exit code (negative: the signal).
    - ``lost``: the launcher itself failed, and every task with it; `task` is empty.
    """

    kind: Literal["started", "ready", "output", "exited", "lost"]
    task: str = ""
    pid: int = 0
    address: str = ""
    text: str = ""
    code: int | None = None


EventHandler = Callable[[TaskEvent], None]
"""Receives events, on a thread of the launcher; must not block, and must not raise."""


class Launcher(Protocol):
    """Starts and stops tasks. Made with an `EventHandler`."""

    def spawn(self, order: TaskOrder) -> None:
        """Start a task. ``started`` follows, then ``ready``, and ``exited`` in the end."""

    def stop(self, task: str, signal_number: int) -> None:
        """Send a signal to a task; SIGKILL ends it. Does nothing if the task is gone."""

    def close(self) -> None:
        """Kill every task; return when all are gone. May be called again."""


FILES: Final = 32  # Python, torch, a listening socket and a few connections
FILES_PER_TASK: Final = 3  # two pipes of the fork server, or the connections of a coordinator


def check_open_files(tasks: int) -> None:
    """Raise if the limit of open files is too low for a cluster of this size.

    Raises:
        StartupError: the limit, and how to raise it.
    """
    needed, limit = FILES + FILES_PER_TASK * tasks, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < needed:  # -1 means no limit
        raise StartupError(
            f"this process may have {limit} files and sockets open, and a cluster of {tasks} tasks needs "
            f"{needed}: raise the limit with `ulimit -n {max(1024, needed)}`."
        )


def import_all() -> None:
    """Import what a process of a cluster needs sooner or later, and torch's compiler, which every optimizer imports."""
    import torch

    import stratagem._strategies.parameter_server  # noqa: F401

    torch.compiler.disable(import_all)


def import_meanwhile() -> None:
    """Import what this process needs when its cluster is up, while the cluster's processes start.

    A process that has not imported torch only owns the cluster, and needs none of it.
    """
    if "torch" in sys.modules:
        import_all()
