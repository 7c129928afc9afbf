"""Partitioning of a variable along its first axis: partitioners and shard arithmetic.

Strategies call `number_of_shards` for a new variable; tables and sharded variables use `ShardLayout` to find the shard of
a row.

Div rule: n shards of a first axis of length d are contiguous; the first ``d mod n`` shards hold one row more than the
others (13 rows in 5 shards: 3, 3, 3, 2, 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override


class Partitioner:
    """Base of partitioners: returns the number of shards of a variable; define ``__call__``.

    Called as ``partitioner(shape=..., dtype=...)`` for every variable created in scope. It returns
    a list with one number per axis, of which only the first may differ from 1.

    Example:
        >>> import torch, stratagem as sg
        >>> class Halves(sg.partitioners.Partitioner):
        ...     def __call__(self, shape, dtype, axis=0):
        ...         return [2] + [1] * (len(shape) - 1)
        >>> Halves()(shape=(10, 3), dtype=torch.float32)
        [2, 1]
    """

    def __call__(
        self, shape: Sequence[int], dtype: torch.dtype | type[str], axis: int = 0
    ) -> list[int]:
        raise NotImplementedError(
            f"{type(self).__name__} does not say how to partition: define __call__(self, shape, "
            "dtype, axis=0) returning one number of shards per axis."
        )


def _on_axis(shape: Sequence[int], axis: int, shards: int) -> list[int]:
    result = [1] * len(shape)
    result[axis] = shards
    return result


def _bytes_per_element(dtype: torch.dtype | type[str], bytes_per_string: int) -> int:
    return dtype.itemsize if isinstance(dtype, torch.dtype) else bytes_per_string


def _check_at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise ValueError(f"{name}={value!r} is too small: expected at least {smallest}.")


@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """The same number of shards for every variable (fewer if the variable has fewer rows).

    Example:
        >>> import torch, stratagem as sg
        >>> sg.partitioners.FixedShardsPartitioner(num_shards=4)(shape=(10, 3), dtype=torch.float32)
        [4, 1]
    """

    num_shards: int

    @override
    def __call__(
        self, shape: Sequence[int], dtype: torch.dtype | type[str], axis: int = 0
    ) -> list[int]:
        del dtype  # the number is the same for every type
        return _on_axis(shape, axis, min(self.num_shards, shape[axis]))


@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """The largest number of shards with at least `min_shard_bytes` in each.

    Unlike TensorFlow's, no shard is ever smaller than the minimum (unless the whole variable is).

    Example:
        >>> import torch, stratagem as sg
        >>> cut = sg.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=100)
        >>> cut(shape=(1024, 1024), dtype=torch.float32)
        [16, 1]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _check_at_least("min_shard_bytes", self.min_shard_bytes, 1)
        _check_at_least("max_shards", self.max_shards, 1)
        _check_at_least("bytes_per_string", self.bytes_per_string, 1)

    @override
    def __call__(
        self, shape: Sequence[int], dtype: torch.dtype | type[str], axis: int = 0
    ) -> list[int]:
        rows = shape[axis]
        total = math.prod(shape) * _bytes_per_element(dtype, self.bytes_per_string)
        if total == 0:
            return _on_axis(shape, axis, 1)
        fewest_rows = -(-self.min_shard_bytes // (total // rows))
        return _on_axis(shape, axis, max(1, min(self.max_shards, rows // fewest_rows)))


@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """The smallest number of shards with at most `max_shard_bytes` in each.

    A shard holds at least one row. `max_shards` (``None`` or 0: no limit) wins over the size.

    Example:
        >>> import torch, stratagem as sg
        >>> cut = sg.partitioners.MaxSizePartitioner(max_shard_bytes=9)
        >>> cut(shape=(6, 1), dtype=torch.float32)
        [3, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _check_at_least("max_shard_bytes", self.max_shard_bytes, 1)
        _check_at_least("max_shards", self.max_shards or 0, 0)
        _check_at_least("bytes_per_string", self.bytes_per_string, 1)

    @override
    def __call__(
        self, shape: Sequence[int], dtype: torch.dtype | type[str], axis: int = 0
    ) -> list[int]:
        if any(size is None for size in shape):
            raise ValueError(
                f"shape={tuple(shape)!r} is not fully defined: expected a number for every axis."
            )
        rows = shape[axis]
        total = math.prod(shape) * _bytes_per_element(dtype, self.bytes_per_string)
        if total == 0:
            return _on_axis(shape, axis, 1)
        rows_per_shard = max(1, self.max_shard_bytes // (total // rows))
        shards = -(-rows // rows_per_shard)
        return _on_axis(shape, axis, min(shards, self.max_shards or shards))


def number_of_shards(
    partitioner: Partitioner | None, shape: Sequence[int], dtype: torch.dtype
) -> int:
    """Return the number of shards of a new variable; 1 means an unsharded variable.

    Raises:
        ValueError: the partitioner's result does not partition the first axis only.

    Example:
        >>> number_of_shards(FixedShardsPartitioner(5), (3, 2), torch.float32)
        3
    """
    if partitioner is None or len(shape) == 0:
        return 1
    answer = partitioner(shape=tuple(shape), dtype=dtype)
    if not answer or answer[0] < 1 or any(part != 1 for part in answer[1:]):
        raise ValueError(
            f"{partitioner!r} answered {answer!r} for shape {tuple(shape)!r}: expected a list "
            "whose first number is at least 1 and whose other numbers are 1 (only the first axis "
            "can be partitioned)."
        )
    return min(int(answer[0]), shape[0])


def shard_sizes(rows: int, shards: int) -> list[int]:
    """Return the rows of each shard by the div rule.

    Example:
        >>> shard_sizes(13, 5)
        [3, 3, 3, 2, 2]
    """
    small, larger = divmod(rows, shards)
    return [small + 1] * larger + [small] * (shards - larger)


class ShardLayout:
    """Rows of one variable by shard.

    Attributes:
        sizes: rows of each shard.
        offsets: first row of each shard.
        rows: rows of all shards together.

    Example:
        >>> layout = ShardLayout([3, 3, 2])
        >>> layout
        <ShardLayout 8 rows in 3 shards: 3, 3, 2>
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        ends = list(accumulate(self.sizes))
        self.offsets = (0, *ends[:-1])
        self.rows = ends[-1]
        # Right-closed borders: bucketize(ids, borders, right=True) is the number of the shard.
        self._borders = torch.tensor(ends[:-1], dtype=torch.int64)

    @property
    def follows_div_rule(self) -> bool:
        """True if the sizes follow the div rule (`shard_sizes`)."""
        return list(self.sizes) == shard_sizes(self.rows, len(self.sizes))

    def check(self, ids: Tensor, what: str) -> None:
        """Raise `ValueError` for ids that are not rows of ``what``, the variable."""
        if ids.numel() == 0:
            return
        smallest, largest = torch.aminmax(ids)
        if smallest < 0 or largest >= self.rows:
            bad = int(smallest) if smallest < 0 else int(largest)
            raise ValueError(
                f"row id {bad!r} is out of range: expected 0 <= id < {self.rows} ({what} has "
                f"{self.rows} rows)."
            )

    def cut_sorted(self, ids: Tensor) -> list[tuple[int, int]]:
        """Return (begin, end) of each shard's part in a sorted vector of ids."""
        cuts = torch.searchsorted(ids, self._borders.to(ids.dtype)).tolist()
        return list(zip([0, *cuts], [*cuts, ids.numel()], strict=True))

    @override
    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.sizes[:8])) + (", …" if len(self.sizes) > 8 else "")
        return f"<ShardLayout {self.rows} rows in {len(self.sizes)} shards: {sizes}>"
