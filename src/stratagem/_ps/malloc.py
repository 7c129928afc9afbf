"""What a task's process does with memory its steps have freed: a worker keeps it, a server gives it back."""

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


def give_back_freed_memory() -> None:
    """Gives memory that is free in the middle of the heap back to the kernel.

    Steps of an optimizer leave holes the size of its largest variables.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
