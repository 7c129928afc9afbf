"""`ThreadLauncher`: runs tasks as threads of this process, for debugging with pdb."""

from __future__ import annotations

import os
import threading
import traceback
from typing import Final, final

from typing_extensions import override

from stratagem._cluster.launch.launcher import EventHandler, TaskEvent, TaskOrder
from stratagem._cluster.launch.tasks import Task, announce, make_task
from stratagem._owner import Owner
from stratagem._wire.task_notices import NoticeHolder
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
        self._lock = threading.Lock()
        self._tasks: dict[Task, tuple[threading.Thread, NoticeHolder]] = {}

    def spawn(self, order: TaskOrder) -> None:
        """Start a task."""
        task = make_task(order, forward_output=False)
        notice = announce(order, task)
        thread = threading.Thread(
            target=self._serve,
            args=(order, task),
            name=f"stratagem-{order.job}-{order.index}",
            daemon=True,
        )
        with self._lock:
            self._tasks[task] = thread, notice
        thread.start()
        self._on_event(TaskEvent(kind="started", task=order.task, pid=os.getpid()))
        self._on_event(
            TaskEvent(kind="ready", task=order.task, pid=os.getpid(), address=task.address)
        )

    def _serve(self, order: TaskOrder, task: Task) -> None:
        text, code = "retired", 0
        try:
            task.serve()
        except Exception:  # noqa: BLE001 - reported as the output of a process is
            for line in traceback.format_exc().splitlines():
                self._on_event(TaskEvent(kind="output", task=order.task, text=line))
            text, code = "failed", 1
        with self._lock:
            if task not in self._tasks:
                return  # the launcher closes it
            _, notice = self._tasks.pop(task)
        notice.close()
        task.close()
        pid = os.getpid()
        self._on_event(TaskEvent(kind="exited", task=order.task, pid=pid, text=text, code=code))

    def stop(self, task: str, signal_number: int) -> None:
        """Raise an error: a thread cannot be killed.

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
        with self._lock:
            tasks, self._tasks = self._tasks, {}
        for task, (_, notice) in tasks.items():
            notice.close()
            task.close()
        for thread, _ in tasks.values():
            thread.join(CLOSE_S)
