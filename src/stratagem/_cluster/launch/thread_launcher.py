"""`ThreadLauncher`: runs tasks as threads of this process, for debugging with pdb."""

from __future__ import annotations

import os
import threading
from typing import Final, final

from typing_extensions import override

from stratagem._cluster.launch.launcher import EventHandler, TaskEvent, TaskOrder
from stratagem._cluster.launch.tasks import Task, make_task
from stratagem._owner import Owner
from stratagem.errors import MisuseError

CLOSE_S: Final = 10.0
"""How long `close` waits for a task's thread."""


@final
class ThreadLauncher(Owner):
    """Tasks in threads. Environment variables and the number of torch's threads are the process's own.

    Args:
        on_event: receives the events, on the thread that calls `spawn`.
    """

    def __init__(self, on_event: EventHandler) -> None:
        self._on_event = on_event
        self._tasks: list[tuple[Task, threading.Thread]] = []

    def spawn(self, order: TaskOrder) -> None:
        """Start a task."""
        task = make_task(
            order.job,
            order.index,
            order.address,
            key=order.key or None,
            forward_output=False,
            any_optimizer=order.any_optimizer,
            checkpoint_directories=order.checkpoint_directories,
        )
        thread = threading.Thread(
            target=task.serve, name=f"stratagem-{order.job}-{order.index}", daemon=True
        )
        thread.start()
        self._tasks.append((task, thread))
        self._on_event(TaskEvent(kind="started", task=order.task, pid=os.getpid()))
        self._on_event(
            TaskEvent(kind="ready", task=order.task, pid=os.getpid(), address=task.address)
        )

    def stop(self, task: str, signal_number: int) -> None:
        """Refuse: a thread cannot be killed.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            f"{task} is a thread of this process: only processes can be signalled. Use "
            "LocalCluster(in_process=False)."
        )

    @override
    def close(self) -> None:
        """End every task. May be called again."""
        for task, _ in self._tasks:
            task.close()
        for _, thread in self._tasks:
            thread.join(CLOSE_S)
        self._tasks.clear()
