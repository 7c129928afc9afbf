"""The uncompressed zip archive around the bytes of a tensor, which ``torch.load`` reads.

Pure. torch's distributed checkpoints keep each block as what ``torch.save(tensor)`` writes. Sizes are
known before the contents, so the frame is laid out here and the rows are written between its two parts::

    | prefix: data.pkl, byteorder, version, header of data/0 | rows, 64-byte aligned | suffix: index |

Both parts contain the checksum of the rows (zip and our manifest use the same one, CRC-32), so the
frame is finished when the rows have been written.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import Any

import torch

ALIGNMENT = 64
"""Raw bytes begin at a multiple of this, as in torch's own files: a cache line."""

_Records = tuple[tuple[bytes, bytes], ...]
_NAME = b"archive/data/0"
_LARGE = 0xFFFFFFFF
_DATE = 0x21  # 1 January 1980, zip's first day: equal tensors give equal bytes


@dataclass(frozen=True, slots=True)
class Archive:
    """The frame of one tensor.

    Attributes:
        data_bytes: bytes of the rows.
        prefix: the bytes before them, and the position of their checksum in it.
        suffix: the bytes after them, and the position of their checksum in it.
    """

    data_bytes: int
    prefix: tuple[bytes, int]
    suffix: tuple[bytes, int]

    @property
    def data_offset(self) -> int:
        """Position of the rows."""
        return len(self.prefix[0])

    @property
    def size(self) -> int:
        return len(self.prefix[0]) + self.data_bytes + len(self.suffix[0])

    def frame(self, crc32: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after rows with this checksum."""
        checksum = struct.pack("<I", crc32)
        (before, here), (after, there) = self.prefix, self.suffix
        return (
            before[:here] + checksum + before[here + 4 :],
            after[:there] + checksum + after[there + 4 :],
        )


@functools.lru_cache(maxsize=4096)
def archive_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Archive:
    """Return the frame of a contiguous tensor in host memory.

    Example:
        >>> import io, zlib
        >>> rows = torch.tensor([1.0, 2.0]).numpy().tobytes()
        >>> before, after = archive_of(torch.float32, (2,)).frame(zlib.crc32(rows))
        >>> torch.load(io.BytesIO(before + rows + after), weights_only=True)
        tensor([1., 2.])
    """
    small = (
        (b"archive/data.pkl", _pickled(dtype, shape)),
        (b"archive/byteorder", sys.byteorder.encode()),
        (b"archive/version", b"3\n"),
    )
    size = dtype.itemsize
    for each in shape:
        size *= each
    before = _prefix(small, size)
    return Archive(size, before, _suffix(small, size, begins=len(before[0]) + size))


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return ``data.pkl``: how torch says which tensor the storage ``data/0`` is."""
    # Ask torch how it takes a tensor of this type apart, then put our size in.
    rebuild, (storage, _, _, _, *rest) = torch.empty(1, dtype=dtype).__reduce_ex__(2)
    strides, elements = [], 1
    for each in reversed(shape):
        strides.append(elements)
        elements *= max(1, each)
    count = elements if 0 not in shape else 0
    mark = _Storage(
        _storage_type(storage),
        count if isinstance(storage, torch.TypedStorage) else count * dtype.itemsize,
    )
    tensor = _Tensor(rebuild, (mark, 0, shape, tuple(reversed(strides)), *rest))
    text = io.BytesIO()
    _ArchivePickler(text, protocol=2).dump(tensor)
    return text.getvalue()


def _storage_type(storage: Any) -> Any:
    if isinstance(storage, torch.TypedStorage):
        return getattr(torch, storage._pickle_storage_type())
    return torch.UntypedStorage


class _Storage:
    """Stands for ``data/0``."""

    def __init__(self, kind: Any, count: int) -> None:
        self.identity = ("storage", kind, "0", "cpu", count)


class _Tensor:
    """Stands for the tensor: pickled as torch pickles one."""

    def __init__(self, rebuild: Any, arguments: tuple[Any, ...]) -> None:
        self._parts = (rebuild, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._parts


class _ArchivePickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.identity if isinstance(obj, _Storage) else None


# ------------------------------------------------------------------ zip


def _prefix(small: _Records, size: int) -> tuple[bytes, int]:
    parts = b"".join(_local_header(name, data) + data for name, data in small)
    true_size = _zip64(size)
    header = _header(_NAME, size, 0, true_size)
    # An extra field, as torch's writer pads: id "FB", length, filling.
    padding = -(len(parts) + len(header) + 4) % ALIGNMENT
    extra = true_size + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return parts + _header(_NAME, size, 0, extra), len(parts) + 14


def _suffix(small: _Records, size: int, begins: int) -> tuple[bytes, int]:
    listing, place = b"", 0
    for name, data in small:
        listing += _listed(name, len(data), zlib.crc32(data), place)
        place += len(_local_header(name, data)) + len(data)
    checksum_place = len(listing) + 16
    listing += _listed(_NAME, size, 0, place)
    count, ending = len(small) + 1, b""
    if begins >= _LARGE:
        fields = (44, 45, 45, 0, 0, count, count, len(listing), begins)
        ending = struct.pack("<4sQ2H2I4Q", b"PK\6\6", *fields)
        ending += struct.pack("<4sIQI", b"PK\6\7", 0, begins + len(listing), 1)
    last = (0, 0, count, count, len(listing), min(begins, _LARGE), 0)
    return listing + ending + struct.pack("<4s4H2IH", b"PK\5\6", *last), checksum_place


def _zip64(size: int) -> bytes:
    """Return the extra field with the true size of a record of 4 GiB and more."""
    return struct.pack("<2H2Q", 1, 16, size, size) if size >= _LARGE else b""


def _local_header(name: bytes, data: bytes) -> bytes:
    return _header(name, len(data), zlib.crc32(data), b"")


def _header(name: bytes, size: int, crc32: int, extra: bytes) -> bytes:
    version, shown = _version_and_size(size)
    fields = (version, 0, 0, 0, _DATE, crc32, shown, shown, len(name), len(extra))
    return struct.pack("<4s5H3I2H", b"PK\3\4", *fields) + name + extra


def _listed(name: bytes, size: int, crc32: int, place: int) -> bytes:
    version, shown = _version_and_size(size)
    extra = _zip64(size)
    fields = (version, version, 0, 0, 0, _DATE, crc32, shown, shown, len(name), len(extra))
    head = struct.pack("<4s6H3I2H", b"PK\1\2", *fields)
    return head + struct.pack("<3H2I", 0, 0, 0, 0, place) + name + extra


def _version_and_size(size: int) -> tuple[int, int]:
    return (45, _LARGE) if size >= _LARGE else (20, size)
