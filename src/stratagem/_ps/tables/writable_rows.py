"""Table rows that a function writes in place: updates by hand, weight clipping, SAM's perturbation.

The first write makes a local copy of the whole table. From then on the function sees the copy, until its worker sends it to the
servers: before the next step of an optimizer, or at the function's end (`worker/written_parameters.py`).
"""

from __future__ import annotations

from typing import Any, Final, final

from torch import Tensor
from typing_extensions import override

from stratagem._ps.tables.row_gradient import RowSource
from stratagem._ps.tables.table_gradient import TableGradient
from stratagem.errors import ForeignParameterError

_SIGNS: Final = {"add_": 1, "__iadd__": 1, "sub_": -1, "subtract_": -1, "__isub__": -1}


@final
class WritableRows:
    """The rows of a source, or the local copy that a function has written."""

    def __init__(self, source: RowSource) -> None:
        self.name, self.shape, self.dtype = source.name, source.shape, source.dtype
        self._source = source
        self._local: Tensor | None = None

    @property
    def keys(self) -> Any:
        """Of a dynamic table, the rows of keys."""
        source: Any = self._source
        return source.keys

    def rows(self, ids: Tensor) -> Tensor:
        """Return a new tensor with these rows."""
        return self._source.rows(ids) if self._local is None else self._local.index_select(0, ids)

    def rows_as_asked(self, ids: Tensor) -> Tensor | None:
        """Return a new tensor with these rows, in any order and repeated; None if that would be slow."""
        if self._local is None:
            return self._source.rows_as_asked(ids)
        return self._local.index_select(0, ids)

    def whole(self) -> Tensor:
        """Return all rows; the caller must not write to them."""
        return self._source.whole() if self._local is None else self._local

    def update_rows(self, ids: Tensor, values: Tensor) -> None:
        """Overwrite rows."""
        if self._local is None:
            self._source.update_rows(ids, values)
        else:
            self._local.data[ids] = values

    def take(self) -> Tensor | None:
        """Return the local copy and forget it; None if the function wrote nothing."""
        local, self._local = self._local, None
        return local

    @property
    def is_written(self) -> bool:
        """True if there is a local copy."""
        return self._local is not None

    def replace(self, value: Tensor) -> None:
        """Overwrite all rows."""
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise ForeignParameterError(
                f"table {self.name!r} was given {tuple(value.shape)} {value.dtype} inside a scheduled function: "
                f"expected {self.shape} {self.dtype}, as on the parameter servers."
            )
        self._local = value.detach().clone()

    def add_rows(self, func: Any, change: TableGradient, alpha: float = 1) -> bool:
        """Add or subtract rows; return False if `func` does something else or `change` holds all rows."""
        sign = _SIGNS.get(getattr(func, "__name__", ""))
        if sign is None or change.ids is None:
            return False
        self.local().index_add_(0, change.ids, change.rows.detach(), alpha=sign * alpha)
        return True

    def local(self) -> Tensor:
        """Return the local copy of all rows, to be written."""
        if self._local is None:
            self._local = self._source.whole().detach().clone()
        return self._local.data  # counts no version: a graph may hold the copy

    @override
    def __repr__(self) -> str:
        return f"<WritableRows {self.name!r} {self.shape}{', written' if self.is_written else ''}>"
