"""Decide whether a silent task on this host is alive: its process uses the CPU, or is stopped.

A thread of Python sends heartbeats and answers pings. Native code that holds Python's lock (the GIL) for seconds
silences it although the task is well. A process on the same host can be observed: one that uses the CPU is busy, one
that does not (stopped, or waiting) hangs. Of tasks on other hosts only the silence is known.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from typing_extensions import override

WINDOW_S: Final = 0.5
"""Time over which CPU use is measured; the kernel counts in steps of 10 ms."""

LEAST_SHARE: Final = 0.05
"""Of one core: less than a busy process gets on a machine with ten times its load, more than the 0.2 % of
threads that wait for Python's lock."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def own_process() -> str:
    """Return a text that identifies this process to other processes on this host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        numbering = Path("/proc/self/ns/pid").readlink()  # containers number processes on their own
        started = _stat(os.getpid())[_STARTED]
    except OSError:
        return ""
    return f"{boot} {numbering} {os.getpid()} {started}"


@final
class CpuProbe:
    """CPU use of one process on this host."""

    def __init__(self, process: str = "") -> None:
        mine = own_process().split(" ")
        theirs = process.split(" ")
        self.is_local = len(mine) == len(theirs) == 4 and mine[:2] == theirs[:2]
        """True if the process is on this host, under the process number that it has itself."""
        self._pid, self._started = (int(theirs[2]), theirs[3]) if self.is_local else (0, "")
        self._since: tuple[float, int] | None = None
        self._computes: bool | None = None

    def rest(self) -> None:
        """Forget the measurement: the task was heard."""
        self._since = None
        self._computes = None

    def is_stopped(self) -> bool:
        """Return whether the process is known to be stopped, or gone."""
        return self.is_local and self._ticks() is None

    def computes(self, now: float, *, window_s: float = WINDOW_S) -> bool | None:
        """Return whether the process used the CPU in the last whole window; None in the first. Call it repeatedly."""
        ticks = self._ticks() if self.is_local else None
        if ticks is None:  # ended or stopped
            self.rest()
            return False
        if self._since is None:
            self._since = (now, ticks)
        began, before = self._since
        if now - began >= window_s:
            self._computes = (ticks - before) / _TICKS_PER_S >= LEAST_SHARE * (now - began)
            self._since = (now, ticks)
        return self._computes

    def _ticks(self) -> int | None:
        """Return the CPU time used so far; None if the process has ended or is stopped."""
        try:
            fields = _stat(self._pid)
        except OSError:
            return None
        if fields[_STARTED] != self._started or fields[_STATE] in "TtZXx":
            return None
        return int(fields[_USER]) + int(fields[_SYSTEM])

    @override
    def __repr__(self) -> str:
        if not self.is_local:
            return "<CpuProbe of a process on another host>"
        return f"<CpuProbe of {self._pid}, {'busy' if self._computes else 'idle'}>"


@final
class LivenessCheck:
    """Judgement whether one silent task is busy or lost.

    Args:
        task: its name.
        process: its `own_process()`; unknown by default.
        log: for the warning that a silent task is given more time.
    """

    def __init__(self, task: str, process: str = "", *, log: logging.Logger) -> None:
        self._task = task
        self._log = log
        self._probe = CpuProbe(process)
        self._warned = False

    def judge(
        self,
        now: float,
        *,
        silent_s: float,
        limit_s: float,
        busy_limit_s: float,
        cut_off_s: Callable[[], float],
        partition_limit_s: float = 0.0,
    ) -> str | None:
        """Decide whether a silent task is lost. Never waits; call it repeatedly.

        Args:
            now: the time.
            silent_s: time since the task was heard.
            limit_s: allowed silence of any task.
            busy_limit_s: allowed silence of a task whose process uses the CPU.
            cut_off_s: returns the time since bytes sent to the task have arrived.
            partition_limit_s: allowed silence of a task that may be unreachable, if that is more.

        Returns:
            None if it is not lost. Otherwise the reason, as the end of a sentence about the length of the silence.
        """
        if silent_s <= limit_s / 2:
            self._probe.rest()
            self._warned = False
            return None
        computes = self._probe.computes(now, window_s=min(WINDOW_S, limit_s / 4))
        if silent_s <= limit_s or computes is None:  # None: not measured yet
            return None
        unreachable = cut_off_s() > limit_s / 2 or not computes
        if unreachable and silent_s <= partition_limit_s and not self._probe.is_stopped():
            self._log_once(
                "%s has been unreachable for %.1f s. It is lost after %g s (partition_limit_s).",
                silent_s,
                partition_limit_s,
            )
            return None
        if cut_off_s() > limit_s / 2:
            return ", and nothing sent to it arrives: its machine or the network is down"
        if not computes:
            return _STOPPED if self._probe.is_local else _UNKNOWN
        if silent_s > busy_limit_s:
            return _TOO_LONG
        self._log_once(
            "%s has sent nothing for %.1f s, but its process uses the CPU: probably native code that "
            "holds Python's lock (GIL). It counts as lost after %g s (busy_limit_s).",
            silent_s,
            busy_limit_s,
        )
        return None

    def _log_once(self, text: str, silent_s: float, limit_s: float) -> None:
        if not self._warned:
            self._warned = True
            self._log.warning(text, self._task, silent_s, limit_s)

    @override
    def __repr__(self) -> str:
        return f"<LivenessCheck of {self._task}, {self._probe!r}>"


_STOPPED: Final = (
    ", and its process on this host does nothing: it is stopped, or waits for something"
)
_UNKNOWN: Final = (
    ": it is stopped, cut off, or runs native code that holds Python's lock (GIL); for such code "
    "raise heartbeat_limit_s (STRATAGEM_HEARTBEAT_LIMIT_S)"
)
_TOO_LONG: Final = ", though its process computes; see busy_limit_s (STRATAGEM_BUSY_LIMIT_S)"

# Fields of /proc/<pid>/stat, counted from the state, which follows the name in brackets; see proc(5).
_STATE, _USER, _SYSTEM, _STARTED = 0, 11, 12, 19


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(") ")[2].split()
