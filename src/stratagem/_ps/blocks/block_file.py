"""Write block files: rows of tensors in torch's file format, with checksums.

One process writes one file. The coordinator writes the tensors in its memory; parameter servers write
theirs with the same code. A file is a sequence of archives (`torch_archive`), each beginning at a
multiple of 64 bytes, and of small blobs.

A thread flushes to disk in parallel with the writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from stratagem import _faults as faults
from stratagem._owner import Owner
from stratagem._ps.blocks import checksums
from stratagem._ps.blocks.block_plan import cut_rows
from stratagem._ps.blocks.manifest import StoredBlock, StoredFile
from stratagem._ps.blocks.new_file import Area, NewFile
from stratagem._ps.blocks.torch_archive import ALIGNMENT, archive_of
from stratagem.errors import CheckpointError

PIECE_BYTES = 1 << 20
"""Bytes per write: small enough that the checksum finds the piece in the cache and that a step waits
briefly for a piece that is being copied, large enough that calls and hand-overs (30 µs) do not matter."""

FLUSH_BYTES = 64 << 20
"""Bytes per flush to disk, while later pieces are written; the kernel would start much later."""

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call."""


@dataclass(frozen=True)
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
class _Block:
    """Rows ``low … high`` of a part, and their place in the file."""

    def __init__(self, part: TensorPart, low: int, high: int, *, after: int) -> None:
        self.part, self.low, self.high = part, low, high
        has_rows = bool(part.shape) and not part.per_shard
        self.archive = archive_of(part.dtype, (high - low, *part.shape[1:]) if has_rows else ())
        begin = after + -after % ALIGNMENT
        self.offset = begin + self.archive.data_offset
        self.end = begin + self.archive.size
        self.crc32 = 0


def _ranges_of(part: TensorPart) -> list[tuple[int, int]]:
    """Return the rows of the blocks of a part, as its `read` counts them."""
    if part.per_shard:
        return [(0, 1)]
    return cut_rows(0 if part.ids is not None else part.start, part.rows, part.row_bytes)


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
        self._file = NewFile(path)
        self._end = 0
        self._frame_crc32 = 0
        self._unflushed = 0
        self._flush: Future[None] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="stratagem-checkpoint-io")
        self._closed = False
        self.blocks: list[StoredBlock] = []

    def add_blob(self, data: bytes) -> tuple[int, int]:
        """Write bytes that are no rows; returns where they begin, and their number."""
        self._pad()
        begins = self._end
        self._file.put(data, begins)
        self._framed(data)
        self._end += len(data)
        return begins, len(data)

    def add(self, *parts: TensorPart) -> None:
        """Write parts, in blocks; those of several parts in turns, so that the same rows of all are read together."""
        for turn in itertools.zip_longest(*(_ranges_of(part) for part in parts)):
            opened: list[_Block] = []
            for part, rows in zip(parts, turn, strict=True):
                if rows is None:
                    continue
                end = opened[-1].end if opened else self._end
                if part.ids is not None:
                    ids = part_of("", part.ids[slice(*rows)])
                    opened.append(_Block(ids, 0, ids.rows, after=end))
                    end = opened[-1].end
                opened.append(_Block(part, *rows, after=end))
            self._write_rows(opened)
            ids_of: tuple[int, ...] = ()
            for block in opened:
                self._frame(block)
                if not block.part.tensor:
                    ids_of = block.offset, block.crc32
                else:
                    self._note(block, *ids_of)
                    ids_of = ()

    def finish(self, facts: Mapping[str, Any] = MappingProxyType({})) -> StoredFile:
        """Flush the file to disk; returns its size and checksum."""
        if self._flush is not None:
            self._flush.result()
        if faults.active is not None:
            faults.active.at("save.before_fsync")
        self._file.flush()
        self.close()
        return StoredFile(self._end, self._frame_crc32, facts)

    def close(self) -> None:
        """Close the file without flushing it."""
        if not self._closed:
            self._closed = True
            self._threads.shutdown(wait=True)
            self._file.close()

    def _note(self, block: _Block, *ids: int) -> None:
        part, start, rows = block.part, block.low, block.high - block.low
        if part.per_shard:
            start, rows = part.start, part.rows
        elif ids:
            start = part.start
        place = self._name, block.offset
        self.blocks.append(StoredBlock(part.tensor, *place, start, rows, block.crc32, *ids))

    def _write_rows(self, blocks: Sequence[_Block]) -> None:
        """Write rows, a piece of each block in turn."""
        pieces = [
            cut_rows(one.low, one.high - one.low, one.part.row_bytes, PIECE_BYTES) for one in blocks
        ]
        areas = [self._file.area(one.offset, one.archive.data_bytes) for one in blocks]
        for turn in itertools.zip_longest(*pieces):
            for block, area, rows in zip(blocks, areas, turn, strict=True):
                if rows is None:
                    continue
                piece = memory_of(block.part.read(*rows))
                expected = (rows[1] - rows[0]) * block.part.row_bytes
                if len(piece) != expected:
                    raise CheckpointError(
                        f"rows {rows[0]} to {rows[1]} of {block.part.tensor!r} have {len(piece)} bytes, expected {expected}. "
                        "Nothing was saved; this is a defect of Stratagem: please report it."
                    )
                # Rows may be longer than a piece.
                for start in range(0, len(piece), PIECE_BYTES):
                    part_of_piece = piece[start : start + PIECE_BYTES]
                    block.crc32 = self._write_piece(part_of_piece, area, block.crc32)
        for area in areas:
            area.end()

    def _frame(self, block: _Block) -> None:
        """Write what is around the rows of a block."""
        self._pad()
        before, after = block.archive.frame(block.crc32)
        self._file.put(before, self._end)
        self._file.put(after, block.offset + block.archive.data_bytes)
        self._framed(before)
        self._framed(after)
        self._end = block.end

    def _write_piece(self, piece: memoryview, area: Area, crc32: int) -> int:
        area.add(piece)
        crc32 = checksums.crc32(piece, crc32)
        if not area.is_direct:
            self._unflushed += len(piece)
        if self._unflushed >= FLUSH_BYTES and (self._flush is None or self._flush.done()):
            if self._flush is not None:
                self._flush.result()
            self._unflushed = 0
            self._flush = self._threads.submit(self._file.flush_rows)
        if self._progress is not None:
            self._progress(len(piece))
        return crc32

    def _pad(self) -> None:
        padding = bytes(-self._end % ALIGNMENT)
        if padding:
            self._file.put(padding, self._end)
            self._framed(padding)
            self._end += len(padding)

    def _framed(self, data: bytes) -> None:
        self._frame_crc32 = checksums.crc32(data, self._frame_crc32)

    def __repr__(self) -> str:
        return f"<BlockFileWriter {self._name}: {len(self.blocks)} blocks, {self._end} bytes>"
