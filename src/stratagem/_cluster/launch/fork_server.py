"""Processes of a local cluster: starting, watching and ending them.

The only door to subprocess, fork and signals. `LocalCluster` talks to a `ForkServer`, a small process
that has imported torch once and forks the tasks from then on: a task (or its replacement after a
loss) is there in a fraction of a second instead of the seconds an import takes.

Who watches whom::

    user's process ──commands──▶ fork server ──fork──▶ task, task, …
                   ◀──events────             ◀──status, output──

- The user's process is gone (even by SIGKILL): the command pipe ends, or the fork server's parent
  changes; it kills its tasks and ends.
- The fork server is gone: the kernel kills its tasks (PR_SET_PDEATHSIG). This is safe here because
  the fork server has one thread, so "the thread that forked ended" means "the process ended".
- A task is gone: the fork server reaps it, kills what is left of its process group and reports it.
- A task is stopped (SIGSTOP) for longer than its limit: the fork server kills it.

The fork server never computes, so no thread pool of OpenMP exists at the time of a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from typing_extensions import override

from stratagem._owner import Owner
from stratagem.errors import StartupError

_log = logging.getLogger("stratagem.cluster")

PR_SET_PDEATHSIG: Final = 1
CHECK_PARENT_S: Final = 1.0
"""How often the fork server looks whether its parent changed and whether a task is stopped."""

LINE_LIMIT: Final = 8192
"""Longest line of a task's output that is passed on whole."""

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from stratagem._cluster.launch.fork_server import fork_server_main; "
    "fork_server_main(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True, kw_only=True)
class TaskOrder:
    """What the fork server needs to start one task."""

    job: str
    index: int
    address: str = "127.0.0.1:0"
    key: str = ""
    threads: int = 1
    stopped_limit_s: float = 0.0
    """Kill the task when it was stopped this long; 0 means never."""

    @property
    def name(self) -> str:
        """Such as ``worker:0``."""
        return f"{self.job}:{self.index}"


@dataclass(frozen=True, kw_only=True)
class TaskEvent:
    """What the fork server reports about one task.

    `kind`: ``spawned``, ``ready`` (`text` is the address), ``line`` (`text` of its output),
    ``exited`` (`text` says how), ``lost`` (the fork server itself is gone).
    """

    kind: str
    task: str = ""
    pid: int = 0
    text: str = ""


class ForkServer(Owner):
    """The user's side: gives orders, hears events on a thread of its own.

    Args:
        on_event: called on the listening thread for every event; must not block.
        start_timeout_s: how long the server may take to import what tasks need.

    Raises:
        StartupError: it did not start in time, or ended while starting.
    """

    def __init__(
        self, on_event: Callable[[TaskEvent], None], *, start_timeout_s: float = 60.0
    ) -> None:
        self._on_event = on_event
        self._closing = False
        self._up = threading.Event()
        command_read, self._command = os.pipe()
        self._events, event_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _BOOT,
                    str(command_read),
                    str(event_write),
                    json.dumps(sys.path),
                ],
                pass_fds=(command_read, event_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the user's process, which then closes us
            )
        except BaseException:  # Ctrl-C too: nobody else knows these descriptors
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
            if not self._up.wait(start_timeout_s) or self._process.poll() is not None:
                raise StartupError(
                    f"the process that starts tasks was not ready within {start_timeout_s:g} s (exit "
                    f"status {self._process.poll()!r}); its error, if any, is on standard error."
                )
        except BaseException:  # Ctrl-C too: nobody else knows the process
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process number of the fork server."""
        return self._process.pid

    def spawn(self, order: TaskOrder) -> None:
        """Starts a task; ``spawned`` and ``ready`` events follow."""
        self._command_line({"do": "spawn", **asdict(order)})

    @override
    def close(self, timeout_s: float = 10.0) -> None:
        """Kills every task and the fork server; returns when they are gone. May be called again."""
        if self._closing:
            return
        self._closing = True
        with self._send_lock:
            os.close(self._command)
        if not self._up.is_set():
            self._process.kill()  # it imports, for seconds, and has no tasks yet
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _log.warning("the process that starts tasks did not end in %g s: killed", timeout_s)
            self._process.kill()
            self._process.wait()
        if self._thread.ident is None:
            os.close(self._events)
        else:
            self._thread.join(timeout_s)

    def _command_line(self, command: dict[str, Any]) -> None:
        with self._send_lock:
            if self._closing:
                return
            with contextlib.suppress(BrokenPipeError):  # a 'lost' event tells the owner
                os.write(self._command, json.dumps(command).encode() + b"\n")

    def _listen(self) -> None:
        with os.fdopen(self._events, "rb", buffering=1 << 16) as stream:
            for line in stream:
                event = TaskEvent(**json.loads(line))
                if event.kind == "up":
                    self._up.set()
                else:
                    self._deliver(event)
        self._up.set()
        if not self._closing:
            self._deliver(TaskEvent(kind="lost"))

    def _deliver(self, event: TaskEvent) -> None:
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - the listener must outlive a mistake in its owner
            _log.exception("handling %r failed", event)

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closing else f"pid {self._process.pid}"
        return f"<ForkServer [{state}]>"


# ---------------------------------------------------------------------- in the fork server


@dataclass
class _Child:
    order: TaskOrder
    pid: int
    output: int
    status: int
    pending: dict[int, bytes] = field(default_factory=dict)
    stopped_since: float | None = None


class _Server:
    """The loop of the fork server."""

    def __init__(self, command: int, events: int) -> None:
        self._command = command
        self._events = events
        self._parent = os.getppid()
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
        self._report("up")
        next_check = time.monotonic() + CHECK_PARENT_S
        try:
            while os.getppid() == self._parent:
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
                    next_check = time.monotonic() + CHECK_PARENT_S
                    self._kill_stopped()
        finally:
            self._kill_all()

    def _obey(self) -> bool:
        """Carries out what the pipe holds; False when the user's process is gone."""
        data = os.read(self._command, 1 << 16)
        if not data:
            return False
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            what = command.pop("do")
            if what == "spawn":
                self._spawn(TaskOrder(**command))
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
        self._report("spawned", child)

    def _become_task(self, order: TaskOrder, server: int, output: int, status: int) -> NoReturn:
        """In the fresh child: forget the server, then be the task until the end."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Ctrl-C at the terminal is not for tasks (`start_new_session`). Who sends it to one ends it; a
        # KeyboardInterrupt in a worker is therefore always one that a function raised.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent(server)
        os.setpgid(0, 0)
        self._selector.close()
        for descriptor in (self._command, self._events, self._wake_read, self._wake_write):
            os.close(descriptor)
        for child in self._children.values():
            # Those still open: the number of one that has been closed may be that of our own pipe.
            for descriptor in child.pending:
                os.close(descriptor)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable()
        _new_randomness()
        run_task(order, lambda address: _write_line(status, f"ready {address}"))
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
        for line in lines:
            text = line.decode("utf-8", "replace")
            if descriptor == child.output:
                self._report("line", child, text[:LINE_LIMIT])
            elif text.startswith("ready "):
                self._report("ready", child, text.removeprefix("ready "))
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
                os.killpg(pid, signal.SIGKILL)  # what the task itself had started
            for descriptor in list(child.pending):
                self._read_child(child, descriptor)
            for descriptor in list(child.pending):  # held open by somebody: read no further
                self._selector.unregister(descriptor)
                os.close(descriptor)
            del self._children[pid]
            self._report("exited", child, describe_status(status))

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

    def _report(self, kind: str, child: _Child | None = None, text: str = "") -> None:
        event = TaskEvent(
            kind=kind,
            task=child.order.name if child else "",
            pid=child.pid if child else 0,
            text=text,
        )
        with contextlib.suppress(BrokenPipeError):  # the command pipe ends too and ends the loop
            _write_line(self._events, json.dumps(asdict(event)))


def fork_server_main(command: int, events: int) -> None:
    """Entry of the fork server's process."""
    os.set_inheritable(command, False)
    os.set_inheritable(events, False)
    _import_what_tasks_need()
    gc.collect()
    gc.freeze()  # pages shared with the children stay shared
    _Server(command, events).run()


def _import_what_tasks_need() -> None:
    """Imports once, before any fork, what every task would otherwise import for itself."""
    import torch

    import stratagem._cluster.launch.tasks
    import stratagem._strategies.parameter_server  # noqa: F401

    # The first optimizer of a process makes torch import its compiler, 1.5 s: here, not in each
    # task's first step.
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.1).step()


def run_task(order: TaskOrder, ready: Callable[[str], None]) -> None:
    """Runs one task in this process until it ends."""
    import torch

    from stratagem._cluster.launch.tasks import make_task
    from stratagem._ps.malloc import keep_freed_memory

    torch.set_num_threads(order.threads)
    if order.job == "worker":
        keep_freed_memory()
    with make_task(order.job, order.index, order.address, key=order.key or None) as task:
        ready(task.address)
        task.serve()


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when `parent` (one thread) ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        state = stat.rpartition(") ")[2][:1]
    except OSError:
        return False
    return state in ("T", "t")


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process; nothing happens if it is gone."""
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def describe_status(status: int) -> str:
    """How a process ended, from its wait status.

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


def _new_randomness() -> None:
    """A fork repeats its parent's random numbers unless it is told to begin anew."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))  # noqa: NPY002 - the global state is meant
    torch.seed()


def _write_line(descriptor: int, text: str) -> None:
    data = text.encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def dump_stacks(file: Any) -> None:
    """Writes the stacks of all threads of this process (for the watchdog)."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        file.write(f"\nThread {names.get(ident, ident)}:\n")
        traceback.print_stack(frame, file=file)


def run_python(script: str, *, timeout_s: float) -> str:
    """Run a script in a fresh Python process; returns what it printed.

    Raises:
        StartupError: it failed or took longer than `timeout_s`; the error carries what it said.

    Example:
        >>> run_python("print(6 * 7)", timeout_s=30)
        '42'
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"a Python process did not finish within {timeout_s:g} s") from error
    if done.returncode != 0:
        raise StartupError(
            f"a Python process ended with code {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return done.stdout.strip()
