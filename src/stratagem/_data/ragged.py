"""`Ragged`: a column whose rows are lists of different lengths, such as multi-hot categories."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch


@final
class Ragged:
    """Column of lists as two tensors: row i is ``values[offsets[i]:offsets[i + 1]]``.

    This is the layout of ``torch.nn.EmbeddingBag(..., include_last_offset=True)``. Unpack it as
    ``values, offsets = column``.

    Args:
        values: the items of all rows, one after the other.
        offsets: int64, one more than there are rows; starts with 0.

    Example:
        >>> import torch, stratagem as sg
        >>> tags = sg.data.Ragged.from_lists([[3, 1], [], [2]])
        >>> bag = torch.nn.EmbeddingBag(4, 2, mode="sum", include_last_offset=True)
        >>> bag(*tags).shape
        torch.Size([3, 2])
        >>> len(tags), tags[0], tags[1:]
        (3, tensor([3, 1]), Ragged([[], [2]]))
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        if offsets.dtype != torch.int64 or offsets.ndim != 1 or len(offsets) == 0:
            raise ValueError(
                f"offsets of a Ragged must be int64 of shape [rows + 1], got "
                f"{offsets.dtype} of shape {list(offsets.shape)}"
            )
        self.values = values
        self.offsets = offsets

    @staticmethod
    def from_lists(rows: Sequence[Any], dtype: torch.dtype | None = None) -> Ragged:
        """Return the column of a list of lists or 1-D tensors.

        Example:
            >>> import stratagem as sg
            >>> sg.data.Ragged.from_lists([[1], [2, 3]]).offsets
            tensor([0, 1, 3])
        """
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        kept = [tensor for tensor in tensors if len(tensor)]  # an empty list has no dtype
        values = torch.cat(kept) if kept else torch.empty(0, dtype=dtype or torch.int64)
        lengths = torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64)
        return Ragged(values, _offsets(lengths))

    @staticmethod
    def concatenate(columns: Sequence[Ragged]) -> Ragged:
        """Return the rows of several columns as one column."""
        values = torch.cat([column.values for column in columns])
        return Ragged(values, _offsets(torch.cat([column.lengths for column in columns])))

    @property
    def lengths(self) -> torch.Tensor:
        """Number of items of each row."""
        return torch.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.values, self.offsets))

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a Ragged of {len(self)} rows")
            index %= len(self)
            return self.values[self.offsets[index] : self.offsets[index + 1]].clone()
        start, stop, step = index.indices(len(self))
        if step != 1:
            return self.gather(torch.tensor(range(start, stop, step), dtype=torch.int64))
        stop = max(start, stop)
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def gather(self, indices: torch.Tensor) -> Ragged:
        """Return the rows at `indices` (int64), copied."""
        lengths = self.lengths[indices]
        offsets = _offsets(lengths)
        moves = torch.repeat_interleave(self.offsets[indices] - offsets[:-1], lengths)
        return Ragged(self.values[moves + torch.arange(len(moves))], offsets)

    def to(self, *args: Any, **options: Any) -> Ragged:
        """Move both tensors to a device, with the arguments of `torch.Tensor.to`."""
        return Ragged(self.values.to(*args, **options), self.offsets.to(*args, **options))

    def clone(self) -> Ragged:
        """Return a copy."""
        return Ragged(self.values.clone(), self.offsets.clone())

    def tolist(self) -> list[list[Any]]:
        """Return the rows as lists."""
        bounds = self.offsets.tolist()
        items = self.values.tolist()
        return [items[a:b] for a, b in itertools.pairwise(bounds)]

    def __repr__(self) -> str:
        if len(self) <= 8:
            return f"Ragged({self.tolist()!r})"
        return f"<Ragged {len(self)} rows, {len(self.values)} values {self.values.dtype}>"


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
