"""Write one checkpoint: the block files, then the index, then the manifest.

A `PartWriter` writes one block file: one for the tensors in this process's memory, and one for each
parameter server, which writes its own rows. The steps:

1. all writers write their files in parallel; 2. ``coordinator.pt`` and ``.metadata``; 3. the manifest.

If any of them fails, the files written so far are removed, and earlier checkpoints are untouched.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, final

from stratagem._checkpoint import dcp_metadata
from stratagem._checkpoint.dcp_metadata import StoredBlob
from stratagem._checkpoint.directory import CheckpointDirectory, SavedCheckpoint
from stratagem._ps.blocks.block_file import BlockFileWriter, Progress, TensorPart
from stratagem._ps.blocks.block_reader import BlockReader
from stratagem._ps.blocks.manifest import (
    BLOCK_SUFFIX,
    COORDINATOR,
    METADATA,
    Manifest,
    StoredBlock,
    StoredFile,
    StoredTensor,
)
from stratagem.errors import CheckpointError


@dataclass(frozen=True)
class FileReport:
    """Description of one written block file.

    Attributes:
        stored: size and checksum of its file.
        blocks: the rows in it.
        blobs: other values in it, by name: where they begin, and their number of bytes.
    """

    stored: StoredFile
    blocks: tuple[StoredBlock, ...]
    blobs: Mapping[str, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))


class PartWriter(Protocol):
    """A process that holds rows, and writes them."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors it has rows of, whole shapes."""

    @property
    def bytes(self) -> int:
        """About how much it will write."""

    def write(self, path: Path, progress: Progress | None) -> FileReport:
        """Write a block file and flush it to disk; called in a thread of its own."""


@final
class LocalWriter:
    """Writer of tensors in this process's memory.

    Args:
        parts: the rows to write.
        aliases: tensors whose rows are another's (tied weights), by name.
        blobs: other values by name, as ``torch.save`` writes them.
    """

    def __init__(
        self,
        parts: Sequence[TensorPart],
        *,
        aliases: Mapping[str, str] = MappingProxyType({}),
        blobs: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        self._parts = parts
        self._blobs = blobs
        self._tensors = {part.tensor: _described(part) for part in parts}
        for name, other in aliases.items():
            twin = self._tensors[other]
            self._tensors[name] = StoredTensor(twin.dtype, twin.shape, same_as=other)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors it has rows of."""
        return self._tensors

    @property
    def bytes(self) -> int:
        """About how much it will write."""
        return sum(part.bytes for part in self._parts) + sum(map(len, self._blobs.values()))

    def write(self, path: Path, progress: Progress | None) -> FileReport:
        """Write a block file and flush it to disk."""
        with BlockFileWriter(path, progress) as file:
            blobs = {name: file.add_blob(data) for name, data in self._blobs.items()}
            for part in self._parts:
                file.add(part)
            return FileReport(file.finish(), tuple(file.blocks), blobs)


def _described(part: TensorPart) -> StoredTensor:
    dtype = str(part.dtype).removeprefix("torch.")
    return StoredTensor(dtype, part.shape, per_shard=part.per_shard)


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """Name, number and facts of a checkpoint to write.

    Attributes:
        step: the training step.
        serial: its number among the saves into the directory.
        metrics: numbers to keep with it.
        final: True for the last checkpoint of a run.
        parent: of a delta, the checkpoint it builds on.
        name: the directory's name; by default it is made of the step.
        job: the named job that saves it, or empty.
    """

    step: int
    serial: int
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    final: bool = False
    parent: SavedCheckpoint | None = None
    name: str = ""
    job: str = ""


def write_checkpoint(
    directory: CheckpointDirectory,
    order: SaveOrder,
    *,
    writers: Sequence[PartWriter],
    coordinator: bytes,
    paths: Mapping[str, dcp_metadata.Path],
    progress: Progress | None = None,
) -> SavedCheckpoint:
    """Write a checkpoint and commit it.

    Args:
        directory: where; the caller has its lock.
        order: its name, number and facts.
        writers: the processes that hold rows.
        coordinator: contents of ``coordinator.pt``.
        paths: the place of every tensor and value in the nest of all, for torch.
        progress: called while rows are written.

    Raises:
        CheckpointError: the disk is full, a file cannot be written, or a writer failed.
    """
    needed = sum(writer.bytes for writer in writers) + len(coordinator)
    try:
        writing = directory.begin()
    except OSError as error:
        raise _failed(directory.path, needed, error) from error
    try:
        _check_space(directory.path, needed)
        manifest = _write_files(
            writing, order, writers=writers, coordinator=coordinator, paths=paths, progress=progress
        )
        return directory.commit(writing, manifest, order.name)
    except OSError as error:
        directory.abandon(writing)
        raise _failed(directory.path, needed, error) from error
    except BaseException:
        directory.abandon(writing)
        raise


def _write_files(
    writing: Path,
    order: SaveOrder,
    *,
    writers: Sequence[PartWriter],
    coordinator: bytes,
    paths: Mapping[str, dcp_metadata.Path],
    progress: Progress | None,
) -> Manifest:
    names = [f"__{number}_0{BLOCK_SUFFIX}" for number in range(len(writers))]
    given_up = False

    def moved(nbytes: int) -> None:
        if given_up:
            raise CheckpointError("another file of the checkpoint could not be written")
        if progress is not None:
            progress(nbytes)

    if len(writers) == 1:
        reports = [writers[0].write(writing / names[0], progress)]
    else:
        with ThreadPoolExecutor(
            len(writers), thread_name_prefix="stratagem-checkpoint-writer"
        ) as pool:
            started = [
                pool.submit(writer.write, writing / name, moved)
                for writer, name in zip(writers, names, strict=True)
            ]
            try:
                reports = [each.result() for each in started]
            except (
                BaseException
            ):  # Ctrl-C, too: the others end now, not when they have written everything
                given_up = True
                raise
    tensors: dict[str, StoredTensor] = {}
    for writer in writers:
        tensors.update(writer.tensors)
    if order.parent is not None:
        tensors = {**order.parent.manifest.tensors, **tensors}
    files = {name: report.stored for name, report in zip(names, reports, strict=True)}
    files[COORDINATOR] = _write_small(writing / COORDINATOR, coordinator)
    manifest = Manifest(
        step=order.step,
        serial=order.serial,
        identity=uuid.uuid4().hex,
        created=time.time(),
        tensors=tensors,
        blocks=tuple(block for report in reports for block in report.blocks),
        files=files,
        parent=order.parent.path.name if order.parent is not None else "",
        parent_identity=order.parent.manifest.identity if order.parent is not None else "",
        final=order.final,
        metrics=order.metrics,
        job=order.job,
    )
    if not manifest.is_delta:
        blobs = {
            blob: StoredBlob(name, *place)
            for name, report in zip(names, reports, strict=True)
            for blob, place in report.blobs.items()
        }
        index = dcp_metadata.metadata_bytes(
            tensors, _blocks_for_torch(writing, manifest), blobs, paths
        )
        files[METADATA] = _write_small(writing / METADATA, index)
    return manifest


def _blocks_for_torch(writing: Path, manifest: Manifest) -> dict[str, Sequence[StoredBlock]]:
    """Return each tensor's blocks; of a number kept per shard, the block with the largest."""
    found: dict[str, Sequence[StoredBlock]] = dict(manifest.blocks_of)
    several = [
        name
        for name, tensor in manifest.tensors.items()
        if tensor.per_shard and len(found.get(name, ())) > 1
    ]
    with BlockReader([(writing, manifest)]) as reader:
        for name in several:
            found[name] = [
                max(
                    found[name],
                    key=lambda block: float(reader.read_number(name, block.start, block.rows)),
                )
            ]
    return found


def _write_small(path: Path, data: bytes) -> StoredFile:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(len(data), zlib.crc32(data))


def _check_space(path: Path, needed: int) -> None:
    """Refuse a checkpoint that is larger than the free space, before the disk is full."""
    free = shutil.disk_usage(path).free
    if needed > free:
        raise CheckpointError(
            f"a checkpoint of about {needed:,} bytes does not fit on the disk of {path}, which has "
            f"{free:,} bytes free. Free disk space, keep fewer checkpoints (max_to_keep), or use another disk."
        )


def _failed(path: Path, needed: int, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint of about {needed:,} bytes could not be written to {path}: {error}. Checkpoints "
        "saved before are untouched."
    )
