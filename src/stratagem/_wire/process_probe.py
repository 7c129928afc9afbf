"""Whether a silent task on this host computes: its process, as the kernel sees it.

Signs of life are sent by a thread of Python. A closure, or an optimizer on a parameter server, in native
code that keeps Python's lock (the GIL) for seconds silences them though all is well; losing its task
would only begin the work anew, to the same end, or end it. A task on this host can be looked at instead: one
that uses the processor is busy, one that does not (stopped, or stuck in a wait) is hung. Of other hosts
nothing is known but their silence.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from typing_extensions import override

WINDOW_S: Final = 0.5
"""Over which the use of the processor is measured; the kernel counts in steps of 10 ms."""

LEAST_SHARE: Final = 0.05
"""Of one core: below what a busy process gets on a machine with ten times too much to do, above
the 0.2 % that threads take which wait for Python's lock."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def own_process() -> str:
    """This process, named so that others on this host, and only they, can look at it.

    Example:
        >>> from stratagem._wire.process_probe import own_process
        >>> own_process() == own_process()
        True
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        numbering = Path("/proc/self/ns/pid").readlink()  # containers count processes on their own
        started = _stat(os.getpid())[_STARTED]
    except OSError:
        return ""
    return f"{boot} {numbering} {os.getpid()} {started}"


@final
class CpuProbe:
    """Looks at one process now and then.

    Example:
        >>> from stratagem._wire.process_probe import CpuProbe, own_process
        >>> CpuProbe(own_process()).can_be_felt, CpuProbe("some other host's").can_be_felt
        (True, False)
    """

    def __init__(self, process: str = "") -> None:
        mine = own_process().split(" ")
        theirs = process.split(" ")
        self.can_be_felt = len(mine) == len(theirs) == 4 and mine[:2] == theirs[:2]
        """Whether the process is on this host, under the number it knows itself by."""
        self._pid, self._started = (int(theirs[2]), theirs[3]) if self.can_be_felt else (0, "")
        self._since: tuple[float, int] | None = None
        self._computes: bool | None = None

    def rest(self) -> None:
        """The process was heard: what was measured before is of no more use."""
        self._since = None
        self._computes = None

    def is_stopped(self) -> bool:
        """Return whether the process is known to be stopped, or gone."""
        return self.can_be_felt and self._ticks() is None

    def computes(self, now: float, *, window_s: float = WINDOW_S) -> bool | None:
        """Whether it used the processor in the last whole window; None before the first is over.

        To be called again and again.
        """
        ticks = self._ticks() if self.can_be_felt else None
        if ticks is None:  # gone or stopped: no need to measure
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
        """Processor time used so far; None if the process is gone, or stopped."""
        try:
            fields = _stat(self._pid)
        except OSError:
            return None
        if fields[_STARTED] != self._started or fields[_STATE] in "TtZXx":
            return None
        return int(fields[_USER]) + int(fields[_SYSTEM])

    @override
    def __repr__(self) -> str:
        if not self.can_be_felt:
            return "<CpuProbe of a process elsewhere>"
        return f"<CpuProbe of {self._pid}, {'computes' if self._computes else 'rests'}>"


@final
class LivenessCheck:
    """What the silence of one task means: that it is busy, or lost.

    Args:
        task: its name.
        process: what it says of itself (`own_process`); unknown by default.
        log: where it is said that the task is borne with.

    Example:
        >>> import logging
        >>> from stratagem._wire.process_probe import LivenessCheck
        >>> silence = LivenessCheck("/job:ps/task:0", "another host's", log=logging.getLogger())
        >>> limits = dict(limit_s=4.0, busy_limit_s=60.0, cut_off_s=lambda: 0.0)
        >>> silence.judge(0.0, silent_s=3.9, **limits)
        >>> silence.judge(0.2, silent_s=4.1, **limits)[:41]
        ': it is stopped, cut off, or runs native '
    """

    def __init__(self, task: str, process: str = "", *, log: logging.Logger) -> None:
        self._task = task
        self._log = log
        self._pulse = CpuProbe(process)
        self._told = False

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
        """Decides about a task that was last heard so long ago. Never waits; to be called again and again.

        Args:
            now: the time.
            silent_s: for how long nothing has come from it.
            limit_s: what is borne of any task.
            busy_limit_s: what is borne of one whose process is seen to compute.
            cut_off_s: for how long nothing sent to it has arrived.
            partition_limit_s: what is borne of one that may be out of reach, if that is more.

        Returns:
            None: not lost. Else what is known of the silence, to be put behind how long it was.
        """
        if silent_s <= limit_s / 2:
            self._pulse.rest()
            self._told = False
            return None
        computes = self._pulse.computes(now, window_s=min(WINDOW_S, limit_s / 4))
        if silent_s <= limit_s or computes is None:  # None: known within a window
            return None
        unreachable = cut_off_s() > limit_s / 2 or not computes
        if unreachable and silent_s <= partition_limit_s and not self._pulse.is_stopped():
            self._log_once(
                "%s cannot be reached for %.1f s; it is waited for, up to %g s (partition_limit_s).",
                silent_s,
                partition_limit_s,
            )
            return None
        if cut_off_s() > limit_s / 2:
            return ", and nothing sent to it arrives: its machine or the network is down"
        if not computes:
            return _STOPPED if self._pulse.can_be_felt else _UNKNOWN
        if silent_s > busy_limit_s:
            return _TOO_LONG
        self._log_once(
            "%s has said nothing for %.1f s, but its process computes: native code that keeps "
            "Python's lock (GIL), it seems. It is given %g s (busy_limit_s).",
            silent_s,
            busy_limit_s,
        )
        return None

    def _log_once(self, text: str, silent_s: float, limit_s: float) -> None:
        if not self._told:
            self._told = True
            self._log.warning(text, self._task, silent_s, limit_s)

    @override
    def __repr__(self) -> str:
        return f"<LivenessCheck of {self._task}, {self._pulse!r}>"


_STOPPED: Final = (
    ", and its process on this host does nothing: it is stopped, or waits for something"
)
_UNKNOWN: Final = (
    ": it is stopped, cut off, or runs native code that keeps Python's lock (GIL); for such code "
    "raise heartbeat_limit_s (STRATAGEM_HEARTBEAT_LIMIT_S)"
)
_TOO_LONG: Final = ", though its process computes; see busy_limit_s (STRATAGEM_BUSY_LIMIT_S)"

# Of /proc/<pid>/stat, counted from the state, which follows the name in brackets (see proc(5)).
_STATE, _USER, _SYSTEM, _STARTED = 0, 11, 12, 19


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(") ")[2].split()
