"""The manifest of a checkpoint: the location of each tensor's rows, and checksums.

Pure: text in, `Manifest` out, and back. ``manifest.json`` is written last, so a directory that has one
is complete. The text carries its own checksum::

    {"crc32": "0f3a9c21", "manifest": {…}}
              ^^^^^^^^^^              ^^^ the checksum is that of these bytes, exactly

Every byte of every other file is covered, too. A block file (``__0_0.distcp``) consists of raw rows, each
range with a checksum of its own, and of the frames around them, which have one checksum per file.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from stratagem._wire.messages import StoredBlock as StoredBlock
from stratagem.errors import CheckpointCorrupt

FORMAT = 1
"""Version of the layout described here. Readers refuse newer ones."""

NAME = "manifest.json"
METADATA = ".metadata"
COORDINATOR = "coordinator.pt"
BLOCK_SUFFIX = ".distcp"

_PLAIN = (
    *("step", "serial", "identity", "created", "final", "parent", "parent_identity"),
    *("metrics", "job"),
)
"""Fields that are in the text as they are."""

_OPENING = '{"crc32": "'
_MIDDLE = '", "manifest": '
_CLOSING = "}\n"


@dataclass(frozen=True)
class StoredTensor:
    """Type and shape of one tensor of a checkpoint.

    Attributes:
        dtype: its type, such as ``float32``.
        shape: its shape.
        same_as: the name of another tensor that holds the same memory (tied weights), or empty.
        per_shard: True for a number that every shard of a variable has its own of (an optimizer's
            ``step``). Its blocks name the rows of the shard they belong to.
        has_holes: True for a dynamic table: rows in no block are zeros.
    """

    dtype: str
    shape: tuple[int, ...]
    same_as: str = ""
    per_shard: bool = False
    has_holes: bool = False

    @property
    def rows(self) -> int:
        """Number of rows; a tensor without axes counts as one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.torch_dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.rows * self.row_bytes

    def bytes_of(self, block: StoredBlock) -> int:
        """Return the raw bytes of one of its blocks."""
        return self.torch_dtype.itemsize if self.per_shard else block.rows * self.row_bytes

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type as torch knows it."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{self.dtype!r} is not a type of torch {torch.__version__}.")
        return found


@dataclass(frozen=True)
class StoredFile:
    """Size and checksum of one file.

    Attributes:
        bytes: its size.
        crc32: of a block file, checksum of all bytes outside blocks; else of all bytes.
        facts: more about its writer's part (a server's cut and ledger).
    """

    bytes: int
    crc32: int
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint.

    Attributes:
        step: the training step it was taken at.
        serial: its number among the saves into its directory; later ones are larger.
        identity: a random name, unlike that of any other checkpoint.
        created: seconds since 1970.
        tensors: every tensor by name, those of the parents included.
        blocks: the rows this checkpoint has itself.
        files: its files, the manifest excepted.
        parent: of a delta, the directory name of the checkpoint it builds on; else empty.
        parent_identity: of a delta, that checkpoint's `identity`.
        final: True for the last checkpoint of a run.
        metrics: numbers given with the save.
        job: name of the job that saved it (``ParameterServerStrategy(job=…)``), or empty.
    """

    step: int
    serial: int
    identity: str
    created: float
    tensors: Mapping[str, StoredTensor]
    blocks: tuple[StoredBlock, ...]
    files: Mapping[str, StoredFile]
    parent: str = ""
    parent_identity: str = ""
    final: bool = False
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    job: str = ""

    @property
    def is_delta(self) -> bool:
        """True if it holds only the rows that changed since its parent."""
        return bool(self.parent)

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(file.bytes for file in self.files.values())

    @cached_property
    def blocks_of(self) -> Mapping[str, tuple[StoredBlock, ...]]:
        """The blocks by tensor, in order of rows."""
        found: dict[str, list[StoredBlock]] = {}
        for block in self.blocks:
            found.setdefault(block.tensor, []).append(block)
        return {
            name: tuple(sorted(blocks, key=lambda block: block.start))
            for name, blocks in found.items()
        }


def to_text(manifest: Manifest) -> str:
    """Return the text of ``manifest.json``.

    Example:
        >>> manifest = Manifest(5, 1, "ab", 0.0, tensors={}, blocks=(), files={})
        >>> from_text(to_text(manifest), "manifest.json") == manifest
        True
    """
    tensors, files = list(manifest.tensors), list(manifest.files)
    tensor_number = {name: number for number, name in enumerate(tensors)}
    file_number = {name: number for number, name in enumerate(files)}
    body = {
        "format": FORMAT,
        **{name: getattr(manifest, name) for name in _PLAIN},
        "files": {name: vars(file) for name, file in manifest.files.items()},
        "tensors": {name: vars(tensor) for name, tensor in manifest.tensors.items()},
        # Numbers into "tensors" and "files": there may be thousands of blocks.
        "blocks": [
            [
                tensor_number[block.tensor],
                file_number[block.file],
                *(block.offset, block.start, block.rows, block.crc32),
                *([block.ids_offset, block.ids_crc32] if block.is_scattered else []),
            ]
            for block in manifest.blocks
        ],
    }
    text = json.dumps(body, separators=(",", ":"), default=dict)
    return f"{_OPENING}{zlib.crc32(text.encode()):08x}{_MIDDLE}{text}{_CLOSING}"


def from_text(text: str, path: str) -> Manifest:
    """Return the manifest of a text.

    Raises:
        CheckpointCorrupt: the text was damaged, or is of another format.
    """
    start = len(_OPENING) + 8 + len(_MIDDLE)
    body_text = text[start : -len(_CLOSING)]
    expected = f"{_OPENING}{zlib.crc32(body_text.encode()):08x}{_MIDDLE}{body_text}{_CLOSING}"
    if text != expected:
        raise CheckpointCorrupt(
            f"{path} is damaged: its checksum does not match its {len(text)} characters.", path=path
        )
    body = json.loads(body_text)
    if body["format"] > FORMAT:
        raise CheckpointCorrupt(
            f"{path} has format {body['format']}, but this version of Stratagem reads formats up to "
            f"{FORMAT}. Upgrade Stratagem to read it.",
            path=path,
        )
    names, files = list(body["tensors"]), list(body["files"])
    return Manifest(
        **{name: body[name] for name in _PLAIN if name in body},
        files={name: StoredFile(**file) for name, file in body["files"].items()},
        tensors={
            name: StoredTensor(**{**tensor, "shape": tuple(tensor["shape"])})
            for name, tensor in body["tensors"].items()
        },
        blocks=tuple(
            StoredBlock(names[tensor], files[file], *numbers)
            for tensor, file, *numbers in body["blocks"]
        ),
    )
