"""Writing block files: the rows of many tensors, framed as torch frames them, checksummed.

One process writes one file. The coordinator writes the tensors in its memory; parameter servers will
write theirs with the same code. A file is a row of archives (`torch_archive`), each beginning at a
multiple of 64 bytes, and of small blobs.

Checksums and the flush to disk run in threads beside the writes, so that a save takes as long as the
slowest of the three.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from stratagem import _faults as faults
from stratagem._checkpoint import checksums
from stratagem._checkpoint.block_plan import cut_rows
from stratagem._checkpoint.manifest import StoredBlock, StoredFile, StoredIds
from stratagem._checkpoint.torch_archive import ALIGNMENT, Archive, archive_of
from stratagem._owner import Owner

PIECE_BYTES = 1 << 20
"""Bytes per write: small enough that the checksum finds the piece in the cache and that a step waits
briefly for a piece that is being copied, large enough that calls and hand-overs (30 µs) do not matter."""

FLUSH_BYTES = 64 << 20
"""Bytes per flush to disk, while later pieces are written; the kernel would start much later."""

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call."""


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """Rows of one tensor that one writer writes.

    Attributes:
        tensor: the tensor's name.
        dtype: its type.
        shape: of the whole tensor.
        start: the first row.
        rows: how many rows.
        read: ``read(first, last)`` returns these rows of the tensor as a contiguous tensor in host
            memory, which must stay as it is until the next call.
        ids: of a delta, which rows; ascending int64. `rows` is then their number, and ``read(i, j)``
            returns the rows ``ids[i:j]``.
        per_shard: True for a number kept per shard; the rows are those of the shard.
    """

    tensor: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    rows: int
    read: Callable[[int, int], Tensor]
    ids: Tensor | None = None
    per_shard: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        size = self.dtype.itemsize
        for each in self.shape[1:]:
            size *= each
        return size

    @property
    def bytes(self) -> int:
        """Raw bytes of the part."""
        count = 1 if self.per_shard else self.rows
        return count * self.row_bytes + (0 if self.ids is None else 8 * self.rows)


def part_of(name: str, tensor: Tensor) -> TensorPart:
    """Return a whole tensor in host memory as one part.

    Example:
        >>> part_of("w", torch.ones(3, 2)).bytes
        24
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    data = tensor if tensor.dim() else tensor.reshape(1)
    return TensorPart(
        tensor=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        start=0,
        rows=rows,
        read=lambda first, last: data[first:last],
    )


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    # One element may have any stride (expand() gives 0), and view() keeps it.
    data: Any = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(data)


@final
class BlockFileWriter(Owner):
    """One block file being written.

    Args:
        path: the file; it must not exist.
        progress: called while rows are written.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self._name = path.name
        self._progress = progress
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._end = 0
        self._frame_crc32 = 0
        self._unflushed = 0
        self._flush: Future[None] | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="stratagem-checkpoint-io")
        self._closed = False
        self.blocks: list[StoredBlock] = []

    def add_blob(self, data: bytes) -> tuple[int, int]:
        """Write bytes that are no rows; returns where they begin, and their number."""
        self._pad()
        begins = self._end
        self._put(data, begins)
        self._framed(data)
        self._end += len(data)
        return begins, len(data)

    def add(self, part: TensorPart) -> None:
        """Write a part, in blocks."""
        if part.per_shard:
            offset, crc32 = self._archive(archive_of(part.dtype, ()), part, 0, 1)
            self._note(part, offset, part.start, part.rows, crc32, None)
            return
        first = 0 if part.ids is not None else part.start
        for low, high in cut_rows(first, part.rows, part.row_bytes):
            ids = None
            if part.ids is not None:
                ids = self._write_ids(part.ids[low:high])
            shape = (high - low, *part.shape[1:]) if part.shape else ()
            offset, crc32 = self._archive(archive_of(part.dtype, shape), part, low, high)
            start = part.start if part.ids is not None else low
            self._note(part, offset, start, high - low, crc32, ids)

    def finish(self, facts: Mapping[str, Any] = MappingProxyType({})) -> StoredFile:
        """Flush the file to disk; returns its size and checksum."""
        if self._flush is not None:
            self._flush.result()
        if faults.active is not None:
            faults.active.at("save.before_fsync")
        os.fsync(self._descriptor)
        self.close()
        return StoredFile(self._end, self._frame_crc32, facts)

    def close(self) -> None:
        """Close the file without flushing it."""
        if not self._closed:
            self._closed = True
            self._threads.shutdown(wait=True)
            os.close(self._descriptor)

    def _note(
        self,
        part: TensorPart,
        offset: int,
        start: int,
        rows: int,
        crc32: int,
        ids: StoredIds | None,
    ) -> None:
        self.blocks.append(StoredBlock(part.tensor, self._name, offset, start, rows, crc32, ids))

    def _write_ids(self, ids: Tensor) -> StoredIds:
        whole = part_of("", ids)
        offset, crc32 = self._archive(archive_of(torch.int64, tuple(ids.shape)), whole, 0, len(ids))
        return StoredIds(offset, crc32)

    def _archive(self, archive: Archive, part: TensorPart, low: int, high: int) -> tuple[int, int]:
        """Write rows with their frame; returns where the rows begin, and their checksum."""
        self._pad()
        offset = self._end + archive.data_offset
        crc32 = self._write_rows(part, low, high, offset)
        before, after = archive.frame(crc32)
        self._put(before, self._end)
        self._put(after, offset + archive.data_bytes)
        self._framed(before)
        self._framed(after)
        self._end += archive.size
        return offset, crc32

    def _write_rows(self, part: TensorPart, low: int, high: int, offset: int) -> int:
        crc32, size = 0, part.row_bytes
        for first, last in cut_rows(low, high - low, size, PIECE_BYTES):
            piece = memory_of(part.read(first, last))
            place = offset + (first - low) * size
            # Rows may be longer than a piece.
            for start in range(0, len(piece), PIECE_BYTES):
                part_of_piece = piece[start : start + PIECE_BYTES]
                crc32 = self._write_piece(part_of_piece, place + start, crc32)
        return crc32

    def _write_piece(self, piece: memoryview, place: int, crc32: int) -> int:
        if checksums.IS_FAST or len(piece) < PIECE_BYTES // 8:
            self._put(piece, place)
            crc32 = checksums.crc32(piece, crc32)
        else:
            checksum = self._threads.submit(checksums.crc32, piece, crc32)
            try:
                self._put(piece, place)
            finally:
                crc32 = checksum.result()
        self._unflushed += len(piece)
        if self._unflushed >= FLUSH_BYTES and (self._flush is None or self._flush.done()):
            if self._flush is not None:
                self._flush.result()
            self._unflushed = 0
            self._flush = self._threads.submit(os.fdatasync, self._descriptor)
        if self._progress is not None:
            self._progress(len(piece))
        return crc32

    def _pad(self) -> None:
        padding = bytes(-self._end % ALIGNMENT)
        if padding:
            self._put(padding, self._end)
            self._framed(padding)
            self._end += len(padding)

    def _framed(self, data: bytes) -> None:
        self._frame_crc32 = checksums.crc32(data, self._frame_crc32)

    def _put(self, data: bytes | memoryview, place: int) -> None:
        rest = memoryview(data)
        while rest:
            done = os.pwrite(self._descriptor, rest, place)
            rest, place = rest[done:], place + done

    def __repr__(self) -> str:
        return f"<BlockFileWriter {self._name}: {len(self.blocks)} blocks, {self._end} bytes>"
