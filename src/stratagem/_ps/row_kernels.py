"""C kernels for rows of tables and for checksums (`row_kernels.c`), if they were built at installation.

`kernels` is None without them: no compiler at installation. Results are the same, bit for bit. Callers check ids, types and shapes.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

_log = logging.getLogger("stratagem.ps")

_LIBRARY: Final = "_row_kernels"
_ADDRESS, _COUNT = ctypes.c_void_p, ctypes.c_int64
_TYPES: Final[dict[str, Any]] = {"a": _ADDRESS, "c": _COUNT, "n": ctypes.c_float}

_VERSION: Final = 4
"""Of the functions in the library."""

_ROWS_AT_ONCE: Final = 2048
"""Rows of which Adagrad's step keeps sums between its halves: they stay in the caches."""


def is_plain(*tensors: Tensor) -> bool:
    """Return whether tensors are tables or rows of float32 in the order of their memory, as steps and sums need.

    Example:
        >>> is_plain(torch.zeros(2, 3)), is_plain(torch.zeros(3, 2).t()), is_plain(torch.zeros(2))
        (True, False, False)
    """
    for one in tensors:
        if not (
            one.dtype is torch.float32 and one.dim() == 2 and one.is_cpu and one.is_contiguous()
        ):
            return False
    return True


@final
class TableShards:
    """Addresses of the contiguous shards of a table. To find them takes as long as to copy a hundred rows.

    Args:
        tensors: the shards; this object does not keep their memory.
        firsts: number of the first row of each.
    """

    __slots__ = ("addresses", "count", "dtype", "firsts", "row", "row_bytes")

    def __init__(self, tensors: Sequence[Tensor], firsts: Sequence[int]) -> None:
        table, self.count = tensors[0], len(tensors)
        self.row, self.dtype = tuple(table.shape[1:]), table.dtype
        self.row_bytes = math.prod(self.row) * table.element_size()
        self.addresses = (_ADDRESS * self.count)(*[one.data_ptr() for one in tensors])
        self.firsts = (_COUNT * (self.count + 1))(*firsts, firsts[-1] + tensors[-1].shape[0])


class GroupedRows(NamedTuple):
    """Numbers of rows, sorted, in consecutive ranges.

    Attributes:
        keys: number and position of each row, sorted; and memory that is not used any more.
        position_bits: bits of a position in a key.
        edges: first number of each range, and the end of the last one.
        bounds: of each range, its end in `keys`; then how many different numbers it has.
    """

    keys: Tensor
    position_bits: int
    edges: Tensor
    bounds: Tensor


@dataclass
class KeptAddresses:
    """Where `kept_rows.py` has copies of rows of some tables: addresses of its arrays.

    Attributes:
        unit_bits: a unit has so many rows, as a power of two.
        block_bits: a block has so many places, as a power of two.
        count: number of tables.
        tables: of the addresses of the tables.
        row_bytes: of the sizes of their rows.
        safe: of the first rows that need copies.
        places: of the place of each unit.
        blocks: of the addresses of blocks, for each block those of all tables.
        free: of the places that are free.
    """

    unit_bits: int
    block_bits: int
    count: int
    tables: int
    row_bytes: int
    safe: int
    places: int = 0
    blocks: int = 0
    free: int = 0


@final
class RowKernels:
    """The functions of the library. All ids are contiguous int64 tensors in host memory.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it lacks a function, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))

        def function(name: str, parameters: str, result: Any = None) -> Any:
            """Return a function; of its parameters `a` is an address, `c` a count and `n` a number."""
            found = getattr(library, name)
            found.argtypes = [_TYPES[letter] for letter in parameters]
            found.restype = result
            return found

        version = function("sg_version", "", _COUNT)()
        if version != _VERSION:
            raise AttributeError(
                f"{path} has version {version}, but version {_VERSION} is expected"
            )
        self._in_range = function("sg_in_range", "acc", ctypes.c_int)
        self._sort_ids = function("sg_sort_ids", "acaaaa", _COUNT)
        self._take_rows = function("sg_take_rows", "aacacca")
        self._shift_ids = function("sg_shift_ids", "acaaca")
        self._sum_rows = function("sg_sum_rows", "aaaccca")
        self._group_rows = function("sg_group_rows", "acacaaaa", _COUNT)
        self._sum_groups = function("sg_sum_groups", "acacaaccaa")
        self._step_sgd = function("sg_step_sgd", "acaaccn")
        self._add_squares = function("sg_add_squares", "acaacca")
        self._add_quotients = function("sg_add_quotients", "acaaaccnn")
        self._keep_rows = function("sg_keep_rows", "accccaaccacaaaca", _COUNT)
        self._put_kept_rows = function("sg_put_kept_rows", "acccacccca")
        self._crc32 = function("sg_crc32", "acc", _COUNT)

    def in_range(self, ids: Tensor, rows: int) -> bool:
        """Return whether all ids are from 0 to below `rows`."""
        return bool(self._in_range(ids.data_ptr(), ids.numel(), rows))

    def take(self, shards: TableShards, ids: Tensor) -> Tensor:
        """Return copies of rows of a table."""
        count = ids.numel()
        taken = torch.empty((count, *shards.row), dtype=shards.dtype)
        self._take_rows(
            *(shards.addresses, shards.firsts, shards.count, ids.data_ptr(), count),
            *(shards.row_bytes, taken.data_ptr()),
        )
        return taken

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return unique ids, places, order and starts (`SortedIds`); None if the ids are too far apart."""
        size = ids.numel()
        numbers = torch.empty((4, size), dtype=torch.int64)
        address, step = numbers.data_ptr(), 8 * size
        found = self._sort_ids(
            ids.data_ptr(), size, address, address + step, address + 2 * step, address + 3 * step
        )
        if found < 0:
            return None
        unique, places, order, starts = numbers
        return unique[:found], places, order, starts[:found]

    def shift(self, ids: Tensor, firsts: Tensor, shifts: Tensor, out: Tensor) -> None:
        """Add to each id the shift of its shard, of which each begins with one of `firsts`; all are int64."""
        self._shift_ids(
            *(ids.data_ptr(), ids.numel(), firsts.data_ptr(), shifts.data_ptr()),
            *(firsts.numel(), out.data_ptr()),
        )

    def sum(
        self, values: Tensor, order: Tensor, starts: Tensor, begin: int, end: int, out: Tensor
    ) -> None:
        """Write the sums of the rows of the distinct ids from `begin` to `end`; `values` and `out` are plain."""
        last = int(starts[end]) if end < starts.numel() else order.numel()
        self._sum_rows(
            *(values.data_ptr(), order.data_ptr(), starts.data_ptr() + 8 * begin),
            *(end - begin, last, values.shape[1], out.data_ptr()),
        )

    def group(self, numbers: Tensor, edges: Tensor) -> GroupedRows | None:
        """Sort numbers of rows in consecutive ranges between `edges`; None if that is not possible."""
        size, parts = numbers.numel(), edges.numel() - 1
        keys, bounds = (
            torch.empty((2, size), dtype=torch.int64),
            torch.empty((2, parts), dtype=torch.int64),
        )
        at, ends = keys.data_ptr(), bounds.data_ptr()
        bits = self._group_rows(
            *(numbers.data_ptr(), size, edges.data_ptr(), parts),
            *(at, at + 8 * size, ends, ends + 8 * parts),
        )
        return None if bits < 0 else GroupedRows(keys, bits, edges, bounds)

    def sum_groups(
        self, values: Tensor, found: GroupedRows, begin: int, end: int, rows: Tensor, ids: Tensor
    ) -> None:
        """Write the ids and the sums of the rows of some ranges; `values` and `rows` are plain."""
        self._sum_groups(
            *(values.data_ptr(), values.shape[1], found.keys.data_ptr(), found.position_bits),
            *(found.edges.data_ptr(), found.bounds.data_ptr(), begin, end),
            *(rows.data_ptr(), ids.data_ptr()),
        )

    def step_sgd(self, table: Tensor, ids: Tensor, values: Tensor, rate: float) -> None:
        """Subtract `rate` times the gradient from rows with unique ids; all tensors are plain."""
        rows = table.shape[0]  # len() of a tensor takes ten times as long
        self._step_sgd(
            table.data_ptr(), rows, ids.data_ptr(), values.data_ptr(), *values.shape, -rate
        )

    def step_adagrad(
        self, table: Tensor, sums: Tensor, ids: Tensor, values: Tensor, rate: float, epsilon: float
    ) -> None:
        """Do Adagrad's step on rows with unique ids; all tensors are plain."""
        (rows, width), all_rows = values.shape, table.shape[0]
        totals = torch.empty(min(rows, _ROWS_AT_ONCE), width)
        to, number, value = totals.data_ptr(), ids.data_ptr(), values.data_ptr()
        table_at, sums_at = table.data_ptr(), sums.data_ptr()
        for start in range(0, rows, _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, rows - start)
            self._add_squares(sums_at, all_rows, number, value, count, width, to)
            (totals if count == totals.shape[0] else totals[:count]).sqrt_()
            self._add_quotients(table_at, all_rows, number, value, to, count, width, -rate, epsilon)
            number += 8 * count
            value += 4 * count * width

    def keep_rows(
        self, ids: Tensor, rows: int, first: int, copies: KeptAddresses, free: int, allowed: int
    ) -> tuple[int, int]:
        """Copy rows that are about to change (`kept_rows.py`); return how many ids are done, and how many places were taken."""
        count, used = ids.numel(), _COUNT(0)
        done = self._keep_rows(
            *(ids.data_ptr(), count, rows, first, copies.unit_bits, copies.places),
            *(
                copies.free,
                free,
                allowed,
                copies.safe,
                copies.count,
                copies.tables,
                copies.row_bytes,
            ),
            *(copies.blocks, copies.block_bits, ctypes.byref(used)),
        )
        return int(done), used.value

    def put_kept_rows(
        self, first: int, last: int, copies: KeptAddresses, table: int, row_bytes: int, out: Tensor
    ) -> None:
        """Put copies of rows of a table into `out`, which has the rows from `first` to `last`."""
        self._put_kept_rows(
            *(copies.places, first, last, copies.unit_bits, copies.blocks, copies.block_bits),
            *(copies.count, table, row_bytes, out.data_ptr()),
        )

    def crc32(self, address: int, size: int, before: int) -> int:
        """Return the CRC-32 of bytes, continued from that of the bytes before; -1 if the processor cannot, or for few bytes."""
        return int(self._crc32(address, size, before))


def load(folder: Path) -> RowKernels | None:
    """Return the kernels of a library in a folder; None if there is none that can be loaded."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / (_LIBRARY + suffix)
        if path.exists():
            try:
                return RowKernels(path)
            except (OSError, AttributeError) as error:  # of another machine or version
                _log.warning(
                    "the kernels for tables are not used: %s. Tables work without them, more slowly. Install "
                    "Stratagem again on this machine (pip install .) to build them.",
                    error,
                )
                return None
    return None


kernels: RowKernels | None = load(Path(__file__).parent)
