"""Rows of a table on a worker, and the plain copies of them that a function asked for.

A lookup by ids reads rows of the servers. Code that wants the table as a tensor without a gradient (``table.data``, ``table.detach()``,
``table[:-1]`` under ``no_grad``, in-place operators) gets one plain copy of the whole table, made at the first such use. All views of the
copy share its memory, so that the function may read and write the table in every way that PyTorch has. From then on the function's lookups
read the copy, too.

A written copy differs from the values with which it was made. It is sent to the servers before the next step of an optimizer and at the
function's end (`worker/written_parameters.py`), or refused.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.torch_patches.private_api import own_memory
from stratagem._ps.tables.row_gradient import RowSource
from stratagem.errors import ForeignParameterError

LARGE_BYTES: Final = 32 << 20
"""Of a larger table, ``table[3]`` and ``table[2:5]`` without a gradient are copies of these rows, which must not be written."""


class _Copy(NamedTuple):
    """A copy that the function has: the ids of its rows (None: all), their present and their first values."""

    ids: Tensor | None
    values: Tensor
    before: Tensor

    def is_written(self) -> bool:
        return not torch.equal(self.values.view(torch.uint8), self.before.view(torch.uint8))


@final
class WorkerRows:
    """The rows of a source, or the function's copy of them.

    Args:
        source: the rows on the servers.
        copied: list to which this object adds itself when the function gets a copy.
        may_write: whether the function may write the table: its worker is the only one, and it has one replica.
    """

    def __init__(self, source: RowSource, copied: list[WorkerRows], *, may_write: bool) -> None:
        self.name, self.shape, self.dtype = source.name, source.shape, source.dtype
        self.source = source
        self._copied = copied
        self._may_write = may_write
        self._lock = threading.Lock()  # replicas run in threads
        self._whole: _Copy | None = None
        self._parts: list[_Copy] = []
        self._read: tuple[Tensor, int] | None = None  # the servers' memory, and its version

    @property
    def keys(self) -> Any:
        """Of a dynamic table, the rows of keys."""
        source: Any = self.source
        return source.keys

    # -------------------------------------------------------------- RowSource

    def rows(self, ids: Tensor) -> Tensor:
        """Return a new tensor with these rows; `ids` are sorted, unique and in range."""
        copy = self._whole
        return self.source.rows(ids) if copy is None else copy.values.index_select(0, ids)

    def rows_as_asked(self, ids: Tensor) -> Tensor | None:
        """Return a new tensor with these rows, in any order and repeated; None if that would be slow."""
        copy = self._whole
        return self.source.rows_as_asked(ids) if copy is None else copy.values.index_select(0, ids)

    def whole(self) -> Tensor:
        """Return all rows, for a graph; the caller must not write to them."""
        if self._whole is not None:
            return self._whole.values.data  # another version counter: a graph may hold the values
        memory = self.source.whole()
        if self._read is None or self._read[0] is not memory:
            self._read = memory, memory._version
            self._note()
        return memory

    def update_rows(self, ids: Tensor, values: Tensor) -> None:
        """Overwrite rows, here and on the servers."""
        self.source.update_rows(ids, values)
        if self._whole is not None:
            self._whole.values.data[ids] = self._whole.before[ids] = values

    # -------------------------------------------------------------- copies of the function

    def copy(self) -> Tensor:
        with (
            self._lock,
            torch.inference_mode(False),
        ):  # functions may write the copy in another mode
            if self._whole is None:
                values = self.source.whole().detach().clone()
                self._whole = _Copy(None, values, values.clone())
                self._note()
            return self._whole.values.detach()

    def replace(self, value: Tensor) -> None:
        """Overwrite all rows: ``table.data = value``."""
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise ForeignParameterError(
                f"table {self.name!r} was given {tuple(value.shape)} {value.dtype} inside a scheduled function: "
                f"expected {self.shape} {self.dtype}, as on the parameter servers."
            )
        self.copy().copy_(value)

    def copies_parts(self) -> bool:
        """Return whether a row or slice is better copied without the rest of the table."""
        return self._whole is None and math.prod(self.shape) * self.dtype.itemsize > LARGE_BYTES

    def keep_part(self, ids: Tensor, rows: Tensor) -> None:
        """Note that the function has a copy of some rows."""
        with torch.inference_mode(False):
            self._parts.append(_Copy(ids.reshape(-1), rows, rows.clone()))
        self._note()

    def _note(self) -> None:
        if self not in self._copied:
            self._copied.append(self)

    def written(self) -> Tensor | None:
        """Return the copy of all rows if the function wrote it, else None.

        Raises:
            ForeignParameterError: the function wrote what it must not write.
        """
        if any(part.is_written() for part in self._parts):
            raise ForeignParameterError(
                f"rows of table {self.name!r} were written through an index without a gradient (table[3], table[2:5]). Of a "
                f"table above {LARGE_BYTES >> 20} MiB, these are copies of the rows. Write table.data[3] instead, which "
                "fetches and sends the whole table."
            )
        if self._read is not None and self._read[0]._version != self._read[1]:
            raise ForeignParameterError(
                f"table {self.name!r} was written through a view that was made with gradients enabled. Make the view "
                "from table.data, or under torch.no_grad()."
            )
        whole = self._whole
        if whole is None or not (
            whole.is_written() or (whole.values._version and not self._may_write)
        ):
            return None
        if not self._may_write:  # nor a value that was put back: replicas share the copy
            raise refusal(self.name)
        return whole.values

    def follow_step(self) -> None:
        """Update the copies that the function still has, after a step of an optimizer."""
        whole = self._whole
        if whole is not None and own_memory([whole.values]):
            self._whole = whole = None
        if whole is not None:
            whole.values.data.copy_(whole.before.copy_(self.source.whole()))
        self._parts = [one for one in self._parts if not own_memory([one.values])]
        for part in self._parts:
            assert part.ids is not None
            part.before.copy_(self.source.rows(part.ids).view_as(part.before))
            part.values.data.copy_(part.before)

    def forget(self) -> None:
        """Forget all copies, and what the function wrote to the servers' memory."""
        if self._read is not None and self._read[0]._version != self._read[1]:
            source: Any = self.source
            source.undo_writes()
        self._whole, self._parts, self._read = None, [], None

    @override
    def __repr__(self) -> str:
        copied = "" if self._whole is None else ", copied"
        return f"<WorkerRows {self.name!r} {self.shape}{copied}>"


def refusal(name: str) -> ForeignParameterError:
    """Return the error for a table that a function wrote and must not write."""
    return ForeignParameterError(
        f"the function wrote into a copy of table {name!r}, whose rows are on parameter servers. Change the table by "
        "optimizer.step() (torch.optim.SGD for an update by hand), by a sg.Variable's assign and scatter methods, on the "
        "coordinator, or use one worker of one replica."
    )
