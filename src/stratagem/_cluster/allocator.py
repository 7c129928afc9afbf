"""How a worker's process treats memory that its steps have freed."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

KEPT_BLOCK_BYTES: Final = 1 << 25
"""Blocks from this size on are the kernel's again once they are free; the most glibc allows."""

KEPT_BYTES: Final = 1 << 27
"""How much freed memory at most a worker keeps."""

_M_TRIM_THRESHOLD: Final = -1  # of mallopt(3)
_M_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> None:
    """Lets this process's allocator keep what a step frees for the next step.

    By itself glibc gives a few freed megabytes back to the kernel, and every step begins with page
    faults on fresh ones: a tenth of a worker's time where activations are of that size.
    """
    with contextlib.suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
