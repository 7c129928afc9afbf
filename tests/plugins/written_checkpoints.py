"""Helpers of these tests: checkpoints written by any number of writers, without any live object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stratagem._checkpoint.checkpoint_writer import LocalWriter, SaveOrder, write_checkpoint
from stratagem._checkpoint.directory import CheckpointDirectory, SavedCheckpoint, chain_of
from stratagem._checkpoint.encoding import torch_bytes
from stratagem._ps.blocks.block_file import TensorPart
from stratagem._ps.blocks.block_reader import BlockReader, RowsWanted


def rows_part(name: str, tensor: Tensor, start: int, rows: int) -> TensorPart:
    """Rows of a tensor, as the writer that has only them would give them."""
    own = tensor[start : start + rows].clone() if tensor.dim() else tensor.reshape(1).clone()
    return TensorPart(
        tensor=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        start=start,
        rows=rows,
        read=lambda first, last: own[first - start : last - start],
    )


def touched_part(name: str, tensor: Tensor, ids: Sequence[int]) -> TensorPart:
    """Scattered rows of a tensor."""
    numbers = torch.tensor(sorted(ids), dtype=torch.int64)
    own = tensor[numbers].clone()
    return TensorPart(
        tensor=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        start=0,
        rows=len(numbers),
        read=lambda first, last: own[first:last],
        ids=numbers,
    )


def number_part(name: str, value: float, start: int, rows: int) -> TensorPart:
    """An optimizer's number of steps, for the shard with these rows."""
    return TensorPart(
        tensor=name,
        dtype=torch.float32,
        shape=(),
        start=start,
        rows=rows,
        read=lambda first, last: torch.tensor([value]),
        per_shard=True,
    )


def write(
    directory: Path,
    parts_of_writers: Sequence[Sequence[TensorPart]],
    *,
    parent: SavedCheckpoint | None = None,
    step: int = 1,
    serial: int = 1,
) -> SavedCheckpoint:
    """A checkpoint with one file per writer."""
    directory.mkdir(exist_ok=True)
    writers = [LocalWriter(parts) for parts in parts_of_writers]
    names = {name for writer in writers for name in writer.tensors}
    return write_checkpoint(
        CheckpointDirectory(directory),
        SaveOrder(step=step, serial=serial, parent=parent),
        writers=writers,
        coordinator=torch_bytes({"objects": {}, "random": {}}),
        paths={name: tuple(name.split(".")) for name in names},
    )


def read(saved: SavedCheckpoint, name: str, start: int, rows: int) -> Tensor:
    """Rows of a tensor, as one reader gets them."""
    stored = saved.manifest.tensors[name]
    shape = (rows, *stored.shape[1:]) if stored.shape else ()
    into = torch.empty(shape, dtype=stored.torch_dtype)
    with BlockReader(chain_of(saved)) as reader:
        reader.read([RowsWanted(name, start, into)])
    return into


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def read_by_torch(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, read by torch alone."""
    import warnings

    import torch.distributed.checkpoint as dcp

    found = {name: torch.empty_like(each) for name, each in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process
        dcp.load(found, checkpoint_id=path)
    return found
