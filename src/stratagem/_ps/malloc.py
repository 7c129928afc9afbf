"""Configure the C allocator: a worker keeps freed memory, a server returns it to the kernel."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

KEPT_BLOCK_BYTES: Final = 1 << 25
"""Freed blocks from this size on are returned to the kernel; the most glibc allows."""

KEPT_BYTES: Final = 1 << 27
"""Most freed memory that a worker keeps."""

_M_TRIM_THRESHOLD: Final = -1  # of mallopt(3)
_M_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> None:
    """Keep memory that a step frees for the next step.

    By default glibc returns a few freed megabytes to the kernel, and every step begins with page faults: a tenth
    of a worker's time where activations have that size.
    """
    with contextlib.suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Return free memory in the middle of the heap to the kernel.

    Optimizer steps leave holes of the size of the largest variables.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
