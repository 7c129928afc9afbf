"""Copies of rows that were about to change, for a thread that reads the rows as they were (`cut.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from stratagem._ps.row_kernels import KeptAddresses, kernels
from stratagem._ps.rows import put_rows, take_rows, touch_rows
from stratagem._wire.shm import is_on_disk, zeros_apart

UNIT_BYTES: Final = 128
"""Rows shorter than this are copied in groups, so that the number of a copy (4 bytes) is at most 1/32 of it."""

BLOCK_BYTES: Final = 2 << 20
"""Copies are in blocks of about this size: as many as are needed, and no copy ever moves."""

_NUMBER: Final = np.dtype(np.int32)

_Numbers: TypeAlias = "np.ndarray[Any, Any]"


@final
class KeptRows:
    """Copies of rows of several tensors with the same number of rows, such as a table and its optimizer state.

    A step changes the same rows of all of them. Rows are copied in *units* of consecutive rows, each unit once. A copy has
    a number, its *place*: copies of rows that were read in all tensors are given up, and their places are used again.

    Args:
        tensors: the tensors, contiguous.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self.count = tensors[0].shape[0]
        self._row_bytes = [one.nbytes // max(1, self.count) for one in tensors]
        wanted = -(-UNIT_BYTES // max(1, sum(self._row_bytes)))
        self._unit_bits = max(0, wanted - 1).bit_length()
        self.unit_bytes = sum(self._row_bytes) << self._unit_bits
        self._block_bits = max(1, BLOCK_BYTES // max(1, self.unit_bytes)).bit_length() - 1
        self._read = [0] * len(tensors)  # rows before this one were read
        # Rows before this one need no copies: they were read, or the rest of the tensor was copied.
        self._safe = np.zeros(len(tensors), np.int64)
        self._places: _Numbers | None = None  # by unit: the place of its copy, or 0
        self._blocks: list[list[Tensor]] = []  # copies of a block, for each tensor
        self._free = np.empty(0, _NUMBER)
        self._free_count = 0
        self._is_on_disk = any(map(is_on_disk, tensors))
        # The kernels get addresses of arrays, which these keep.
        self._tables = _addresses(tensors)
        self._sizes = np.array(self._row_bytes, np.int64)
        self._block_tables = np.empty(0, np.uint64)
        self._at = KeptAddresses(
            self._unit_bits,
            self._block_bits,
            len(tensors),
            self._tables.ctypes.data,
            self._sizes.ctypes.data,
            self._safe.ctypes.data,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that copies take, with the numbers of their places."""
        used = len(self._blocks) << self._block_bits
        in_use = max(0, used - 1 - self._free_count) * self.unit_bytes
        return in_use + (0 if self._places is None else self._places.nbytes)

    def set_safe(self, tensor: int) -> None:
        """Note that all rows of a tensor that were not read have been copied elsewhere."""
        self._safe[tensor] = self.count

    def ids_to_keep(self, ids: Tensor) -> Tensor:
        """Return ids as `keep` needs them, and read their rows from disk; without the lock."""
        if self._is_on_disk:
            for one in self._tensors:
                touch_rows(one, ids)
        return ids.to(torch.int64).contiguous()

    def keep(self, ids: Tensor, room: int | None) -> Tensor:
        """Copy rows that have no copy yet; return the ids for which there was no room.

        Args:
            ids: rows that are about to change, ascending.
            room: bytes for copies; None: any number.
        """
        first = int(self._safe.min())
        if first >= self.count or not ids.numel():
            return ids[:0]
        if self._places is None:
            units = -(-self.count >> self._unit_bits)
            self._places = zeros_apart((units,), torch.int32, large_pages=False).numpy()
            self._at.places = self._places.ctypes.data
            room = None if room is None else room - self._places.nbytes
        while True:
            most = self._free_count if room is None else max(0, room) // self.unit_bytes
            allowed = min(self._free_count, most)
            done, used = self._copy(ids, first, allowed)
            self._free_count -= used
            ids = ids[done:]
            if not ids.numel() or (room is not None and most <= allowed):
                return ids
            room = None if room is None else room - used * self.unit_bytes
            self._add_block()

    def put_back(self, tensor: int, first: int, last: int, rows: Tensor) -> None:
        """Put the copies of rows ``first … last`` of a tensor into `rows`, which are those."""
        if self._places is None:
            return
        if kernels is not None:
            kernels.put_kept_rows(first, last, self._at, tensor, self._row_bytes[tensor], rows)
            return
        self.put_back_ids(tensor, torch.arange(first, last), rows)

    def put_back_ids(self, tensor: int, ids: Tensor, rows: Tensor) -> None:
        """Put the copies of some rows of a tensor into `rows`, which are those; `ids` ascend."""
        if self._places is None:
            return
        numbers = ids.numpy()
        found = self._places[numbers >> self._unit_bits]
        for block in np.unique(found[found > 0] >> self._block_bits).tolist():
            at = np.flatnonzero((found > 0) & (found >> self._block_bits == block))
            place = found[at].astype(np.int64) - (block << self._block_bits)
            kept = (place << self._unit_bits) + numbers[at] % (1 << self._unit_bits)
            put_rows(rows, _tensor(at), take_rows(self._blocks[block][tensor], _tensor(kept)))

    def advance(self, tensor: int, last: int) -> None:
        """Note that the rows before `last` of a tensor were read; give up copies that are not needed any more."""
        before = min(self._read)
        self._read[tensor] = last
        self._safe[tensor] = max(last, int(self._safe[tensor]))
        after = min(self._read)
        if self._places is None or after == before:
            return
        end = -(-after >> self._unit_bits) if after == self.count else after >> self._unit_bits
        found = self._places[before >> self._unit_bits : end]
        found = found[found > 0]
        self._free[self._free_count : self._free_count + len(found)] = found
        self._free_count += len(found)

    def _copy(self, ids: Tensor, first: int, allowed: int) -> tuple[int, int]:
        """Copy units that have no copy, at most `allowed`; return how many ids are done, and how many copies were made."""
        assert self._places is not None
        if kernels is not None:
            return kernels.keep_rows(ids, self.count, first, self._at, self._free_count, allowed)
        numbers = ids.numpy()
        units = np.unique(numbers >> self._unit_bits)
        units = units[(units + 1 << self._unit_bits) > first]
        units = units[self._places[units] == 0]
        done = len(numbers)
        if len(units) > allowed:
            done = int(np.searchsorted(numbers, units[allowed] << self._unit_bits))
            units = units[:allowed]
        begin = self._free_count - len(units)
        places = self._free[begin : self._free_count][::-1]
        self._places[units] = places
        for wanted, block, kept in self._pieces(units, places):
            for number, (source, into) in enumerate(
                zip(self._tensors, self._blocks[block], strict=True)
            ):
                needed = (wanted < self.count) & (wanted >= self._safe[number])
                put_rows(into, _tensor(kept[needed]), take_rows(source, _tensor(wanted[needed])))
        return done, len(units)

    def _pieces(
        self, units: _Numbers, places: _Numbers
    ) -> Iterator[tuple[_Numbers, int, _Numbers]]:
        """Yield by block: rows of the units, the block, and the rows of their copies in it."""
        inside = np.arange(1 << self._unit_bits)
        for block in np.unique(places >> self._block_bits).tolist():
            here = places >> self._block_bits == block
            kept = places[here].astype(np.int64) - (block << self._block_bits)
            wanted = units[here].astype(np.int64)
            yield (
                ((wanted << self._unit_bits)[:, None] + inside).ravel(),
                block,
                ((kept << self._unit_bits)[:, None] + inside).ravel(),
            )

    def _add_block(self) -> None:
        count = 1 << self._block_bits
        rows = count << self._unit_bits
        block = [torch.empty((rows, *one.shape[1:]), dtype=one.dtype) for one in self._tensors]
        start = len(self._blocks) << self._block_bits
        # Place 0 stands for no copy.
        places = np.arange(start + count - 1, max(0, start - 1), -1, dtype=_NUMBER)
        self._blocks.append(block)
        free = np.empty(start + count, _NUMBER)
        free[: self._free_count] = self._free[: self._free_count]
        free[self._free_count : self._free_count + len(places)] = places
        self._free, self._block_tables = free, np.append(self._block_tables, _addresses(block))
        self._free_count += len(places)
        self._at.free, self._at.blocks = free.ctypes.data, self._block_tables.ctypes.data


def _addresses(tensors: Sequence[Tensor]) -> _Numbers:
    return np.array([one.data_ptr() for one in tensors], np.uint64)


def _tensor(numbers: _Numbers) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, np.int64))
