"""Row-range arithmetic: divide tensors into blocks, and find the blocks that contain given rows.

Pure. A checkpoint may be written by any number of processes, each with its own ranges of rows, and read
into any other layout: `plan_reads` intersects the two. A *chain* is a list of manifests, newest first:
a delta, its parent, and so on to a full checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stratagem._ps.blocks.manifest import Manifest, StoredBlock
from stratagem.errors import CheckpointCorrupt

Range = tuple[int, int]
"""First row, and the row after the last."""

BLOCK_BYTES = 64 << 20
"""Largest block, unless one row is larger. A reader verifies whole blocks, so this is what it reads at
most beyond the rows it needs; 100 GB make 1,600 blocks, a manifest of about 100 kB."""


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One block to read.

    Attributes:
        depth: 0 for a block of the checkpoint itself, 1 for one of its parent, and so on.
        block: the block.
        wanted: the rows to take from it, as ranges of the tensor's rows.
    """

    depth: int
    block: StoredBlock
    wanted: tuple[Range, ...]


def cut_rows(start: int, rows: int, row_bytes: int, limit: int = BLOCK_BYTES) -> list[Range]:
    """Return ranges of at most `limit` bytes that together are `rows` rows from `start`.

    Example:
        >>> cut_rows(10, 5, row_bytes=8, limit=16)
        [(10, 12), (12, 14), (14, 15)]
        >>> cut_rows(0, 0, row_bytes=8)
        [(0, 0)]
    """
    step = max(1, limit // row_bytes) if row_bytes else max(1, rows)
    if rows == 0:
        return [(start, start)]
    return [(first, min(first + step, start + rows)) for first in range(start, start + rows, step)]


def intersect(ranges: Iterable[Range], low: int, high: int) -> list[Range]:
    """Return the parts of `ranges` inside ``low … high``.

    Example:
        >>> intersect([(0, 4), (6, 9)], 2, 7)
        [(2, 4), (6, 7)]
    """
    found = ((max(first, low), min(last, high)) for first, last in ranges)
    return [(first, last) for first, last in found if first < last]


def subtract(ranges: Iterable[Range], low: int, high: int) -> list[Range]:
    """Return the parts of `ranges` outside ``low … high``.

    Example:
        >>> subtract([(0, 4), (6, 9)], 2, 7)
        [(0, 2), (7, 9)]
    """
    found: list[Range] = []
    for first, last in ranges:
        found.extend(
            (a, b) for a, b in ((first, min(last, low)), (max(first, high), last)) if a < b
        )
    return found


def plan_reads(chain: Sequence[Manifest], tensor: str, start: int, rows: int) -> list[BlockRead]:
    """Return the blocks that hold rows ``start … start + rows`` of a tensor, oldest checkpoint first.

    Applied in that order, each read overwrites what older ones gave. Rows that a newer range of rows
    replaces altogether are not read from older checkpoints.

    Raises:
        CheckpointCorrupt: some rows are in no block.
    """
    missing = [(start, start + rows)] if rows else []
    reads: list[BlockRead] = []
    for depth, manifest in enumerate(chain):
        if not missing:
            break
        still_missing = missing
        for block in manifest.blocks_of.get(stored_name(manifest, tensor), ()):
            low, high = block.start, block.start + block.rows
            if block.is_scattered:
                # Which rows it has is known when its numbers are read; it covers no range.
                reads.append(BlockRead(depth, block, tuple(missing)))
                continue
            wanted = intersect(missing, low, high)
            if wanted:
                reads.append(BlockRead(depth, block, tuple(wanted)))
                still_missing = subtract(still_missing, low, high)
        missing = still_missing
    if missing and not chain[0].tensors[tensor].has_holes:
        listed = ", ".join(f"{first}…{last - 1}" for first, last in missing[:5])
        raise CheckpointCorrupt(
            f"rows {listed} of tensor {tensor!r} are in no block of the checkpoint.", path=""
        )
    return reads[::-1]


def plan_number(
    chain: Sequence[Manifest], tensor: str, start: int, rows: int
) -> list[tuple[int, StoredBlock]]:
    """Return the blocks that may hold a number kept per shard, for the shard with these rows.

    One block if a shard with exactly these rows was saved; else those of all shards, of which the
    caller takes the largest number.

    Raises:
        CheckpointCorrupt: there is none.
    """
    for depth, manifest in enumerate(chain):
        blocks = manifest.blocks_of.get(stored_name(manifest, tensor), ())
        same = [block for block in blocks if (block.start, block.rows) == (start, rows)]
        if blocks:
            return [(depth, block) for block in same or blocks]
    raise CheckpointCorrupt(f"tensor {tensor!r} is in no block of the checkpoint.", path="")


def stored_name(manifest: Manifest, tensor: str) -> str:
    """Return the name under which a tensor's rows are stored (tied weights are stored once)."""
    known = manifest.tensors.get(tensor)
    return known.same_as if known is not None and known.same_as else tensor
