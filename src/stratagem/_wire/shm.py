"""Shared memory between processes of one host: segments and their layout.

The only module that uses mmap. A segment is a `memfd`, or a file on disk (`table_files.py`): it has no name, so that nothing
is left behind however a process ends. The kernel frees it when its owner and all processes that mapped it are gone. A peer opens it through
``/proc/<pid>/fd/<fd>`` and identifies it by its random token.

One segment::

    offset   bytes
    0        8     magic
    8        8     size of the segment
    16       16    token: random; the peer got the same by message
    32       4064  zero
    4096           entries, one after the other, each:
                     +0    8    counter: 2 x version; odd while the owner is writing
                     +8    56   zero
                     +64        the data, padded to a multiple of 64 bytes

Segments of parameters belong to a server. They are sealed: no process can shrink or grow them, and only the server's
existing mapping can write. Readers map them privately (copy on write), so that a worker that writes to a parameter by
mistake changes its own page only. Send buffers belong to a client, are sealed against shrinking (a truncation would kill
a server that reads them), and are mapped shared by the server.

A reader that needs a consistent value copies it and compares the version counter (`MappedSegment.read_whole`). A training
step does not: asynchronous training reads parameters while they change.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import secrets
import stat
import struct
import weakref
from typing import Final, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._owner import Owner
from stratagem._wire.frames import ALIGNMENT, padded
from stratagem._wire.messages import SegmentRef
from stratagem._wire.table_files import open_table_file

_log = logging.getLogger("stratagem.wire")

MAGIC: Final = b"SGSHM\0\0\1"
HEADER_BYTES: Final = 4096
ENTRY_BYTES: Final = 64
_HEAD = struct.Struct("<8sQ16s")
# On x86 and most ARM machines; elsewhere nothing is gained or lost.
LARGE_PAGE_BYTES: Final = 1 << 21
_NO_RESERVE: Final = (
    0x4000  # MAP_NORESERVE on Linux: more addresses than memory; the mmap module lacks the name
)
_SEAL_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; the fcntl module lacks the name


def bytes_for(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape!r} has a negative size")
    return math.prod(shape) * dtype.itemsize


def zeros_apart(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    beside: Tensor | None = None,
    large_pages: bool = True,
) -> Tensor:
    """Return a private tensor of zeros in pages of its own, outside the allocator's heap.

    For large tensors that stay: they leave no holes in the heap, cost memory only where they are written, and use large
    pages where the kernel has some. If `beside` is on disk, the new tensor is, too.

    `large_pages`: without them the first write to a page never waits until the kernel has moved other pages.
    """
    if beside is not None and is_on_disk(beside):
        return zeros_on_disk(shape, dtype)
    size = bytes_for(shape, dtype)
    if size < LARGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, size + LARGE_PAGE_BYTES, flags=flags)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % LARGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without them
        if large_pages:
            memory.madvise(mmap.MADV_HUGEPAGE, start, size // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES)
        else:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    count = size // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def zeros_on_disk(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in a file without a name: the kernel keeps the pages in use in memory.

    Raises:
        OSError: the disk has no space for it.
    """
    count = math.prod(shape)
    size = max(mmap.PAGESIZE, bytes_for(shape, dtype))
    descriptor = open_table_file(size)
    try:
        memory = _map_table(descriptor, size)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def is_on_disk(tensor: Tensor) -> bool:
    """Return whether a tensor of this process is in a file."""
    if not _on_disk:
        return False
    address = tensor.data_ptr()
    return any(start <= address < start + len(memory) for start, memory in _on_disk.items())


def _map_table(descriptor: int, size: int) -> mmap.mmap:
    memory = mmap.mmap(descriptor, size)
    _note_table(memory)
    return memory


def _note_table(memory: mmap.mmap) -> None:
    # Rows are far apart: reading ahead would read what is not needed.
    memory.madvise(mmap.MADV_RANDOM)
    start = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    _on_disk[start] = memory


_on_disk: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Mapped table files by address."""


def counter_index(offset: int) -> int:
    """Return the index of the counter of the entry whose data is at `offset`."""
    return (offset - ENTRY_BYTES) >> 3


class _Mapping(Owner):
    """Mapped memory with entries; base class of the owner's and the peer's view."""

    def __init__(self, number: int, memory: mmap.mmap) -> None:
        self.number = number
        self._memory: mmap.mmap | None = memory
        self._bytes = len(memory)
        self._view = memoryview(memory)
        self.counters = self._view.cast("Q")
        """Counters of all entries; see `counter_index`."""
        self._closed = False

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the memory at `offset`, which keeps the memory; ValueError if it lies outside."""
        size = bytes_for(shape, dtype)
        if self._memory is None:
            raise ValueError(f"segment {self.number} is closed: no tensor can be made over it")
        if offset % ALIGNMENT or offset < HEADER_BYTES or offset + size > self._bytes:
            raise ValueError(
                f"a tensor of {size} bytes at offset {offset!r} does not lie within segment "
                f"{self.number}, which has {self._bytes} bytes, on a multiple of {ALIGNMENT}"
            )
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        count = size // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)

    def buffer(self, offset: int, size: int) -> memoryview:
        """Return the memory itself, to be sent."""
        return self._view[offset : offset + size]

    def counter(self, offset: int) -> int:
        """Return the counter of the entry whose data is at `offset`: 2 x version, odd during a write."""
        return self.counters[counter_index(offset)]

    @override
    def close(self) -> None:
        """Release the memory; it is unmapped with the last tensor over it. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.counters.release()
        self._view.release()
        # Not mmap.close(): tensors of torch.frombuffer would go on reading unmapped memory. Python unmaps
        # when the last reference is gone.
        self._memory = None


@final
class Segment(_Mapping):
    """A segment owned by this process.

    Example:
        >>> with Segment(1, 1 << 16, writable_by_peers=False) as segment:
        ...     offset = segment.take(12)
        ...     mine = segment.tensor(offset, (3,), torch.float32).fill_(7.0)
        ...     with open_segment(segment.ref(), shared=False) as peer:
        ...         print(peer.tensor(offset, (3,), torch.float32))
        tensor([7., 7., 7.])
    """

    def __init__(
        self, number: int, size: int, *, writable_by_peers: bool, on_disk: bool = False
    ) -> None:
        """Create a segment for `size` bytes of entries; pages cost memory once they are written.

        Args:
            number: its number in messages.
            size: bytes of entries.
            writable_by_peers: False seals it against every other mapping that could write.
            on_disk: a file without a name instead of a `memfd`. It has no seals.

        Raises:
            OSError: the disk has no space for it.
        """
        self.size = HEADER_BYTES + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._token = secrets.token_bytes(16)
        self._fd = (
            open_table_file(self.size)
            if on_disk
            else os.memfd_create("stratagem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        )
        try:
            if on_disk:
                memory = _map_table(self._fd, self.size)
            else:
                os.ftruncate(self._fd, self.size)
                memory = mmap.mmap(self._fd, self.size)
            _HEAD.pack_into(memory, 0, MAGIC, self.size, self._token)
            if not on_disk:
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
                if not writable_by_peers:
                    _seal_against_writers(self._fd)
        except BaseException:  # Ctrl-C too
            os.close(self._fd)
            raise
        super().__init__(number, memory)
        self.position = HEADER_BYTES
        """Offset of the next entry."""

    def take(self, size: int) -> int | None:
        """Return the offset of a new entry's data; None if it does not fit."""
        offset = self.position + ENTRY_BYTES
        if offset + padded(size) > self.size:
            return None
        self.position = offset + padded(size)
        return offset

    def reset(self) -> None:
        """Forget all entries: their memory may be used again."""
        self.position = HEADER_BYTES

    def begin_write(self, offset: int) -> None:
        """Mark an entry as being written."""
        self.counters[counter_index(offset)] |= 1

    def publish(self, offset: int, version: int) -> None:
        """End a write: the entry has this version now."""
        self.counters[counter_index(offset)] = 2 * version

    def ref(self) -> SegmentRef:
        """Return the reference by which peers open the segment."""
        return SegmentRef(self.number, os.getpid(), self._fd, self.size, self._token)

    @override
    def close(self) -> None:
        if not self._closed:
            os.close(self._fd)
        super().close()

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.position} of {self.size} bytes taken"
        return f"<Segment {self.number} {state}>"


@final
class MappedSegment(_Mapping):
    """Another process's segment, mapped here by `open_segment`."""

    def __init__(self, number: int, memory: mmap.mmap, *, private: bool) -> None:
        super().__init__(number, memory)
        self._private = private

    def read_whole(self, live: Tensor, offset: int, *, attempts: int = 8) -> Tensor | None:
        """Return a consistent copy; None if writes came too often, so that the owner must be asked."""
        for _ in range(attempts):
            before = self.counter(offset)
            copy = live.clone()
            if before % 2 == 0 and self.counter(offset) == before:
                return copy
        return None

    def refresh(self, offset: int, size: int) -> None:
        """Discard what this process wrote to the pages of an entry."""
        if self._private and self._memory is not None:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, start, offset + size - start)

    def rest(self) -> None:
        """Unmap the pages of a shared segment until their next use, so that they do not count as this process's."""
        if not self._private and self._memory is not None:
            self._memory.madvise(mmap.MADV_DONTNEED)

    @override
    def __repr__(self) -> str:
        kind = "private" if self._private else "shared"
        return f"<MappedSegment {self.number} {'closed' if self._closed else kind}>"


@final
class OwnPages(Owner):
    """Asks the kernel which pages of private mappings this process wrote: ``/proc/self/pagemap``, opened once.

    Writes through ``tensor.data`` or NumPy change no version counter.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._closed = False

    def has(self, address: int, size: int = 1, *, unknown: bool = False) -> bool:
        """Return whether this process wrote to a page of a range; `unknown` where the kernel does not say."""
        if self._fd is None:
            self._fd = self._open()
        if self._fd < 0:
            return unknown
        first, last = address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE
        entries = os.pread(self._fd, 8 * (last - first + 1), first * 8)
        # In memory (0b100) or swapped (0b010), and not of the file (0b001).
        return any(highest >> 5 in (0b100, 0b010, 0b110) for highest in entries[7::8])

    def _open(self) -> int:
        if self._closed:
            return -1
        try:
            return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1

    @override
    def close(self) -> None:
        """Close the file. May be called again."""
        self._closed = True
        fd, self._fd = self._fd, -1
        if fd is not None and fd >= 0:
            os.close(fd)

    @override
    def __repr__(self) -> str:
        return f"<OwnPages {'closed' if self._closed else 'open'}>"


def open_segment(ref: SegmentRef, *, shared: bool) -> MappedSegment | None:
    """Map a peer's segment: shared and writable (send buffers), or privately (parameters).

    Return None if it cannot be opened here (another host, container or user).
    """
    path = f"/proc/{ref.pid}/fd/{ref.fd}"
    try:
        fd = os.open(path, (os.O_RDWR if shared else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        _log.debug("segment %s cannot be opened: %s", path, error)
        return None
    try:
        memory = _map_checked(fd, ref, shared=shared)
    except (OSError, ValueError) as error:
        _log.debug("segment %s is another one than announced: %s", path, error)
        return None
    finally:
        os.close(fd)
    return MappedSegment(ref.number, memory, private=not shared)


def _map_checked(fd: int, ref: SegmentRef, *, shared: bool) -> mmap.mmap:
    facts = os.fstat(fd)
    # A segment that can shrink could kill this process with SIGBUS. A table file has no seals; but it has no name, so
    # that only this user can open it, through its server's process.
    is_own_file = stat.S_ISREG(facts.st_mode) and (facts.st_nlink, facts.st_uid) == (
        0,
        os.geteuid(),
    )
    seals = _seals_of(fd)
    is_table = seals is None and is_own_file and not shared
    if not is_table and not (seals or 0) & fcntl.F_SEAL_SHRINK:
        raise ValueError("it is not sealed against shrinking")
    if facts.st_size != ref.size or ref.size < HEADER_BYTES:
        raise ValueError(f"it has {facts.st_size} bytes, not {ref.size}")
    memory = mmap.mmap(
        fd,
        ref.size,
        flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )
    magic, size, token = _HEAD.unpack_from(memory, 0)
    if magic != MAGIC or size != ref.size or not secrets.compare_digest(token, ref.token):
        memory.close()
        raise ValueError("its header does not hold the token announced")
    if is_table:
        _note_table(memory)
    return memory


def _seals_of(fd: int) -> int | None:
    """Return the seals of a memfd; None for a file on disk."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return None


def _seal_against_writers(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError as error:  # kernels before 5.1: private mappings still protect against accidents
        _log.debug("this kernel cannot seal parameters against writers: %s", error)
