"""The cut of a store: the rows of its tensors at one moment, while writes continue.

A thread reads the rows in order (`CutTensor.read`). The working thread calls `Cut.before_write` before it changes
rows: rows that were not read yet are copied first. Sparse writes copy the rows they touch (`kept_rows.py`), dense writes
the rest of the tensor. The copies have a limit: beyond it a write waits until the reading thread has gone on.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping
from typing import Final, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._owner import Owner
from stratagem._ps.server.kept_rows import KeptRows

LEAST_ASIDE_BYTES: Final = 32 << 20
"""Copies that are always allowed; a tenth of the tensors' bytes, if that is more."""

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
        self._rows = {key[0]: one.count for key, one in self.tensors.items() if not key[2]}
        found: dict[tuple[int, int], list[CutTensor]] = {}
        for (variable, _, _), one in self.tensors.items():
            if not one.is_copy:
                found.setdefault((variable, one.count), []).append(one)
        # By variable: tensors with the same number of rows.
        self._groups: dict[int, list[tuple[KeptRows, list[CutTensor]]]] = {}
        for (variable, _), some in found.items():
            kept = KeptRows([one.rows for one in some])
            self._groups.setdefault(variable, []).append((kept, some))
            for number, one in enumerate(some):
                one.kept, one.number = kept, number

    def before_write(self, variable: int, ids: Tensor | None) -> None:
        """Copy rows that a write is about to change and that were not read yet.

        Args:
            variable: the variable that is written; its optimizer state counts as written, too.
            ids: the rows, ascending and unique; None for all.
        """
        self._written_at = time.monotonic()
        for kept, tensors in self._groups.get(variable, ()):
            if ids is not None and kept.count == self._rows.get(variable):
                self._keep_rows(kept, kept.ids_to_keep(ids))
            else:
                for one in tensors:
                    self._keep_rest(one)

    def begin_reading(self, wanted: Collection[Key] | None = None) -> None:
        """Note that a thread reads these tensors (by default all): writes may wait for it from now on."""
        with self._changed:
            self._is_read = True
            for key, one in self.tensors.items():
                if wanted is not None and key not in wanted:
                    one.locked_advance(one.count)

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
        """Largest number of bytes of copies at one time."""
        return self._largest

    @override
    def close(self) -> None:
        """Free the copies and let waiting writes go on. May be called again."""
        with self._changed:
            self._closed = True
            self._groups.clear()
            self.tensors.clear()
            self._changed.notify_all()

    def lock(self) -> threading.Condition:
        """Return the lock of all tensors."""
        return self._changed

    def locked_count(self, nbytes: int) -> None:
        """Count copied (or freed) bytes."""
        self._aside += nbytes
        self._largest = max(self._largest, self._aside)
        if nbytes < 0:
            self._changed.notify_all()

    def _keep_rows(self, kept: KeptRows, ids: Tensor) -> None:
        with self._changed:
            while not self._closed and ids.numel():
                before = kept.nbytes
                ids = kept.keep(ids, self._room())
                self.locked_count(kept.nbytes - before)
                if ids.numel():
                    self._locked_wait()
            self._waits = False

    def _keep_rest(self, one: CutTensor) -> None:
        with self._changed:
            while not self._closed and not one.locked_keep_rest(self._room()):
                self._locked_wait()
            self._waits = False

    def _locked_wait(self) -> None:
        self._waits = True
        self._changed.wait(_LOOK_S)

    def _room(self) -> int | None:
        """Return how many bytes of copies may be made; None: any number, because no thread reads yet."""
        return self._limit - self._aside if self._is_read else None


@final
class CutTensor:
    """The rows of one tensor at the moment of the cut. Rows are read once, in ascending order.

    Attributes:
        rows: the tensor, with at least one axis.
        count: number of its rows.
        is_copy: it was copied at once, so that writes do not change it.
        kept: copies of its rows, and of others with the same writes; None if `is_copy`.
        number: of this tensor in `kept`.
    """

    def __init__(self, cut: Cut, tensor: Tensor) -> None:
        self._cut = cut
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.is_copy = tensor.is_sparse or not (
            tensor.dim() and tensor.numel() and tensor.is_contiguous()
        )
        if self.is_copy:
            tensor = (
                (tensor.to_dense() if tensor.is_sparse else tensor.clone()).detach().contiguous()
            )
        self.rows = tensor if tensor.dim() else tensor.reshape(1)
        self.count = self.rows.shape[0]
        self.kept: KeptRows | None = None
        self.number = 0
        self._read = 0  # rows before this one were read
        self._rest: Tensor | None = None  # all rows from `_rest_from` on, copied
        self._rest_from = 0
        self._buffer: Tensor | None = None

    def read(self, first: int, last: int) -> Tensor:
        """Return rows ``first … last`` as they were; they stay so until the next call."""
        with self._cut.lock():
            source = self._locked_source()
        is_live = not self.is_copy and source is self.rows and first < last
        # Without the lock, so that no write waits for this thread. A write to these rows copies them first, since they do
        # not count as read yet: what it changes here meanwhile is put back below.
        copy = self._copied(first, last) if is_live else None
        with self._cut.lock():
            now = self._locked_source()
            if copy is not None and now is source:
                rows = copy
            else:
                rows = now[first - self._rest_from : last - self._rest_from]
            if self.kept is not None and first < last:
                self.kept.put_back(self.number, first, last, rows)
            self.locked_advance(last)
        return rows

    def read_ids(self, ids: Tensor, *, is_last: bool) -> Tensor:
        """Return these rows as they were; later calls ask for later rows, and `is_last` for the last ones."""
        with self._cut.lock():
            source, start = self._locked_source(), self._rest_from
        rows = source.index_select(0, ids - start)  # without the lock, see `read`
        with self._cut.lock():
            now = self._locked_source()
            if now is not source:
                rows = now.index_select(0, ids - self._rest_from)
            if self.kept is not None:
                self.kept.put_back_ids(self.number, ids, rows)
            is_end = is_last or not ids.numel()
            self.locked_advance(self.count if is_end else int(ids[-1]) + 1)
        return rows

    def locked_keep_rest(self, room: int | None) -> bool:
        """Copy all rows that were not read; return False if they need more than `room` bytes."""
        if self._rest is not None or self._read >= self.count:
            return True
        rest = self.rows[self._read :]
        if room is not None and rest.nbytes > room:
            return False
        self._cut.locked_count(rest.nbytes)
        self._rest, self._rest_from = rest.clone(), self._read
        if self.kept is not None:
            self.kept.set_safe(self.number)
        return True

    def locked_advance(self, last: int) -> None:
        """Note that rows before `last` were read, and free copies that are not needed any more."""
        self._read = max(self._read, last)
        freed = 0
        if self._read >= self.count:
            self._buffer = None  # `read` returned a part of it, which stays until the next call
            if self._rest is not None:
                freed, self._rest = self._rest.nbytes, None
        if self.kept is not None:
            before = self.kept.nbytes
            self.kept.advance(self.number, self._read)
            freed += before - self.kept.nbytes
        if freed:
            self._cut.locked_count(-freed)

    def _locked_source(self) -> Tensor:
        """Return the rows from `_rest_from` on: a copy, or the rows as they are now."""
        return self.rows if self._rest is None else self._rest

    def _copied(self, first: int, last: int) -> Tensor:
        """Return a copy of rows as they are now."""
        if self._buffer is None or len(self._buffer) < last - first:
            self._buffer = torch.empty_like(self.rows[first:last])
        return self._buffer[: last - first].copy_(self.rows[first:last])
