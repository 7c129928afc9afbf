"""A new file of which the large parts are written past the kernel's page cache, if the file system can.

A write through the cache allocates a page for every 4 KB, copies, and frees the page later. Past it (``O_DIRECT``), the disk takes
the bytes from our memory: that needs a fifth of the processor time, does not displace what other programs have in the
cache, and leaves little to flush. File, memory and size must then be aligned, so that bytes are collected in a buffer, and what
is before the first and after the last aligned place goes through the cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from stratagem._owner import Owner

ALIGNMENT: Final = 4096
"""Of places, sizes and memory: the largest block size that file systems commonly have."""

BUFFER_BYTES = 4 << 20
"""Bytes per write past the cache; the disk is idle between two of them. Smaller areas go through the cache."""


@final
class NewFile(Owner):
    """A file being written.

    Args:
        path: the file; it must not exist.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._cached = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        self._direct = -1
        with contextlib.suppress(OSError):  # EINVAL: this file system cannot
            self._direct = os.open(path, flags | os.O_DIRECT)
        self._buffers: list[Any] = []  # that no area uses

    @property
    def is_direct(self) -> bool:
        """True if large areas do not go through the cache."""
        return self._direct >= 0

    def put(self, data: bytes | memoryview, place: int) -> None:
        """Write bytes through the cache."""
        _write_all(self._cached, data, place)

    def area(self, place: int, nbytes: int) -> Area:
        """Return an area of the file that is written from its beginning to its end."""
        if not self.is_direct or nbytes < BUFFER_BYTES:
            return Area(self, place, None)
        if self._buffers:
            return Area(self, place, self._buffers.pop())
        memory = np.empty(BUFFER_BYTES + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return Area(self, place, memory[start : start + BUFFER_BYTES])

    def put_aligned(self, data: memoryview, place: int) -> None:
        """Write aligned bytes past the cache."""
        if self.is_direct:
            try:
                _write_all(self._direct, data, place)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._close_direct()  # a file system with larger blocks; what was written is written again
            else:
                return
        self.put(data, place)

    def take_back(self, buffer: Any) -> None:
        """Keep the buffer of an area for the next one."""
        self._buffers.append(buffer)

    def flush_rows(self) -> None:
        """Flush the bytes to disk, not the file's times. Any thread may call it."""
        os.fdatasync(self._cached)

    def flush(self) -> None:
        """Flush the file to disk."""
        os.fsync(self._cached)

    def close(self) -> None:
        """Close the file without flushing it. May be called again."""
        self._close_direct()
        if self._cached >= 0:
            os.close(self._cached)
            self._cached = -1

    def _close_direct(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1


@final
class Area:
    """Consecutive bytes of a file. The bytes between two calls of `add` may change."""

    def __init__(self, file: NewFile, place: int, buffer: Any) -> None:
        self._file = file
        self._place = place  # of the next byte, or of the first one in the buffer
        self._used = 0  # bytes in the buffer
        # An array or None. Copies of NumPy arrays release Python's lock, copies of memoryviews do not.
        self._buffer = buffer

    @property
    def is_direct(self) -> bool:
        """True if its bytes do not go through the cache."""
        return self._buffer is not None and self._file.is_direct

    def add(self, data: memoryview) -> None:
        """Write the next bytes."""
        if self._buffer is None:
            self._put(data)
            return
        if not self._used and self._place % ALIGNMENT:
            first = -self._place % ALIGNMENT
            self._put(data[:first])
            data = data[first:]
        rest: Any = np.frombuffer(data, np.uint8)
        while len(rest):
            count = min(len(rest), BUFFER_BYTES - self._used)
            self._buffer[self._used : self._used + count] = rest[:count]
            self._used, rest = self._used + count, rest[count:]
            if self._used == BUFFER_BYTES:
                self._empty()

    def end(self) -> None:
        """Write what is still in the buffer. The area is not used any more."""
        if self._buffer is not None:
            self._empty()
            self._file.take_back(self._buffer)
            self._buffer = None

    def _empty(self) -> None:
        aligned = self._used // ALIGNMENT * ALIGNMENT
        data, self._used = memoryview(self._buffer)[: self._used], 0
        if aligned:
            self._file.put_aligned(data[:aligned], self._place)
            self._place += aligned
        self._put(data[aligned:])

    def _put(self, data: memoryview) -> None:
        if data:
            self._file.put(data, self._place)
            self._place += len(data)


def _write_all(descriptor: int, data: bytes | memoryview, place: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(descriptor, rest, place)
        rest, place = rest[done:], place + done
