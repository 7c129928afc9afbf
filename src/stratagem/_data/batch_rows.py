"""Rows of batches: counting, splitting, selecting, stacking and concatenating them.

A *batch* is a nest whose leaves all have the same number of rows: tensors and NumPy arrays (first dimension) and
`Ragged` columns. Everything here is a pure function.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stratagem._data import nests
from stratagem._data.ragged import Ragged
from stratagem.errors import DataError, UnequalRows


def has_rows(leaf: Any) -> bool:
    """Return whether a leaf has a first dimension."""
    return isinstance(leaf, Ragged) or (
        isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim >= 1
    )


def count_rows(nest: Any, *, what: str) -> int:
    """Return the number of rows that all leaves of a batch have; `what` names the batch in errors."""
    rows = -1
    for leaf in nests.leaves(nest):
        if not has_rows(leaf) or (rows >= 0 and len(leaf) != rows):
            raise _rows_error(nest, what)
        rows = len(leaf)
    if rows < 0:
        raise UnequalRows(f"{what} has no tensor in it, so it has no rows: {nests.describe(nest)}")
    return rows


def rows_of(element: Any) -> int:
    """Return the number of rows of an element; an element without a first dimension counts as one row."""
    return next((len(leaf) for leaf in nests.leaves(element) if has_rows(leaf)), 1)


def _rows_error(nest: Any, what: str) -> UnequalRows:
    named = list(nests.named_leaves(nest))
    scalars = [name for name, leaf in named if not has_rows(leaf)]
    if scalars:
        return UnequalRows(
            f"{what} cannot be split into rows: {scalars[0]} has no first dimension "
            f"({nests.describe(nest)}). If the dataset yields single rows, call .batch(global_batch_size) on it first. "
            "Leave out a number that belongs to the whole batch, such as that of enumerate(), and count in the step: "
            "steps += 1."
        )
    sizes = ", ".join(f"{name}: {len(leaf)}" for name, leaf in named)
    return UnequalRows(
        f"{what} has tensors that disagree in length ({sizes}). "
        "Every tensor of a batch needs the same first dimension. If the dataset yields single rows, call "
        ".batch(global_batch_size) on it first."
    )


def split_sizes(rows: int, parts: int) -> list[int]:
    """Return part sizes that differ by at most one, larger parts first.

    Example:
        >>> split_sizes(4, 3), split_sizes(1, 2)
        ([2, 1, 1], [1, 0])
    """
    size, more = divmod(rows, parts)
    return [size + 1] * more + [size] * (parts - more)


def cut_leaf(leaf: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a leaf's rows into consecutive parts (views, no copy)."""
    if isinstance(leaf, torch.Tensor):
        return list(torch.split(leaf, list(sizes)))
    bounds = np.cumsum([0, *sizes])
    return [leaf[a:b] for a, b in itertools.pairwise(bounds)]


def cut(nest: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a batch into consecutive parts, one nest each."""
    pieces = [cut_leaf(leaf, sizes) for leaf in nests.leaves(nest)]

    def part(number: int) -> Any:
        own = iter(pieces)
        return nests.map_leaves(lambda _: next(own)[number], nest)

    return [part(number) for number in range(len(sizes))]


def without_rows(nest: Any) -> Any:
    """Return a batch of zero rows with the dtypes of `nest`; scalars get shape (0,)."""
    return nests.map_leaves(_empty_leaf, nest)


def _empty_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf[:0] if leaf.ndim else leaf.new_empty((0,))
    return leaf[:0] if has_rows(leaf) else np.empty((0,), dtype=object)


def take_rows(columns: Any, indices: torch.Tensor) -> Any:
    """Return the rows at `indices` of every leaf, copied."""

    def gather(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.index_select(leaf, 0, indices)
        return leaf.gather(indices) if isinstance(leaf, Ragged) else leaf[indices.numpy()]

    return nests.map_leaves(gather, columns)


def row(columns: Any, index: int) -> Any:
    """Return one row of every leaf, copied."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[index].clone()
        value = leaf[index]
        return value.copy() if isinstance(value, np.ndarray) else value

    return nests.map_leaves(pick, columns)


def stack(elements: Sequence[Any], *, what: str = "batch()") -> Any:
    """Return a batch of elements of one structure; text becomes a NumPy array of objects."""

    def stack_leaf(items: list[Any]) -> Any:
        first = items[0]
        if isinstance(first, torch.Tensor):
            try:
                return torch.stack(items)
            except (RuntimeError, TypeError) as error:
                kinds = sorted({nests.describe(item) for item in items})
                raise DataError(
                    f"{what} cannot stack elements of different shape or dtype: "
                    f"{', '.join(kinds[:4])}. Pad or crop them to one shape in a map() first."
                ) from error
        if isinstance(first, np.ndarray):
            return np.stack(items)
        batch = np.empty(len(items), dtype=object)
        batch[:] = items
        return batch

    return nests.zip_leaves(stack_leaf, elements)


def concatenate(batches: Sequence[Any], *, what: str) -> Any:
    """Return the rows of several batches as one batch; `what` names the step in errors."""
    if len(batches) == 1:
        return batches[0]

    def join(parts: list[Any]) -> Any:
        first = parts[0]
        if isinstance(first, Ragged):
            return Ragged.concatenate(parts)
        if not isinstance(first, torch.Tensor):
            return np.concatenate(parts)
        try:
            return torch.cat(parts)
        except (RuntimeError, TypeError) as error:
            kinds = sorted({nests.describe(part[:0]) for part in parts})
            raise DataError(
                f"{what} cannot put batches together: {' and '.join(kinds)}. Return the same "
                "shapes and dtypes for every batch."
            ) from error

    return nests.zip_leaves(join, batches)
