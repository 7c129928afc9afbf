"""Warm start: clusters and programs of the tests fork from a process that has already imported torch.

A `LocalCluster` starts a fork server, a new Python process that imports torch and its compiler. The
import takes four seconds of processor time, and the tests start more than a hundred clusters. So each
test process keeps one *warm* process that has made these imports (`warm_process.py`). Instead of starting a
new interpreter, a test's cluster asks the warm process to fork, and the fork becomes the fork server.

Scripts and commands that a test starts with `Program` or `run_program` fork from it too: real processes, with their
own descriptors, environment, signals and exit status. Tests that are about loading or installing the package, and
the examples, use `subprocess` and start cold.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ANSWER_LIMIT_S = 120.0

WARM = Path(__file__).with_name("warm_process.py")


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
        # Packets: a request arrives whole, and alone.
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(ANSWER_LIMIT_S)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, str(WARM), str(other.fileno()), json.dumps(sys.path)],
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fork(self, command: int, events: int, path: list[str]) -> WarmProcess:
        """Let the warm process fork a fork server that has the two descriptors."""
        request = {"environment": dict(os.environ), "directory": os.getcwd(), "path": path}
        request["command line"] = sys.argv
        data = json.dumps({"kind": "fork server", **request}).encode()
        socket.send_fds(self._line, [data], [command, events, 2])
        data, descriptors, _, _ = socket.recv_fds(self._line, 64, 1)
        if not data:
            raise RuntimeError("the warm process has ended; its error is on standard error")
        return WarmProcess(int(data), descriptors[0])

    def run(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Let the warm process fork a program."""
        data = json.dumps({"kind": "program", **request}).encode()
        socket.send_fds(self._line, [data], descriptors)

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait(ANSWER_LIMIT_S)


_starters: list[Starter] = []


class Program(subprocess.Popen[str]):
    """`subprocess.Popen` of ``[sys.executable, …]``, forked from the warm process.

    Takes the options `cwd`, `env`, `stdin`, `stdout`, `stderr` and `text`.
    """

    def _execute_child(  # type: ignore[override]
        self, args: list[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        *rest: Any,
    ) -> None:  # fmt: skip
        if not _starters or args[0] != sys.executable:
            others = (executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                      creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # fmt: skip
            super()._execute_child(args, *others, *rest)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", args[0], args, cwd, env)  # `kinds` counts it
        self._status, status = os.pipe()
        standard = [max(p2cread, 0), c2pwrite if c2pwrite >= 0 else 1]
        standard.append(errwrite if errwrite >= 0 else 2)
        environment = dict(os.environ if env is None else env)
        request = {
            "arguments": [str(one) for one in args[1:]],
            "environment": environment,
            "directory": str(cwd or os.getcwd()),
            "path": [*filter(None, environment.get("PYTHONPATH", "").split(":")), *sys.path],
        }
        try:
            _starters[0].run(request, [*standard, status])
        finally:
            os.close(status)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self.pid = int(self._line())
        self._child_created = True

    def _line(self) -> bytes:
        data = b""
        while not data.endswith(b"\n"):
            one = os.read(self._status, 1)
            if not one:
                raise RuntimeError("the process that waits for a program has ended")
            data += one
        return data

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if "_status" not in vars(self):
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = int(self._line())
        os.close(self._status)
        return self.pid, status

    def _internal_poll(self, *_ignored: Any, **__ignored: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if self.returncode is None and pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run_program(
    arguments: Sequence[str],
    *,
    timeout: float,
    capture_output: bool = True,
    text: bool = True,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` does, with a `Program` and its output as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output else {}
    with Program(list(arguments), text=text, **{**pipes, **options}) as program:
        try:
            out, errors = program.communicate(timeout=timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(list(arguments), program.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


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
