"""The cut of a store: the rows of its tensors as they were at one moment, while writes go on.

A thread reads the rows in order (`CutTensor.read`). The working thread calls `Cut.before_write` before it changes
rows: rows that were not read yet are copied aside first. Sparse writes copy the rows they touch, dense writes copy
the rest of the tensor. The copies have a limit: beyond it a write waits until the reading thread has gone on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._owner import Owner

LEAST_ASIDE_BYTES: Final = 32 << 20
"""Copies that are always allowed; a tenth of the tensors' bytes, if that is more."""

_UNIT_BYTES: Final = 64
"""Rows shorter than this are copied in groups, so that the mark of a group is at most 1/64 of it."""

_BUCKET_BYTES: Final = 16 << 20
_MOST_BUCKETS: Final = 64
"""Copied rows are kept by ranges of rows, so that those of a range can be freed when it has been read."""

_MERGE_AFTER: Final = 8
"""Copies of one range that are kept apart before they are sorted into one."""

_SHARE: Final = 8
"""A save uses about one eighth of a core while other work needs all of them: two servers on two cores slow training by an
eighth. Without other work it is not slowed down."""

_LONGEST_REST_S: Final = 0.05

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
        total = sum(tensor.nbytes for tensor in tensors.values())
        self._limit = max(LEAST_ASIDE_BYTES, total // 10)
        self._aside = 0
        self._largest = 0
        self._changed = threading.Condition()
        self._is_read = False
        self._is_pressed = False  # see `_hurry`
        self._closed = False
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
        for one in self._by_variable.get(variable, ()):
            with self._changed:
                while not self._closed and not one.locked_protect(ids, self._room()):
                    self._hurry()
                    self._changed.wait(_LOOK_S)

    def begin_reading(self) -> None:
        """Note that a thread reads now: writes may wait for it from now on."""
        with self._changed:
            self._is_read = True

    def rest(self, worked_s: float) -> None:
        """Let other work of this machine go on, if it needs all cores and no write waits; called by the reading thread.

        Args:
            worked_s: processor time that the thread has used since the last call.
        """
        if self._is_pressed or _runnable_threads() <= len(os.sched_getaffinity(0)):
            return
        limit_s = min(worked_s * (_SHARE - 1), _LONGEST_REST_S)
        with self._changed:
            self._changed.wait_for(lambda: self._is_pressed or self._closed, limit_s)

    def _hurry(self) -> None:
        """Let the reading thread go on without rests: copies use up their memory, or a write waits."""
        if not self._is_pressed:
            self._is_pressed = True
            self._changed.notify_all()

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

    def locked_count(self, nbytes: int) -> None:
        """Count copied (or freed) bytes."""
        self._aside += nbytes
        self._largest = max(self._largest, self._aside)
        if self._aside > self._limit // 2:
            self._hurry()

    def reading(self) -> threading.Condition:
        """Return the lock of all tensors."""
        return self._changed


def _runnable_threads() -> int:
    """Return how many threads of this machine run or wait for a core; the calling one counts."""
    try:
        with Path("/proc/loadavg").open("rb") as file:
            return int(file.read().split()[3].partition(b"/")[0])
    except OSError:
        return 0


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
        self._marks: Tensor | None = None  # by group of rows: whether it was copied
        least = _BUCKET_BYTES // max(1, self._row_bytes)
        self._bucket_rows = max(1, least, -(-self._count // _MOST_BUCKETS))
        self._buckets: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._buffer: Tensor | None = None

    def read(self, first: int, last: int) -> Tensor:
        """Return rows ``first … last`` as they were; they stay so until the next call."""
        with self._cut.reading():
            rows = self._locked_rows(first, last)
            self._read = last
            self._locked_free(first, last)
            self._cut.reading().notify_all()
        return rows

    def read_ids(self, ids: Tensor, *, is_last: bool) -> Tensor:
        """Return these rows as they were; later calls ask for later rows, and `is_last` for the last ones."""
        with self._cut.reading():
            first = self._read
            self._read = self._count if is_last or not len(ids) else int(ids[-1]) + 1
            rows = self._locked_ids(ids)
            self._locked_free(first, self._read)
            self._cut.reading().notify_all()
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
            for bucket, some in self._by_bucket(fresh):
                copied = self._rows.index_select(0, some)
                self._buckets.setdefault(bucket, []).append((some, copied))
        return True

    def _locked_protect_rest(self, room: int | None) -> bool:
        needed = (self._count - self._read) * self._row_bytes
        if room is not None and needed > room:
            return False
        self._cut.locked_count(needed)
        rest = self._rows[self._read :].clone()
        for bucket in list(self._buckets):
            self._locked_put_back(bucket, self._read, self._count, rest)
            self._locked_drop(bucket)
        self._rest, self._rest_from = rest, self._read
        return True

    def _fresh(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of `ids` (and of their groups) to copy, and the groups."""
        if self._marks is None:
            self._marks = torch.zeros(-(-self._count // self._unit), dtype=torch.bool)
        unit = self._unit
        groups = ids if unit == 1 else torch.unique_consecutive(ids // unit)
        groups = groups[~self._marks[groups] & (groups * unit + (unit - 1) >= self._read)]
        if unit == 1:
            return groups, groups
        rows = (groups[:, None] * unit + torch.arange(unit)).flatten()
        return rows[rows < self._count], groups

    def _by_bucket(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        first = int(ids[0]) // self._bucket_rows
        last = int(ids[-1]) // self._bucket_rows
        if first == last:
            yield first, ids
            return
        bounds = torch.arange(first + 1, last + 1) * self._bucket_rows
        sizes = torch.searchsorted(ids, bounds).tolist()
        for number, (low, high) in enumerate(zip([0, *sizes], [*sizes, len(ids)], strict=True)):
            if low < high:
                yield first + number, ids[low:high].clone()

    def _locked_rows(self, first: int, last: int) -> Tensor:
        if self._is_copy or first == last:
            return self._rows[first:last]
        if self._rest is not None:
            return self._rest[first - self._rest_from : last - self._rest_from]
        if self._buffer is None or len(self._buffer) < last - first:
            self._buffer = torch.empty_like(self._rows[first:last])
        rows = self._buffer[: last - first].copy_(self._rows[first:last])
        for bucket in range(first // self._bucket_rows, (last - 1) // self._bucket_rows + 1):
            self._locked_put_back(bucket, first, last, rows)
        return rows

    def _locked_ids(self, ids: Tensor) -> Tensor:
        if self._rest is not None:
            return self._rest.index_select(0, ids - self._rest_from)
        rows = self._rows.index_select(0, ids)
        if self._is_copy or not len(ids):
            return rows
        low, high = (one // self._bucket_rows for one in ids[[0, -1]].tolist())
        for bucket in range(low, high + 1):
            for some, values in self._buckets.get(bucket, ()):
                place = torch.searchsorted(ids, some).clamp_(max=len(ids) - 1)
                found = ids[place] == some
                rows[place[found]] = values[found]
        return rows

    def _locked_put_back(self, bucket: int, first: int, last: int, rows: Tensor) -> None:
        """Put copied rows of a bucket back into `rows`, which are those from `first` to `last`."""
        copies = self._buckets.get(bucket, [])
        if len(copies) > _MERGE_AFTER:
            ids, order = torch.sort(torch.cat([some for some, _ in copies]))
            copies[:] = [(ids, torch.cat([values for _, values in copies])[order])]
        for ids, values in copies:
            low, high = torch.searchsorted(ids, torch.tensor((first, last))).tolist()
            if low < high:
                rows.index_copy_(0, ids[low:high] - first, values[low:high])

    def _locked_free(self, first: int, last: int) -> None:
        if self._rest is not None and last == self._count:
            self._cut.locked_count(-(self._count - self._rest_from) * self._row_bytes)
            self._rest = None  # a part that `read` returned keeps it until the next call
        for bucket in range(first // self._bucket_rows, last // self._bucket_rows + 1):
            if (bucket + 1) * self._bucket_rows <= last or last == self._count:
                self._locked_drop(bucket)
        if last == self._count:
            self._marks = self._buffer = None

    def _locked_drop(self, bucket: int) -> None:
        for ids, _ in self._buckets.pop(bucket, ()):
            self._cut.locked_count(-ids.numel() * (self._row_bytes + ids.itemsize))
