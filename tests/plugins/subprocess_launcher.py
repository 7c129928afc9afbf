"""A second launcher: one plain Python process per task, on every interface of this machine.

Slow, and without the fork server's guarantees; it shows that `TaskSupervisor` needs nothing but the interface.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict

from warm_start import Program

from stratagem._cluster.launch.launcher import EventHandler, TaskEvent, TaskOrder

READY = "listens at "

RUN = f"""
import json, sys
from stratagem._cluster.launch.launcher import TaskOrder
from stratagem._cluster.launch.tasks import run_task
def tell(address):  # not to sys.stdout: a coordinator that has connected already gets what is printed there
    print({READY!r} + address, file=sys.__stdout__, flush=True)
run_task(TaskOrder(**json.loads(sys.argv[1])), tell)
"""


class SubprocessLauncher:
    """See `Launcher`."""

    def __init__(self, on_event: EventHandler) -> None:
        self._on_event = on_event
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def spawn(self, order: TaskOrder) -> None:
        if self._closed:
            return
        process = Program(
            [sys.executable, "-c", RUN, json.dumps(asdict(order))],
            env={**os.environ, **order.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes[order.task] = process
        self._on_event(TaskEvent(kind="started", task=order.task, pid=process.pid))
        thread = threading.Thread(target=self._watch, args=(order.task, process))
        self._threads.append(thread)
        thread.start()

    def stop(self, task: str, signal_number: int) -> None:
        self._processes[task].send_signal(signal_number)

    def close(self) -> None:
        self._closed = True
        for process in self._processes.values():
            process.kill()
        while self._threads:
            self._threads.pop().join(30)

    def _watch(self, task: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                text = line.removesuffix("\n")
                if text.startswith(READY):
                    address = text.removeprefix(READY)
                    self._on_event(
                        TaskEvent(kind="ready", task=task, pid=process.pid, address=address)
                    )
                else:
                    self._on_event(TaskEvent(kind="output", task=task, text=text))
        code = process.wait()
        self._on_event(TaskEvent(kind="exited", task=task, pid=process.pid, text=f"code {code}"))
