"""Read and verify rows of tensors in the block files of a checkpoint and its parents.

The reader (the coordinator, or a parameter server for its own rows) needs manifests only. It never
unpickles.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from stratagem._owner import Owner
from stratagem._ps.blocks.block_file import Progress, memory_of
from stratagem._ps.blocks.block_plan import (
    BlockRead,
    cut_rows,
    intersect,
    plan_number,
    plan_reads,
)
from stratagem._ps.blocks.checksums import crc32 as checksum
from stratagem._ps.blocks.manifest import (
    BLOCK_SUFFIX,
    NAME,
    Manifest,
    StoredBlock,
    StoredTensor,
    from_text,
)
from stratagem.errors import CheckpointCorrupt

_THREADS: Final = 2
"""Blocks read at once: one waits for the disk while another is checksummed."""

PIECE_BYTES: Final = 1 << 20
"""Bytes per read: the checksum finds them in the processor's cache."""


@dataclass(frozen=True)
class RowsWanted:
    """Rows of a tensor to be read.

    Attributes:
        tensor: its name.
        start: the first row.
        into: memory for the rows, contiguous and on the host; its length says how many rows. For a
            tensor without axes, a tensor without axes.
    """

    tensor: str
    start: int
    into: Tensor


@final
class BlockReader(Owner):
    """The rows of one checkpoint.

    Args:
        chain: the checkpoint's directory and manifest, then its parent's, and so on.
        progress: called while rows are read.
    """

    def __init__(
        self, chain: Sequence[tuple[Path, Manifest]], progress: Progress | None = None
    ) -> None:
        self._paths = [path for path, _ in chain]
        self._manifests = [manifest for _, manifest in chain]
        self._progress = progress
        self._descriptors: dict[Path, int] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="stratagem-checkpoint-io")
        self._spare: list[memoryview] = []  # to verify in, used again: fresh memory is slow

    def read(self, wanted: Sequence[RowsWanted]) -> None:
        """Fill the tensors of `wanted`.

        Raises:
            CheckpointCorrupt: a file is missing or damaged, or rows are in no block.
        """
        reads: list[list[tuple[BlockRead, RowsWanted]]] = [[] for _ in self._manifests]
        for each in wanted:
            rows = each.into.shape[0] if each.into.dim() else 1
            for one in plan_reads(self._manifests, each.tensor, each.start, rows):
                reads[one.depth].append((one, each))
        # Parents first: what a delta holds overwrites what they gave.
        for of_one_checkpoint in reversed(reads):
            for block, _ in of_one_checkpoint:
                self._open(block.depth, block.block.file)  # not in the threads: once each
            for _ in self._threads.map(self._carry_out, of_one_checkpoint):
                pass

    def read_number(self, tensor: str, start: int, rows: int) -> Tensor:
        """Return a number kept per shard, for the shard with these rows.

        A shard that was not saved so (another layout) gets the largest number of all shards.
        """
        found: Tensor | None = None
        for depth, block in plan_number(self._manifests, tensor, start, rows):
            self._open(depth, block.file)
            number = torch.empty((), dtype=self._stored(depth, block).torch_dtype)
            self._fetch(depth, block, memory_of(number))
            found = number if found is None else torch.maximum(found, number)
        assert found is not None
        return found

    def verify(self) -> None:
        """Read and check every block that the checkpoint itself has, and that all rows are somewhere."""
        manifest = self._manifests[0]
        for name, tensor in manifest.tensors.items():
            if not tensor.per_shard:
                plan_reads(self._manifests, name, 0, tensor.rows)
        for block in manifest.blocks:
            self._open(0, block.file)
        for _ in self._threads.map(self._verify_block, manifest.blocks):
            pass

    def verify_rows(self, tensor: str, start: int, rows: int) -> None:
        """Read and check the blocks that hold rows of a tensor, without keeping the rows."""
        reads = plan_reads(self._manifests, tensor, start, rows)
        for one in reads:
            self._open(one.depth, one.block.file)
        for _ in self._threads.map(lambda one: self._verify_block(one.block, one.depth), reads):
            pass

    def close(self) -> None:
        """Close the files."""
        self._threads.shutdown(wait=True)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _open(self, depth: int, file: str) -> int:
        path = self._paths[depth] / file
        if path not in self._descriptors:
            with naming_the_file(path):
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[path]

    def _stored(self, depth: int, block: StoredBlock) -> StoredTensor:
        return self._manifests[depth].tensors[block.tensor]

    def _carry_out(self, task: tuple[BlockRead, RowsWanted]) -> None:
        read, wanted = task
        block, depth = read.block, read.depth
        into = wanted.into if wanted.into.dim() else wanted.into.reshape(1)
        end = wanted.start + into.shape[0]
        if block.is_scattered:
            self._scatter(read, wanted.start, into)
        elif wanted.start <= block.start and block.start + block.rows <= end:
            # The usual case: the whole block, straight into its place. Newer blocks come later.
            first = block.start - wanted.start
            self._fetch(depth, block, memory_of(into[first : first + block.rows]))
        else:
            self._fetch_some(read, wanted.start, into)

    def _fetch_some(self, read: BlockRead, start: int, into: Tensor) -> None:
        """Read the wanted rows of a block into their places, piece by piece; `start` is the first row of `into`."""
        block, depth = read.block, read.depth
        row_bytes = self._stored(depth, block).row_bytes
        pieces = cut_rows(block.start, block.rows, row_bytes, PIECE_BYTES)
        first, last = pieces[0]
        spare = torch.empty((last - first, *into.shape[1:]), dtype=into.dtype)
        crc32 = 0
        for low, high in pieces:
            wanted = intersect(read.wanted, low, high)
            is_whole = wanted == [(low, high)]
            rows = into[low - start : high - start] if is_whole else spare[: high - low]
            place = block.offset + (low - block.start) * row_bytes
            crc32 = self._pread(depth, block.file, memory_of(rows), place, crc32)
            for begin, end in () if is_whole else wanted:
                into[begin - start : end - start] = rows[begin - low : end - low]
        if crc32 != block.crc32:
            raise self._damaged(
                depth, block, f"{block.rows * row_bytes} bytes at byte {block.offset}"
            )

    def _scatter(self, read: BlockRead, start: int, into: Tensor) -> None:
        block = read.block
        ids = self._ids(read.depth, block)
        picked = torch.zeros(block.rows, dtype=torch.bool)
        for low, high in read.wanted:
            picked |= (ids >= low) & (ids < high)
        rows = torch.empty((block.rows, *into.shape[1:]), dtype=into.dtype)
        self._fetch(read.depth, block, memory_of(rows))
        into[ids[picked] - start] = rows[picked]

    def _ids(self, depth: int, block: StoredBlock) -> Tensor:
        ids = torch.empty(block.rows, dtype=torch.int64)
        crc32 = self._pread(depth, block.file, memory_of(ids), block.ids_offset)
        if crc32 != block.ids_crc32:
            raise self._damaged(depth, block, f"row numbers at byte {block.ids_offset}")
        return ids

    def _fetch(self, depth: int, block: StoredBlock, into: memoryview) -> None:
        crc32 = self._pread(depth, block.file, into, block.offset)
        if crc32 != block.crc32:
            raise self._damaged(depth, block, f"{len(into)} bytes at byte {block.offset}")

    def _verify_block(self, block: StoredBlock, depth: int = 0) -> None:
        if block.is_scattered:
            self._ids(depth, block)
        size = self._stored(depth, block).bytes_of(block)
        try:
            piece = self._spare.pop()
        except IndexError:
            piece = memoryview(bytearray(PIECE_BYTES))
        crc32 = 0
        for start in range(0, size, PIECE_BYTES):
            part = piece[: min(size - start, PIECE_BYTES)]
            crc32 = self._pread(depth, block.file, part, block.offset + start, crc32)
        self._spare.append(piece)
        if crc32 != block.crc32:
            raise self._damaged(depth, block, f"{size} bytes at byte {block.offset}")

    def _damaged(self, depth: int, block: StoredBlock, where: str) -> CheckpointCorrupt:
        path = self._paths[depth] / block.file
        return CheckpointCorrupt(
            f"{path} is damaged: the checksum of {where} (rows {block.start}… of {block.tensor!r}) "
            "does not match the manifest's.",
            path=str(path),
        )

    def _pread(self, depth: int, file: str, into: memoryview, offset: int, crc32: int = 0) -> int:
        """Read bytes and return their checksum, continued from `crc32`."""
        descriptor, done = self._descriptors[self._paths[depth] / file], 0
        while done < len(into):
            piece = into[done : done + PIECE_BYTES]
            with naming_the_file(self._paths[depth] / file):
                got = os.preadv(descriptor, [piece], offset + done)
            if not got:
                path = self._paths[depth] / file
                raise CheckpointCorrupt(
                    f"{path} ends at byte {offset + done}: {len(into) - done} more bytes were "
                    "expected. The file was truncated.",
                    path=str(path),
                )
            crc32 = checksum(piece[:got], crc32)
            done += got
            if self._progress is not None:
                self._progress(got)
        return crc32

    def __repr__(self) -> str:
        return f"<BlockReader of {self._paths[0]}, {len(self._paths) - 1} parents>"


def load_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in a directory.

    Raises:
        CheckpointCorrupt: it is missing or damaged.
    """
    file = path / NAME
    with naming_the_file(file):
        data = file.read_bytes()
    return from_text(data.decode(errors="replace"), str(file))


def check_frames(path: Path, manifest: Manifest) -> None:
    """Check that every file is there, has its size, and that all bytes outside blocks are right.

    Raises:
        CheckpointCorrupt: names the first file that is not as the manifest says.
    """
    for name, stored in manifest.files.items():
        file = path / name
        with naming_the_file(file):
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size != stored.bytes:
                raise CheckpointCorrupt(
                    f"{file} has {size} bytes, but the manifest says {stored.bytes}.",
                    path=str(file),
                )
            crc32 = 0
            for start, end in (
                _frames_of(name, manifest) if name.endswith(BLOCK_SUFFIX) else [(0, size)]
            ):
                with naming_the_file(file):
                    while start < end:
                        data = os.pread(descriptor, min(end - start, PIECE_BYTES), start)
                        crc32 = checksum(data, crc32)
                        start += len(data)
        finally:
            os.close(descriptor)
        if crc32 != stored.crc32:
            raise CheckpointCorrupt(
                f"{file} is damaged: the checksum of its bytes outside blocks does not match the "
                "manifest's.",
                path=str(file),
            )


def _frames_of(file: str, manifest: Manifest) -> Iterator[tuple[int, int]]:
    """Yield the parts of a block file that are no rows, in order."""
    taken: list[tuple[int, int]] = []
    for block in manifest.blocks:
        if block.file == file:
            taken.append((block.offset, manifest.tensors[block.tensor].bytes_of(block)))
            if block.is_scattered:
                taken.append((block.ids_offset, 8 * block.rows))
    end = 0
    for offset, size in sorted(taken):
        yield end, offset
        end = offset + size
    yield end, manifest.files[file].bytes


@contextmanager
def naming_the_file(path: Path) -> Iterator[None]:
    """Turn an `OSError` about a file of a checkpoint into `CheckpointCorrupt`."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointCorrupt(
            f"{path} is missing, but the checkpoint's manifest names it.", path=str(path)
        ) from None
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}.", path=str(path)) from error
