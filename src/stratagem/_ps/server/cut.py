"""The cut of a store: the rows of its tensors at one moment, while writes continue.

A thread reads the rows in order (`CutTensor.read`). The working thread calls `Cut.before_write` before it changes
rows: rows that were not read yet are copied aside first. Sparse writes copy the rows they touch, dense writes copy
the rest of the tensor. The copies have a limit: beyond it a write waits until the reading thread has gone on.

The working thread only appends copies to a list. The reading thread sorts them, outside of the lock.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from stratagem._owner import Owner
from stratagem._ps.rows import put_rows, sort_ids, take_rows

LEAST_ASIDE_BYTES: Final = 32 << 20
"""Copies that are always allowed; a tenth of the tensors' bytes, if that is more."""

_UNIT_BYTES: Final = 64
"""Rows shorter than this are copied in groups, so that the mark of a group is at most 1/64 of it."""

_BUCKET_BYTES: Final = 16 << 20
_MOST_BUCKETS: Final = 64
"""Copied rows are kept by ranges of rows, so that those of a range can be freed when it has been read."""

_MERGE_AFTER: Final = 8
"""Copies of one range that are kept apart before they are sorted into one."""

IDLE_S: Final = 1.0
"""Training has paused if no write has come for this long."""

_LOOK_S: Final = 1.0
"""How often a write that waits looks whether the cut was closed."""

Key: TypeAlias = tuple[int, int, str]
"""Variable, optimizer (0 for the value) and state (empty for the value)."""


@final
class Cut(Owner):
    """Rows of many tensors at one moment.

    Args:
        tensors: the tensors. Those without axes and those that are not contiguous are copied at once.

    Example:
        >>> value = torch.zeros(4)
        >>> cut = Cut({(1, 0, ""): value})
        >>> cut.before_write(1, torch.tensor([2]))
        >>> value[2] = 5.0
        >>> cut.tensors[1, 0, ""].read(0, 4)
        tensor([0., 0., 0., 0.])
        >>> cut.close()
    """

    def __init__(self, tensors: Mapping[Key, Tensor]) -> None:
        total = sum(one.numel() * one.element_size() for one in tensors.values())
        self._limit = max(LEAST_ASIDE_BYTES, total // 10)
        self._aside = 0
        self._largest = 0
        self._changed = threading.Condition()
        self._is_read = False
        self._closed = False
        self._written_at = -math.inf
        self._waits = False  # a write does
        self.tensors = {key: CutTensor(self, tensor) for key, tensor in tensors.items()}
        self._by_variable: dict[int, list[CutTensor]] = {}
        for (variable, _, _), one in self.tensors.items():
            self._by_variable.setdefault(variable, []).append(one)

    def before_write(self, variable: int, ids: Tensor | None) -> None:
        """Copy rows aside that a write is about to change and that were not read yet.

        Args:
            variable: the variable that is written; its optimizer state counts as written, too.
            ids: the rows, ascending and unique; None for all.
        """
        self._written_at = time.monotonic()
        for one in self._by_variable.get(variable, ()):
            with self._changed:
                while not self._closed and not one.locked_protect(ids, self._room()):
                    self._waits = True
                    self._changed.wait(_LOOK_S)
                self._waits = False

    def begin_reading(self) -> None:
        """Note that a thread reads now: writes may wait for it from now on."""
        with self._changed:
            self._is_read = True

    @property
    def is_trained(self) -> bool:
        """True if writes come: the reading thread should leave them most of the processor."""
        return time.monotonic() - self._written_at < IDLE_S

    @property
    def is_crowded(self) -> bool:
        """True if a write waits, or will soon: the reading thread should hurry."""
        return self._waits or self._aside > self._limit * 3 // 4

    @property
    def most_aside_bytes(self) -> int:
        """Largest number of bytes that were copied aside at one time."""
        return self._largest

    @override
    def close(self) -> None:
        """Free the copies and let waiting writes go on. May be called again."""
        with self._changed:
            self._closed = True
            self._by_variable.clear()
            self.tensors.clear()
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """True if the cut was given up."""
        return self._closed

    def _room(self) -> int | None:
        """Return how many bytes may be copied aside; None: any number, because no thread reads yet."""
        return self._limit - self._aside if self._is_read else None

    def count(self, nbytes: int) -> None:
        """Count copied (or freed) bytes."""
        with self._changed:
            self.locked_count(nbytes)

    def locked_count(self, nbytes: int) -> None:
        """Count copied (or freed) bytes."""
        self._aside += nbytes
        self._largest = max(self._largest, self._aside)

    def reading(self) -> threading.Condition:
        """Return the lock of all tensors."""
        return self._changed


@final
class CutTensor:
    """The rows of one tensor at the moment of the cut. Rows are read once, in ascending order."""

    def __init__(self, cut: Cut, tensor: Tensor) -> None:
        self._cut = cut
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        if tensor.dim() == 0 or not tensor.is_contiguous():
            tensor = tensor.detach().clone().contiguous()
            self._is_copy = True
        else:
            self._is_copy = False
        self._rows = tensor if tensor.dim() else tensor.reshape(1)
        self._count = self._rows.shape[0]
        self._row_bytes = self._rows.nbytes // self._count if self._count else 0
        self._read = 0  # rows before this one were read
        self._rest: Tensor | None = None  # all rows from `_rest_from` on, copied
        self._rest_from = 0
        self._unit = max(1, _UNIT_BYTES // max(1, self._row_bytes))
        self._marks: np.ndarray | None = None  # by group of rows: whether it was copied
        least = _BUCKET_BYTES // max(1, self._row_bytes)
        self._bucket_rows = max(1, least, -(-self._count // _MOST_BUCKETS))
        self._log: list[_Copies] = []  # as the working thread copied them
        # Of the reading thread alone:
        self._unsorted: list[_Copies] = []
        self._buckets: dict[int, list[_Copies]] = {}
        self._buffer: Tensor | None = None

    def read(self, first: int, last: int) -> Tensor:
        """Return rows ``first … last`` as they were; they stay so until the next call."""
        with self._cut.reading():
            source = self._locked_source()
        is_live = not self._is_copy and source is self._rows and first < last
        # Without the lock, so that no write waits for this thread. A write to these rows copies them aside first, since
        # they do not count as read yet: what it changes here meanwhile is put back below.
        copy = self._copied(first, last) if is_live else None
        with self._cut.reading():
            now = self._locked_source()
            if copy is not None and now is source:
                rows = copy
            else:
                rows = now[first - self._rest_from : last - self._rest_from]
            self._locked_advance(last)
        if first < last:
            self._put_back(first, last, rows)
        self._free(first, last)
        return rows

    def read_ids(self, ids: Tensor, *, is_last: bool) -> Tensor:
        """Return these rows as they were; later calls ask for later rows, and `is_last` for the last ones."""
        with self._cut.reading():
            first, source, start = self._read, self._locked_source(), self._rest_from
            last = self._count if is_last or not len(ids) else int(ids[-1]) + 1
        rows = source.index_select(0, ids - start)  # without the lock, see `read`
        with self._cut.reading():
            now, start = self._locked_source(), self._rest_from
            self._locked_advance(last)
        if now is not source:
            rows = now.index_select(0, ids - start)
        if len(ids):
            for some, values in self._copies_of(first, last):
                place = torch.searchsorted(ids, some).clamp_(max=len(ids) - 1)
                found = ids[place] == some
                rows[place[found]] = values[found]
        self._free(first, last)
        return rows

    def locked_protect(self, ids: Tensor | None, room: int | None) -> bool:
        """Copy rows aside; return False if they need more than `room` bytes."""
        if self._is_copy or self._rest is not None or self._read >= self._count:
            return True
        if ids is None:
            return self._locked_protect_rest(room)
        fresh, groups = self._fresh(ids)
        needed = fresh.numel() * (self._row_bytes + fresh.itemsize)
        if room is not None and needed > room:
            return False
        if needed:
            assert self._marks is not None
            self._marks[groups] = True
            self._cut.locked_count(needed)
            self._log.append(_Copies(fresh, take_rows(self._rows, fresh)))
        return True

    def _locked_protect_rest(self, room: int | None) -> bool:
        needed = (self._count - self._read) * self._row_bytes
        if room is not None and needed > room:
            return False
        self._cut.locked_count(needed)
        self._rest, self._rest_from = self._rows[self._read :].clone(), self._read
        return True

    def _fresh(self, ids: Tensor) -> tuple[Tensor, np.ndarray]:
        """Return the rows of `ids` (and of their groups) to copy, and the groups."""
        if self._marks is None:
            # The kernel provides these zeros page by page, as they are used; torch would write all of them now.
            self._marks = np.zeros(-(-self._count // self._unit), dtype=np.bool_)
        unit, groups = self._unit, ids.numpy()
        if unit > 1:
            groups = groups // unit
            groups = groups[np.diff(groups, prepend=-1) != 0]
        groups = groups[groups.searchsorted(self._read // unit) :]
        groups = groups[~self._marks.take(groups)]
        if unit == 1:
            return torch.from_numpy(groups), groups
        rows = (groups[:, None] * unit + np.arange(unit)).ravel()
        return torch.from_numpy(rows[rows < self._count]), groups

    def _locked_source(self) -> Tensor:
        """Return the rows from `_rest_from` on: a copy, or the rows as they are now."""
        return self._rows if self._rest is None else self._rest

    def _copied(self, first: int, last: int) -> Tensor:
        """Return a copy of rows as they are now."""
        if self._buffer is None or len(self._buffer) < last - first:
            self._buffer = torch.empty_like(self._rows[first:last])
        return self._buffer[: last - first].copy_(self._rows[first:last])

    def _locked_advance(self, last: int) -> None:
        """Note that rows before `last` were read, and take the copies that were made of them and of others."""
        self._read = last
        self._unsorted += self._log
        self._log = []

    def _put_back(self, first: int, last: int, rows: Tensor) -> None:
        """Put copied rows back into `rows`, which are those from `first` to `last`."""
        for ids, values in self._copies_of(first, last):
            low, high = ids.numpy().searchsorted((first, last)).tolist()
            if low < high:
                put_rows(rows, ids[low:high] - first, values[low:high])

    def _copies_of(self, first: int, last: int) -> Iterator[_Copies]:
        """Yield all copies of rows from `first` to `last`, and perhaps of others."""
        if len(self._unsorted) > _MERGE_AFTER:
            self._sort(first)
        yield from self._unsorted
        for bucket in range(first // self._bucket_rows, (last - 1) // self._bucket_rows + 1):
            copies = self._buckets.get(bucket, [])
            if len(copies) > _MERGE_AFTER:
                copies[:] = [_merged(copies)]
            yield from copies

    def _sort(self, first: int) -> None:
        """Sort copies into buckets; those of rows before `first` are not needed any more."""
        ids, values = _merged(self._unsorted)
        self._unsorted = []
        start = int(torch.searchsorted(ids, first))
        self._cut.count(-start * (self._row_bytes + ids.itemsize))
        buckets = torch.arange(-(-self._count // self._bucket_rows) + 1)
        places = torch.searchsorted(ids, buckets * self._bucket_rows).tolist()
        for bucket, (low, high) in enumerate(itertools.pairwise(places)):
            begin = max(low, start)
            if begin < high:
                # Clones, so that the memory of a bucket can be freed.
                copies = _Copies(ids[begin:high].clone(), values[begin:high].clone())
                self._buckets.setdefault(bucket, []).append(copies)

    def _free(self, first: int, last: int) -> None:
        """Free the copies of rows that were read."""
        freed: list[_Copies] = []
        for bucket in range(first // self._bucket_rows, last // self._bucket_rows + 1):
            if (bucket + 1) * self._bucket_rows <= last or last == self._count:
                freed += self._buckets.pop(bucket, ())
        if last == self._count:
            freed += self._unsorted
            self._unsorted = []
        nbytes = sum(ids.numel() * (self._row_bytes + ids.itemsize) for ids, _ in freed)
        with self._cut.reading():
            if last == self._count:
                self._marks = self._buffer = (
                    None  # `read` returned a part of the buffer: it stays until the next call
                )
                if self._rest is not None:
                    nbytes += (self._count - self._rest_from) * self._row_bytes
                    self._rest = None
            self._cut.locked_count(-nbytes)
            self._cut.reading().notify_all()


class _Copies(NamedTuple):
    """Copied rows with their ascending numbers."""

    ids: Tensor
    values: Tensor


def _merged(copies: Sequence[_Copies]) -> _Copies:
    """Return copies of different rows as one."""
    found = sort_ids(torch.cat([one.ids for one in copies]))
    return _Copies(found.unique, take_rows(torch.cat([one.values for one in copies]), found.order))
