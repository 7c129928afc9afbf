"""Processor time and memory of this process."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_usage() -> dict[str, float]:
    """Return the processor time used, the time spent waiting for a processor, and the memory in use.

    The times are sums over all threads, in seconds. Entries that this system does not offer are absent.

    Example:
        >>> usage = process_usage()
        >>> usage["process.cpu_s"] > 0
        True
    """
    found = {"process.cpu_s": time.process_time()}
    starved_ns = 0
    try:
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        found["process.memory_bytes"] = float(resident * _PAGE_BYTES)
        for thread in Path("/proc/self/task").iterdir():
            try:
                text = (thread / "schedstat").read_text(encoding="ascii")
            except OSError:
                continue  # the thread has ended
            starved_ns += int(text.split()[1])
        found["process.starved_s"] = starved_ns / 1e9
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or a kernel without these counts
    return found
