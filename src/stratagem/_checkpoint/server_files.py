"""Write and read the checkpoint files of a parameter server (`BlockFiles` of `_ps/server`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import final

from torch import Tensor

from stratagem._checkpoint.block_file import BlockFileWriter, TensorPart
from stratagem._checkpoint.block_reader import BlockReader, RowsWanted
from stratagem._checkpoint.directory import load
from stratagem._checkpoint.manifest import Manifest, StoredBlock
from stratagem._ps.server.checkpoint_parts import CheckpointAccess, RowsToRead, RowsToWrite
from stratagem._wire.messages import BlockRef
from stratagem.errors import CheckpointCorrupt


@final
class ServerFiles:
    """Writes one block file, and reads rows from the block files of a checkpoint."""

    def write(
        self, path: Path, parts: Sequence[RowsToWrite], progress: Callable[[int], None]
    ) -> tuple[int, int, Sequence[BlockRef]]:
        """Write a file and flush it; return its size, its checksum, and its blocks."""
        blocks = []
        with BlockFileWriter(path, progress) as file:
            for some in _together(parts):
                first = len(file.blocks)
                file.add(*map(_tensor_part, some))
                numbers = {part.tensor: part.part for part in some}
                blocks += [_block_ref(numbers[one.tensor], one) for one in file.blocks[first:]]
            stored = file.finish()
        return stored.bytes, stored.crc32, blocks

    def read(
        self,
        chain: Sequence[tuple[str, str]],
        parts: Sequence[RowsToRead],
        progress: Callable[[int], None],
    ) -> None:
        """Read or verify rows of a checkpoint.

        Raises:
            CheckpointCorrupt: a file is missing or damaged, or the checkpoint was replaced.
        """
        opened = [
            (Path(directory), _manifest(directory, identity)) for directory, identity in chain
        ]
        with BlockReader(opened, progress) as reader:
            rows: list[RowsWanted] = []
            for part in parts:
                if part.per_shard:
                    number = reader.read_number(part.tensor, part.start, part.rows)
                    if part.into is not None:
                        part.into.copy_(number)
                elif part.into is not None:
                    rows.append(RowsWanted(part.tensor, part.start, part.into))
                else:
                    reader.verify_rows(part.tensor, part.start, part.rows)
            reader.read(rows)


def access_to(directories: Sequence[str]) -> CheckpointAccess:
    """Return the access of a server to checkpoints below these directories."""
    return CheckpointAccess(tuple(directories), ServerFiles())


def _together(parts: Sequence[RowsToWrite]) -> Iterable[Sequence[RowsToWrite]]:
    """Return parts by the rows that they have: the same rows of a variable and of its optimizer state.

    A step changes these at the same time. Once they have been read, it need not copy any of them.
    """
    found: dict[tuple[int, ...], list[RowsToWrite]] = {}
    for part in parts:
        key = part.variable, part.start, part.rows, part.per_shard, part.ids is None
        found.setdefault(key, []).append(part)
    return found.values()


def _block_ref(part: int, block: StoredBlock) -> BlockRef:
    ids = () if block.ids is None else (block.ids.offset, block.ids.crc32)
    return BlockRef(part, block.offset, block.start, block.rows, block.crc32, *ids)


def _tensor_part(part: RowsToWrite) -> TensorPart:
    def read(first: int, last: int) -> Tensor:
        if part.per_shard:
            return part.read(0, 1)
        if part.ids is not None:
            return part.read(first, last)
        return part.read(first - part.start, last - part.start)

    return TensorPart(
        tensor=part.tensor,
        dtype=part.dtype,
        shape=() if part.per_shard else part.shape,
        start=part.start,
        rows=part.rows if part.ids is None else len(part.ids),
        ids=None if part.ids is None else part.ids + part.start,
        read=read,
        per_shard=part.per_shard,
    )


def _manifest(directory: str, identity: str) -> Manifest:
    manifest = load(Path(directory)).manifest
    if manifest.identity != identity:
        raise CheckpointCorrupt(
            f"{directory} is another checkpoint than the one to restore: it was replaced meanwhile.",
            path=directory,
        )
    return manifest
