"""Warm start: clusters of the tests fork from a process that has already imported torch.

A `LocalCluster` starts a fork server, a new Python process that imports torch and its compiler. The
import takes four seconds of processor time, and the tests start more than a hundred clusters. So each
test process keeps one *warm* process that has made these imports. Instead of starting a new interpreter,
a test's cluster asks the warm process to fork, and the fork becomes the fork server. Everything else is
as in a user's program; tests of whole programs (commands, examples, scripts) start cold all the same.

Loaded by the root ``conftest.py``. Set ``STRATAGEM_TEST_COLD_START=1`` to do without it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from typing import Any

import pytest

ANSWER_LIMIT_S = 120.0

# Runs in the warm process, in a fresh interpreter: reads requests, forks, answers with pid and pidfd.
_WARM = """
import gc, json, os, signal, socket, sys, traceback
sys.path[:] = json.loads(sys.argv[2])
from stratagem._cluster.launch import fork_server
fork_server.import_all()
gc.collect()
gc.freeze()
line = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
while True:
    data, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 3)
    if not data:
        break
    command, events, errors = descriptors
    request = json.loads(data)
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            line.close()
            os.setsid()
            os.dup2(errors, 2)
            os.close(errors)
            os.chdir(request["directory"])
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.path[:] = request["path"]
            fork_server.fork_server_main(command, events, os.getppid())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    watch = os.pidfd_open(pid)
    socket.send_fds(line, [str(pid).encode()], [watch])
    for descriptor in (command, events, errors, watch):
        os.close(descriptor)
"""


class WarmProcess:
    """The part of `subprocess.Popen` that a fork server's owner uses, for a fork of the warm process."""

    def __init__(self, pid: int, watch: int) -> None:
        self.pid = pid
        self._watch: int | None = watch

    def _ended(self, timeout_s: float | None) -> bool:
        if self._watch is not None:
            ready, _, _ = select.select([self._watch], [], [], timeout_s)
            if ready:
                os.close(self._watch)
                self._watch = None
        return self._watch is None

    def poll(self) -> int | None:
        return 0 if self._ended(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
        return 0

    def kill(self) -> None:
        if self._watch is not None:
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)


class Starter:
    """The warm process, and the connection to it."""

    def __init__(self) -> None:
        self._line, other = socket.socketpair()
        self._line.settimeout(ANSWER_LIMIT_S)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WARM, str(other.fileno()), json.dumps(sys.path)],
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(self, command: int, events: int, path: list[str]) -> WarmProcess:
        """Let the warm process fork a fork server that has the two descriptors."""
        request = {"environment": dict(os.environ), "directory": os.getcwd(), "path": path}
        socket.send_fds(self._line, [json.dumps(request).encode()], [command, events, 2])
        data, descriptors, _, _ = socket.recv_fds(self._line, 64, 1)
        if not data:
            raise RuntimeError("the warm process has ended; its error is on standard error")
        return WarmProcess(int(data), descriptors[0])

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait(ANSWER_LIMIT_S)


_starters: list[Starter] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the warm process if any test of this session starts processes."""
    cold = os.environ.get("STRATAGEM_TEST_COLD_START") == "1"
    fast = all("fast" in item.keywords for item in session.items)
    if cold or fast or session.config.option.collectonly:
        return
    from stratagem._cluster.launch import fork_launcher

    _starters.append(Starter())
    fork_launcher.subprocess = types.SimpleNamespace(  # type: ignore[attr-defined]
        **{**vars(subprocess), "Popen": _popen}
    )


def _popen(command: list[str], **options: Any) -> Any:
    """Start a fork server warm, and anything else as usual."""
    from stratagem._cluster.launch import fork_launcher

    if command[1:3] != ["-c", fork_launcher._BOOT]:
        return subprocess.Popen(command, **options)
    sys.audit("subprocess.Popen", command[0], command, None, None)  # `kinds` counts it
    return _starters[0].fork(int(command[3]), int(command[4]), json.loads(command[5]))


def pytest_unconfigure() -> None:
    """End the warm process."""
    while _starters:
        _starters.pop().close()
