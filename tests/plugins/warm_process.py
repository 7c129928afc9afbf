"""The warm process: imports torch and Stratagem once, then forks fork servers and whole programs for the tests.

Run as a script by `warm_start.py`: ``warm_process.py DESCRIPTOR PATH``. A request is one JSON object with descriptors.

| request     | descriptors                           | reply                                                |
|-------------|---------------------------------------|------------------------------------------------------|
| fork server | commands, events, standard error      | its process number, and a pidfd                      |
| program     | stdin, stdout, stderr, a pipe         | none; the pipe gets the process number, then the wait status |

A program's parent is a small process that waits for it and writes the status into the pipe.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
import types
from typing import Any


def main() -> None:
    """Serve requests until the connection ends. Returns only in the fork that runs a program."""
    sys.path[:] = json.loads(sys.argv[2])
    from stratagem._cluster.launch import launcher

    launcher.import_all()
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 4)
        if not data:
            return
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            line.close()
            if request["kind"] == "program":
                _run_program(request, descriptors)
                return
            _run_fork_server(request, descriptors)
        if request["kind"] != "program":
            watch = os.pidfd_open(pid)
            socket.send_fds(line, [str(pid).encode()], [watch])
            os.close(watch)
        for descriptor in descriptors:
            os.close(descriptor)


def _set_up(request: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]


def _run_fork_server(request: dict[str, Any], descriptors: list[int]) -> None:
    from stratagem._cluster.launch import fork_server

    try:
        command, events, errors = descriptors
        _set_up(request)
        sys.argv[:] = request["command line"]
        os.setsid()
        os.dup2(errors, 2)
        os.close(errors)
        fork_server.fork_server_main(command, events, os.getppid())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _run_program(request: dict[str, Any], descriptors: list[int]) -> None:
    """Fork the program, and wait for it in this process. Returns in the program when it has ended."""
    *standard, status = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program:
        for number, descriptor in enumerate(standard):
            os.close(descriptor)
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        os.write(status, f"{program}\n".encode())
        _, waited = os.waitpid(program, 0)
        os.write(status, f"{waited}\n".encode())
        os._exit(0)
    os.close(status)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _set_up(request)
    from stratagem._cluster.launch import fork_launcher

    fork_launcher.subprocess = types.SimpleNamespace(  # type: ignore[attr-defined]
        **{**vars(subprocess), "Popen": _start_fork_server}
    )
    first, *rest = request["arguments"]
    if first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    elif first == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        module.__file__ = first
        with open(first, encoding="utf-8") as source:
            exec(compile(source.read(), first, "exec"), vars(module))


def _start_fork_server(command: list[str], **options: Any) -> Any:
    """Fork a fork server from a program, whose modules it needs."""
    from stratagem._cluster.launch import fork_launcher, fork_server

    if command[1:3] != ["-c", fork_launcher._BOOT]:
        return subprocess.Popen(command, **options)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 0)
            os.dup2(nowhere, 1)
            kept = {int(command[3]), int(command[4])}
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in kept:
                    try:
                        os.close(descriptor)
                    except OSError:
                        pass  # of the listing itself
            fork_server.fork_server_main(int(command[3]), int(command[4]), parent)
            os._exit(0)
        finally:
            os._exit(1)
    return _Child(pid)


class _Child:
    """The part of `subprocess.Popen` that a fork server's owner uses, for a fork of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        import select

        if self._status is None:
            watch = os.pidfd_open(self.pid)
            ready, _, _ = select.select([watch], [], [], timeout)
            os.close(watch)
            if not ready:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            self.poll()
        return self._status or 0

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
