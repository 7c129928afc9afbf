"""Decide whether a silent task is lost; of a task on this host, its process is looked at.

A thread of Python sends heartbeats and answers pings. Native code that holds Python's lock (the GIL) for seconds
silences it although the task is well. A process on the same host is known to be stopped, to have ended, or to run. Of tasks
on other hosts only the silence is known.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from typing_extensions import override


def own_process() -> str:
    """Return a text that identifies this process to other processes on this host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        numbering = Path("/proc/self/ns/pid").readlink()  # containers number processes on their own
        started = _stat(os.getpid())[_STARTED]
    except OSError:
        return ""
    return f"{boot} {numbering} {os.getpid()} {started}"


def is_running(process: str) -> bool | None:
    """Return whether a process runs, given its `own_process()`: not if it has ended or is stopped. None: it is on another host."""
    mine, theirs = own_process().split(" "), process.split(" ")
    if len(theirs) != 4 or mine[:2] != theirs[:2]:
        return None
    try:
        fields = _stat(int(theirs[2]))
    except OSError:
        return False
    return fields[_STARTED] == theirs[3] and fields[_STATE] not in "TtZXx"


@final
class LivenessCheck:
    """Judgement whether one silent task is lost.

    Args:
        task: its name.
        process: its `own_process()`; unknown by default.
        log: for the warning that a silent task is given more time.
    """

    def __init__(self, task: str, process: str = "", *, log: logging.Logger) -> None:
        self._task = task
        self._log = log
        self._process = process
        self._warned = False

    def judge(
        self,
        silent_s: float,
        *,
        limit_s: float,
        running_limit_s: float,
        unreachable_limit_s: float = 0.0,
        cut_off_s: Callable[[], float],
    ) -> str | None:
        """Decide whether a silent task is lost. Never waits; call it repeatedly.

        Args:
            silent_s: time since the task was heard.
            limit_s: allowed silence of any task.
            running_limit_s: allowed silence of a task whose process on this host runs, if that is more.
            unreachable_limit_s: allowed silence of a task that may be unreachable, if that is more.
            cut_off_s: returns the time since bytes sent to the task have arrived.

        Returns:
            None if it is not lost. Otherwise the reason, as the end of a sentence about the length of the silence.
        """
        if silent_s <= limit_s:
            self._warned = False
            return None
        runs, is_cut_off = is_running(self._process), cut_off_s() > limit_s / 2
        if runs is False:
            return _STOPPED
        is_silent = runs is True and not is_cut_off
        allowed_s = running_limit_s if is_silent else unreachable_limit_s
        if silent_s > allowed_s:
            return _SILENT if is_silent else _CUT_OFF if is_cut_off else _UNKNOWN
        if not self._warned:
            self._warned = True
            text = _SILENT_SO_FAR if is_silent else _UNREACHABLE
            self._log.warning(text, self._task, silent_s, allowed_s)
        return None

    @override
    def __repr__(self) -> str:
        return f"<LivenessCheck of {self._task}>"


_SILENT_SO_FAR: Final = (
    "%s has sent nothing for %.1f s, but its process runs: probably native code that holds Python's lock (GIL). "
    "It counts as lost after %g s (partition_limit_s)."
)
_UNREACHABLE: Final = (
    "%s has been unreachable for %.1f s. It is lost after %g s (partition_limit_s)."
)
_CUT_OFF: Final = ", and nothing sent to it arrives: its machine or the network is down"
_STOPPED: Final = ", and its process on this host does nothing: it is stopped, or has ended"
_UNKNOWN: Final = (
    ": it is stopped, cut off, or runs native code that holds Python's lock (GIL); for such code "
    "raise heartbeat_limit_s (STRATAGEM_HEARTBEAT_LIMIT_S)"
)
_SILENT: Final = (
    ", though its process runs: it waits for something, or runs native code that holds Python's lock (GIL); for such "
    "code raise partition_limit_s (STRATAGEM_PARTITION_LIMIT_S)"
)

# Fields of /proc/<pid>/stat, counted from the state, which follows the name in brackets; see proc(5).
_STATE, _STARTED = 0, 19


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(") ")[2].split()
