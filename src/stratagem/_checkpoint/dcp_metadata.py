"""The index file ``.metadata``, with which ``torch.distributed.checkpoint`` reads a checkpoint.

Only this module uses torch's classes for it. Their import takes a second, so they are loaded when a
checkpoint is written. Stratagem never reads the file, which is a pickle: it reads the manifest.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from stratagem._ps.blocks.manifest import StoredBlock, StoredTensor
from stratagem._ps.blocks.torch_archive import archive_of

Path = tuple[str | int, ...]
"""Keys and positions that lead to a value in a nest."""

_DCP_VERSION = "1.0.0"


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """Place of a value that is not a tensor, as ``torch.save`` writes it."""

    file: str
    offset: int
    bytes: int


def metadata_bytes(
    tensors: Mapping[str, StoredTensor],
    blocks: Mapping[str, Sequence[StoredBlock]],
    blobs: Mapping[str, StoredBlob],
    paths: Mapping[str, Path],
) -> bytes:
    """Return the contents of ``.metadata``.

    Args:
        tensors: every tensor by name.
        blocks: the blocks of each tensor, by the name that its rows are stored under.
        blobs: every other value by name.
        paths: the place of each tensor and value in the nest of all objects.
    """
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as dcp

    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    stored: dict[dcp.MetadataIndex, filesystem._StorageInfo] = {}
    for name, tensor in tensors.items():
        chunks = []
        of_tensor = blocks.get(tensor.same_as or name, ())
        for number, block in enumerate(of_tensor):
            shape = _shape_of(tensor, block)
            offsets = (block.start, *(0 for _ in tensor.shape[1:])) if tensor.shape else ()
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
            archive = archive_of(tensor.torch_dtype, shape)
            stored[dcp.MetadataIndex(name, offsets, number)] = filesystem._StorageInfo(
                block.file, block.offset - archive.data_offset, archive.size
            )
        described[name] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=tensor.torch_dtype), torch.Size(tensor.shape), chunks
        )
    for name, blob in blobs.items():
        described[name] = dcp.BytesStorageMetadata()
        stored[dcp.MetadataIndex(name)] = filesystem._StorageInfo(
            blob.file, blob.offset, blob.bytes
        )
    planned = {name: path for name, path in paths.items() if name in described}
    return pickle.dumps(
        dcp.Metadata(described, planned, stored, dcp.StorageMeta(), version=_DCP_VERSION)
    )


def _shape_of(tensor: StoredTensor, block: StoredBlock) -> tuple[int, ...]:
    return (block.rows, *tensor.shape[1:]) if tensor.shape else ()
