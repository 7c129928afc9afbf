"""CRC-32 of large memory areas, with libdeflate if it is installed, else with zlib.

Both compute the same number. zlib takes 0.3 ns per byte, libdeflate a third of that or less, because it uses the processor's
carry-less multiplication. Debian and Ubuntu have it as ``libdeflate0``. Both release Python's lock.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any, Final

import numpy as np

LARGE_BYTES: Final = 1 << 16
"""Shorter pieces go to zlib: a call of a C library from Python takes some microseconds."""


def _from_libdeflate() -> Any:
    """Return the function of libdeflate; None if there is no such library."""
    try:
        found: Any = ctypes.CDLL("libdeflate.so.0").libdeflate_crc32
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_uint32
    found.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    return found


_fast: Final = _from_libdeflate()

IS_FAST: Final = _fast is not None
"""True if checksums take less time than handing them to another thread is worth."""


def crc32(data: bytes | memoryview, crc32: int = 0) -> int:
    """Return the CRC-32 of bytes, continued from that of the bytes before.

    Example:
        >>> crc32(b"checkpoint") == zlib.crc32(b"checkpoint") == crc32(b"point", crc32(b"check"))
        True
    """
    if _fast is None or len(data) < LARGE_BYTES:
        return zlib.crc32(data, crc32)
    place = np.frombuffer(
        data, np.uint8
    )  # whose address is known, also of memory that is read-only
    return int(_fast(crc32, place.ctypes.data, place.size))
