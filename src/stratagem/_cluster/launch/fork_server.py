"""The fork server: a process that imports torch once and then forks the tasks of a local cluster.

A task (or its replacement after a loss) starts in a fraction of a second instead of the seconds an import
takes. `fork_launcher.py` starts this process and talks to it.

Which process watches which::

    user's process ──commands──▶ fork server ──fork──▶ task, task, …
                   ◀──events────             ◀──status, output──

- The user's process ends (even by SIGKILL): the command pipe ends, or the fork server's parent changes. The
  fork server kills its tasks and ends. A child of the user's process may hold copies of the pipes, so neither
  the end of a pipe nor a writable one is waited for without watching the parent.
- The fork server ends: the kernel kills its tasks (PR_SET_PDEATHSIG). This is safe because the fork server
  has one thread, so the end of the thread that forked is the end of the process.
- A task ends: the fork server reaps it, kills the rest of its process group and reports it.
- A task is stopped (SIGSTOP) for longer than its limit: the fork server kills it.

The fork server never computes, so no thread pool of OpenMP exists at the time of a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import select
import selectors
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from stratagem import config
from stratagem._cluster.launch.launcher import TaskEvent, TaskOrder, import_all
from stratagem._cluster.launch.task_process import name_process
from stratagem._cluster.launch.tasks import run_task

PR_SET_PDEATHSIG: Final = 1

CHECK_S: Final = 1.0
"""How often the fork server checks its parent and looks for stopped tasks."""

LINE_LIMIT: Final = 8192
"""Longest line of a task's output that is passed on whole."""


@dataclass
class _Child:
    order: TaskOrder
    pid: int
    output: int
    status: int
    pending: dict[int, bytes] = field(default_factory=dict)  # read so far, by open descriptor
    stopped_since: float | None = None


class _Server:
    """The loop of the fork server."""

    def __init__(self, command: int, events: int, parent: int) -> None:
        self._command = command
        self._events = events
        self._parent = parent
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(command, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._commands = b""

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.set_blocking(self._events, False)
        next_check = time.monotonic() + CHECK_S
        try:
            self._write_event("up")
            while not self._is_orphan():
                for key, _ in self._selector.select(max(0.0, next_check - time.monotonic())):
                    if key.fd == self._command:
                        if not self._obey():
                            return
                    elif key.fd == self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    else:
                        self._read_child(key.data, key.fd)
                self._reap()
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + CHECK_S
                    self._kill_stopped()
        finally:
            self._kill_all()

    def _obey(self) -> bool:
        """Start the tasks that the command pipe orders; return False when it has ended."""
        data = os.read(self._command, 1 << 16)
        if not data:
            return False
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            self._spawn(TaskOrder(**json.loads(line)))
        return True

    def _spawn(self, order: TaskOrder) -> None:
        output_read, output_write = os.pipe()
        status_read, status_write = os.pipe()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_task(order, server, output_write, status_write)
            except BaseException:  # noqa: BLE001 - nothing may return into the server's loop
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(1)
        os.close(output_write)
        os.close(status_write)
        child = _Child(order, pid, output_read, status_read)
        self._children[pid] = child
        for descriptor in (output_read, status_read):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, child)
            child.pending[descriptor] = b""
        self._report(TaskEvent(kind="started", task=order.task, pid=pid))

    def _become_task(self, order: TaskOrder, server: int, output: int, status: int) -> NoReturn:
        """Run a task in the new child process until its end."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Ctrl-C at the terminal does not reach tasks (`start_new_session`). A SIGINT sent to a task ends
        # it, so a KeyboardInterrupt in a worker is always one that a function raised.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent(server)
        os.setpgid(0, 0)
        self._selector.close()
        for descriptor in (self._command, self._events, self._wake_read, self._wake_write):
            os.close(descriptor)
        for child in self._children.values():
            # Only those still open: a closed descriptor's number may now belong to our own pipe.
            for descriptor in child.pending:
                os.close(descriptor)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable()
        for name, value in order.environment.items():
            config.set_environment(name, value)
        _reseed()
        run_task(order, lambda address: _write_line(status, address))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _read_child(self, child: _Child, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        *lines, rest = (child.pending[descriptor] + data).split(b"\n")
        if (len(rest) > LINE_LIMIT or not data) and rest:
            lines.append(rest)
            rest = b""
        child.pending[descriptor] = rest
        task = child.order.task
        for line in lines:
            text = line.decode("utf-8", "replace")
            if descriptor == child.output:
                self._report(TaskEvent(kind="output", task=task, text=text[:LINE_LIMIT]))
            else:
                self._report(TaskEvent(kind="ready", task=task, pid=child.pid, address=text))
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            del child.pending[descriptor]

    def _reap(self) -> None:
        for pid, child in list(self._children.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found == 0:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # processes that the task itself had started
            for descriptor in list(child.pending):
                self._read_child(child, descriptor)
            for descriptor in list(child.pending):  # held open by another process: read no further
                self._selector.unregister(descriptor)
                os.close(descriptor)
            del self._children[pid]
            how, code = describe_status(status), os.waitstatus_to_exitcode(status)
            task = child.order.task
            self._report(TaskEvent(kind="exited", task=task, pid=pid, text=how, code=code))

    def _kill_stopped(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.order.stopped_limit_s <= 0 or not is_stopped(child.pid):
                child.stopped_since = None
            elif child.stopped_since is None:
                child.stopped_since = now
            elif now - child.stopped_since >= child.order.stopped_limit_s:
                os.kill(child.pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _is_orphan(self) -> bool:
        return os.getppid() != self._parent

    def _report(self, event: TaskEvent) -> None:
        self._write_event(json.dumps(asdict(event)))

    def _write_event(self, text: str) -> None:
        """Write a line for the user's process; give up when that process has ended."""
        data = text.encode() + b"\n"
        while data and not self._is_orphan():
            try:
                data = data[os.write(self._events, data) :]
            except BlockingIOError:
                select.select([], [self._events], [], CHECK_S)
            except BrokenPipeError:  # the command pipe ends too and ends the loop
                return


def fork_server_main(command: int, events: int, parent: int) -> None:
    """Run the fork server's process, until `parent` ends or asks for it."""
    os.set_inheritable(command, False)
    os.set_inheritable(events, False)
    name_process("sg-fork-server")
    import_all()
    gc.freeze()  # pages shared with the children stay shared
    gc.enable()
    _Server(command, events, parent).run()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` (one thread) ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] in ("T", "t")


def describe_status(status: int) -> str:
    """Say how a process ended, from its wait status.

    Example:
        >>> describe_status(9), describe_status(3 << 8)
        ('killed by SIGKILL', 'exited with status 3')
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _reseed() -> None:
    """Seed the random generators anew: a fork has a copy of its parent's."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))  # noqa: NPY002 - the global state is meant
    torch.seed()


def _write_line(descriptor: int, text: str) -> None:
    data: Any = text.encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]
