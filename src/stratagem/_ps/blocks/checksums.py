"""CRC-32 of memory areas, by a kernel in C if there is one, else by zlib.

Both compute the same number. zlib takes 0.3 ns per byte, the kernel 0.02 to 0.1, because it uses the processor's carry-less
multiplication. Both release Python's lock.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from stratagem._ps.row_kernels import kernels

LARGE_BYTES: Final = 1 << 14
"""Shorter pieces go to zlib: a call of a C library from Python takes some microseconds."""


def crc32(data: bytes | memoryview, crc32: int = 0) -> int:
    """Return the CRC-32 of bytes, continued from that of the bytes before.

    Example:
        >>> crc32(b"checkpoint") == zlib.crc32(b"checkpoint") == crc32(b"point", crc32(b"check"))
        True
    """
    if kernels is not None and len(data) >= LARGE_BYTES:
        place = np.frombuffer(data, np.uint8)  # whose address is known, also of read-only memory
        found = kernels.crc32(place.ctypes.data, place.size, crc32)
        if found >= 0:
            return found
    return zlib.crc32(data, crc32)
