"""`ForkLauncher`: starts tasks as processes on this machine, through a fork server.

The user's side of `fork_server.py`. Together they are the only modules that use subprocess, fork and signals.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Final, final

from typing_extensions import override

from stratagem._cluster.launch.launcher import EventHandler, TaskEvent, TaskOrder, import_meanwhile
from stratagem._owner import Owner
from stratagem.errors import StartupError

_log = logging.getLogger("stratagem.cluster")

CLOSE_S: Final = 10.0
"""How long `close` waits for the fork server, which kills its tasks in milliseconds."""

_BOOT: Final = (
    "import gc, json, os, sys; gc.disable(); command, events, path, parent, arguments = sys.argv[1:]; "
    "sys.path[:], sys.argv[:] = json.loads(path), json.loads(arguments); "
    "from stratagem._cluster.launch.fork_server import fork_server_main; "
    "fork_server_main(int(command), int(events), int(parent)); os._exit(0)"
)
"""Tasks get the command line of the user's process, for modules that parse it when they are imported. Garbage
collection would take a sixth of the start, and freeing every module most of the end."""


@final
class ForkLauncher(Owner):
    """A fork server and the connection to it.

    Args:
        on_event: receives the events.
        start_timeout_s: how long the fork server may take to import what tasks need.

    Raises:
        StartupError: the fork server did not start in time, or ended while starting.
    """

    def __init__(self, on_event: EventHandler, *, start_timeout_s: float = 60.0) -> None:
        self._on_event = on_event
        self._closing = False
        self._up = threading.Event()
        self._pids: dict[str, int] = {}
        command_read, self._command = os.pipe()
        self._events, event_write = os.pipe()
        arguments = [str(command_read), str(event_write), json.dumps(sys.path), str(os.getpid())]
        arguments.append(json.dumps(sys.argv))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                pass_fds=(command_read, event_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the user's process, which then closes us
            )
        except BaseException:  # Ctrl-C too: nothing else would close these descriptors
            os.close(self._command)
            os.close(self._events)
            raise
        finally:
            os.close(command_read)
            os.close(event_write)
        self._send_lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._listen, name="stratagem-task-events", daemon=True
        )
        try:
            self._thread.start()
            import_meanwhile()
            if not self._up.wait(start_timeout_s) or self._process.poll() is not None:
                raise StartupError(
                    f"the process that starts tasks was not ready within {start_timeout_s:g} s (exit "
                    f"status {self._process.poll()!r}); its error, if any, is on standard error."
                )
        except BaseException:  # Ctrl-C too: nothing else would end the process
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process number of the fork server."""
        return self._process.pid

    def spawn(self, order: TaskOrder) -> None:
        """Start a task."""
        with self._send_lock:
            if not self._closing:
                with contextlib.suppress(BrokenPipeError):  # a 'lost' event follows
                    os.write(self._command, json.dumps(asdict(order)).encode() + b"\n")

    def stop(self, task: str, signal_number: int) -> None:
        """Send a signal to a task; do nothing if it is gone."""
        pid = self._pids.get(task, 0)
        if pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    @override
    def close(self) -> None:
        """Kill every task and the fork server; return when they are gone. May be called again."""
        if self._closing:
            return
        self._closing = True
        with self._send_lock:
            os.close(self._command)
        if not self._up.is_set():
            self._process.kill()  # it imports, for seconds, and has no tasks yet
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            _log.warning("the process that starts tasks did not end in %g s: killed", CLOSE_S)
            self._process.kill()
            self._process.wait()
        if self._thread.ident is None:
            os.close(self._events)
        else:
            self._thread.join(CLOSE_S)

    def _listen(self) -> None:
        with os.fdopen(self._events, "rb", buffering=1 << 16) as stream:
            for line in stream:
                if not self._up.is_set():
                    self._up.set()  # the first line says only that the fork server is ready
                    continue
                event = TaskEvent(**json.loads(line))
                if event.kind == "started":
                    self._pids[event.task] = event.pid
                elif event.kind == "exited":
                    self._pids.pop(event.task, None)
                self._on_event(event)
        self._up.set()
        if not self._closing:
            self._on_event(TaskEvent(kind="lost", text="the process that starts tasks is gone"))

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closing else f"pid {self._process.pid}"
        return f"<ForkLauncher [{state}]>"
