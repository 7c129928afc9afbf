"""Whether a silent worker on this host computes: its process, as the kernel sees it.

Signs of life are sent by a thread of Python. A closure in native code that keeps Python's lock (the
GIL) for seconds silences them though all is well; losing its worker would only begin it anew
elsewhere, to the same end. A worker on the coordinator's own host can be looked at instead: one that
uses the processor is busy, one that does not (stopped, or stuck in a wait) is hung. Of other hosts
nothing is known but their silence.
"""

from __future__ import annotations

import os
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
        >>> from stratagem._cluster.pulse import own_process
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
class Pulse:
    """Looks at one process now and then.

    Example:
        >>> from stratagem._cluster.pulse import Pulse, own_process
        >>> Pulse(own_process()).can_be_felt, Pulse("some other host's").can_be_felt
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
            return "<Pulse of a process elsewhere>"
        return f"<Pulse of {self._pid}, {'computes' if self._computes else 'rests'}>"


# Of /proc/<pid>/stat, counted from the state, which follows the name in brackets (see proc(5)).
_STATE, _USER, _SYSTEM, _STARTED = 0, 11, 12, 19


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(") ")[2].split()
