"""Fast operations on rows of tables: sort ids, gather, scatter, and sum repeated rows.

Workers use them for lookups, servers for steps on rows. Each has two implementations with the same results: the kernels of
`row_kernels.py`, and NumPy and torch. Figures are for the second one, with 13 k rows of 16 numbers out of 500 k, one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratagem._ps.row_kernels import TableShards, is_plain, kernels
from stratagem._wire.shm import is_on_disk

_THREADS: Final = 16
"""Reads at the same time. 26,624 rows of which 90 % are on disk took 2.3 s with one thread and 0.9 s with 16."""

_FEW: Final = 64
"""Rows that are not worth the start of threads."""


def touch_rows(table: Tensor, ids: Tensor, offset: int = 0) -> None:
    """Bring rows of a table into memory, if it is on disk.

    Args:
        table: the table, or a shard of it.
        ids: rows; those that are not in the shard are left out.
        offset: number of the first row of the shard.
    """
    if ids.numel() < _FEW or not is_on_disk(table):
        return
    ids = ids - offset
    ids = ids[(ids >= 0) & (ids < len(table))]
    # One number of each row: its page is in memory then, and the row with it, or most of it.
    first = table.detach().reshape(len(table), -1)[:, 0]
    with ThreadPoolExecutor(_THREADS, "stratagem-disk") as threads:
        list(threads.map(lambda part: first.index_select(0, part), ids.chunk(_THREADS)))


_MANY = 4096
"""Numbers from which the kernels with a higher fixed cost are faster."""


class SortedIds(NamedTuple):
    """Sorted ids, and where each of them was asked.

    Attributes:
        unique: the ids, sorted, each once.
        places: position in `unique` of every id asked, in the shape asked.
        order: positions of the ids asked, sorted by id; equal ids stay in order.
        starts: position in `order` at which each of `unique` begins.
    """

    unique: Tensor
    places: Tensor
    order: Tensor
    starts: Tensor


_counted = np.arange(1 << 10)


def _count_to(size: int) -> np.ndarray[Any, Any]:
    """Return 0, 1, 2 … `size` - 1; the caller must not write to it."""
    global _counted
    counted = _counted
    if counted.size < size:
        counted = _counted = np.arange(max(size, 2 * counted.size))
    return counted[:size]


def in_range(ids: Tensor, rows: int) -> bool:
    """Return whether all ids, contiguous and of int64, are from 0 to below `rows`."""
    if kernels is not None:
        return kernels.in_range(ids, rows)
    numbers = ids.numpy()
    return not ids.numel() or bool(numbers.min() >= 0 and numbers.max() < rows)


def sort_ids(ids: Tensor) -> SortedIds:
    """Sort ids by one plain sort of numbers that hold id and position both.

    26 k ids: 0.6 ms, with kernels 0.15; NumPy's and torch's `unique` take 1.3 and 1.8.

    Example:
        >>> found = sort_ids(torch.tensor([[7, 0], [7, 3]]))
        >>> found.unique, found.places
        (tensor([0, 3, 7]), tensor([[2, 0], [2, 1]]))
        >>> found.order, found.starts
        (tensor([1, 3, 0, 2]), tensor([0, 1, 2]))
    """
    asked = ids.detach().reshape(-1)
    if asked.dtype is not torch.int64:
        asked = asked.long()
    if kernels is not None:
        sorted_here = kernels.sort(asked.contiguous())
        if sorted_here is not None:
            unique_ids, where, positions, begins = sorted_here
            return SortedIds(unique_ids, where.view(ids.shape), positions, begins)
    flat = asked.numpy()
    count = flat.size
    bits = max(1, count - 1).bit_length()
    limit = 1 << (63 - bits)
    if count and -limit <= flat.min() and flat.max() < limit:
        keys = flat << bits
        keys |= _count_to(count)
        keys.sort()
        order = keys & ((1 << bits) - 1)
        keys >>= bits
    else:
        order = np.argsort(flat, kind="stable")
        keys = flat[order]
    is_new = np.empty(count, np.bool_)
    is_new[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
    starts = np.flatnonzero(is_new)
    places = np.empty(count, np.int64)
    if starts.size == count:
        places[order] = _count_to(count)
        unique = keys
    else:
        ranks = np.cumsum(is_new, dtype=np.int64)
        ranks -= 1
        places[order] = ranks
        unique = keys[starts]
    return SortedIds(
        torch.from_numpy(unique),
        torch.from_numpy(places).reshape(ids.shape),
        torch.from_numpy(order),
        torch.from_numpy(starts),
    )


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return a copy of rows, as ``index_select(0, ids)``. The ids must have been checked.

    For float32 a sum of bags of one row each: that kernel prefetches rows (0.13 ms, `index_select` 0.36,
    NumPy 0.24).
    """
    plain = table.detach()
    touch_rows(plain, ids)
    if kernels is not None and table.is_contiguous() and ids.is_contiguous() and table.dim() > 1:
        return kernels.take(TableShards((plain,), (0,)), ids)
    if _sums_fast(plain, ids):
        bags = torch.from_numpy(_count_to(ids.numel()))
        return torch.embedding_bag(plain, ids, bags, False, 0, False, None, False)[0]
    taken = torch.empty((ids.numel(), *table.shape[1:]), dtype=table.dtype)
    rows, into = as_pieces(plain), as_pieces(taken)
    if rows is None or into is None:
        return plain.index_select(0, ids)
    rows.take(ids.numpy(), out=into, mode="clip")  # the ids were checked; "raise" would buffer
    return taken


def take_from_shards(
    shards: Sequence[np.ndarray[Any, Any]], offsets: Sequence[int], ids: Tensor, into: Tensor
) -> Tensor:
    """Copy rows of a table in several shards into a tensor, in the order asked. The ids must have been checked.

    Example:
        >>> shards = [as_pieces(torch.tensor([[0.0], [1.0]])), as_pieces(torch.tensor([[2.0]]))]
        >>> take_from_shards(shards, (0, 2), torch.tensor([2, 0, 2]), torch.empty(3, 1))
        tensor([[2.],
                [0.],
                [2.]])
    """
    wanted, pieces = ids.numpy(), as_pieces(into)
    assert pieces is not None
    for rows, first in zip(shards, offsets, strict=True):
        if not first:
            rows.take(wanted, out=pieces, mode="clip")  # those of later shards are overwritten
        else:
            places = (wanted >= first).nonzero()[0]
            pieces[places] = rows.take(wanted[places] - first, mode="clip")
    return into


def put_rows(table: Tensor, ids: Tensor, values: Tensor) -> None:
    """Overwrite rows of a table, as ``index_copy_(0, ids, values)``. The ids must have been checked.

    0.15 ms; `index_copy_` takes 0.6, assignment to ``rows[ids]`` 0.24.
    """
    rows, pieces = as_pieces(table.detach()), as_pieces(values.detach())
    if rows is None or pieces is None:
        table.detach().index_copy_(0, ids, values.detach())
    else:
        np.put(rows, ids.numpy(), pieces, mode="clip")


def sum_rows(values: Tensor, found: SortedIds) -> Tensor:
    """Return one row for each of ``found.unique``: the sum of the values of that id.

    As ``zeros.index_add_(0, found.places, values)``, in the same order of additions (26 k rows: 0.11 ms
    instead of 0.47).
    """
    plain = values.detach()
    if not plain.is_contiguous():  # the gradient of a part of ``torch.cat``
        plain = plain.contiguous()
    size = found.unique.numel()
    if kernels is not None and is_plain(plain):
        total = torch.empty(size, plain.shape[1])
        kernels.sum(plain, found.order, found.starts, 0, size, total)
        return total
    if _sums_fast(plain, found.order):
        return torch.embedding_bag(plain, found.order, found.starts, False, 0, False, None, False)[
            0
        ]
    total = plain.new_zeros(size, *plain.shape[1:])
    return total.index_add_(0, found.places.reshape(-1), plain)


def _sums_fast(rows: Tensor, ids: Tensor) -> bool:
    return (
        rows.dtype == torch.float32
        and rows.dim() == 2
        and rows.device.type == "cpu"
        and ids.numel() * rows.shape[1] >= _MANY
        and rows.is_contiguous()
        and ids.is_contiguous()
    )


def as_pieces(table: Tensor) -> np.ndarray[Any, Any] | None:
    """Return the same memory as an array with one item per row; None if rows are not contiguous.

    NumPy copies a row as one item, torch number by number.
    """
    if table.dim() < 2 or not table.numel() or table.device.type != "cpu":
        return None
    if not table.is_contiguous():
        return None
    width = table.stride(0) * table.element_size()
    flat = (
        table if table.dtype == torch.float32 else table.view(table.shape[0], -1).view(torch.uint8)
    )
    return flat.numpy().reshape(table.shape[0], -1).view(np.dtype((np.void, width))).reshape(-1)
