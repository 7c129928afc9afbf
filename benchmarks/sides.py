"""Processes of the sides: start, requests, processor time, end.

The only file of the harness that starts and kills processes. Called by ``runner.py``.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.scratch import remove_scratch

ROOT = Path(__file__).resolve().parent.parent
CLOSE_TIMEOUT_S = 20.0
_MODULES = {
    "ours": "ours",
    "peer": "peer",
    "torch": "torch_peers",
    "limit": "limits",
    "bound": "limits",
    "bare": "limits",
}


def _processor_clock(pid: int) -> int:
    """Return the clock of a process's processor time, as ``clock_getcpuclockid`` of the C library does."""
    return (~pid << 3) | 2


class SideFailed(Exception):
    """A side gave no number, for the reason in the text."""


class SideProcess:
    """Program of one side, and the connection to it.

    Args:
        kind: ``ours``, ``peer``, ``torch``, ``limit``, ``bound`` or ``bare``.
        python: the interpreter that runs it.
        log: where its standard error goes.
        prefix: words before the command, which run it elsewhere.
    """

    def __init__(
        self,
        kind: str,
        *,
        python: Path = Path(sys.executable),
        log: IO[bytes] | None = None,
        prefix: Sequence[str] = (),
    ):
        self.kind = kind
        self._log = log if log is not None else tempfile.TemporaryFile()  # noqa: SIM115 - close() does
        paths = [str(ROOT), *([] if kind == "peer" else [str(ROOT / "src")])]
        # OMP_NUM_THREADS for bare torch; the peer keeps its own defaults, which are faster for it.
        threads = {} if kind == "peer" else {"OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            [*prefix, str(python), "-m", f"benchmarks.{_MODULES[kind]}.side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self._unread = b""
        self._stuck = False
        self._processes: dict[str, int] = {}

    def __repr__(self) -> str:
        state = "running" if self._process.poll() is None else f"ended {self._process.returncode}"
        return f"<SideProcess {self.kind} pid {self._process.pid} [{state}]>"

    @property
    def pid(self) -> int:
        """Id of the side's first process."""
        return self._process.pid

    def ask(self, operation: str, *, timeout_s: float, **question: Any) -> dict[str, Any]:
        """Send one request and wait for the reply.

        Raises:
            SideFailed: the side answered with an error, ended, or was silent for ``timeout_s``.
        """
        line = json.dumps({"op": operation, **question}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SideFailed(self._last_words(operation)) from error
        answer = json.loads(self._read_line(operation, timeout_s))
        if "error" in answer:
            raise SideFailed(str(answer["error"]))
        result: dict[str, Any] = answer["ok"]
        self._processes = result.pop("processes", self._processes)
        return result

    def processor_seconds(self) -> dict[str, float]:
        """Return the processor time (user and system) of each process of the side."""
        used = {}
        for name, pid in self._processes.items():
            try:
                used[name] = time.clock_gettime(_processor_clock(pid))
            except OSError:
                continue  # the process has ended
        return used

    def wire_bytes(self) -> int | None:
        """Return the bytes that the side's processes have sent over their TCP connections; None if that is not known.

        A connection between two processes of the side counts both directions.
        """
        command = ["ss", "-Htinp", "state", "established"]
        try:
            listed = subprocess.run(
                command, capture_output=True, text=True, timeout=CLOSE_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        pids = {str(pid) for pid in self._processes.values()}
        total, is_ours = 0, False
        for line in listed.stdout.splitlines():
            if not line[:1].isspace():
                is_ours = any(pid in pids for pid in re.findall(r"pid=(\d+)", line))
            elif is_ours:
                total += sum(int(count) for count in re.findall(r"bytes_sent:(\d+)", line))
        return total

    def _read_line(self, operation: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(timeout_s):
                    self._stuck = True
                    raise SideFailed(
                        f"{self.kind} gave no answer to {operation!r} in {timeout_s:g} s"
                    )
                received = os.read(pipe, 65536)
                if not received:
                    raise SideFailed(self._last_words(operation))
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self, operation: str) -> str:
        try:
            code: object = self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = "nothing: it still runs"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return (
            f"{self.kind} ended with {code} at {operation!r}: {lines[-1] if lines else 'no words'}"
        )

    def close(self) -> None:
        """End the side and all its processes. A second call does nothing."""
        if self._process.poll() is None and not self._stuck:
            try:
                self.ask("close", timeout_s=CLOSE_TIMEOUT_S)
                self._process.wait(CLOSE_TIMEOUT_S)
            except (SideFailed, subprocess.TimeoutExpired):
                pass  # the kill below ends it
        # Its children are in its session, and may still run.
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(CLOSE_TIMEOUT_S)
        remove_scratch(self._process.pid)  # up to 2 GB of memory, if the side was killed
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
