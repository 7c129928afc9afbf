"""Specs of elements: shapes and dtypes without values.

`Dataset.element_spec` is a nest of these specs. The one of a distributed dataset is a nest of `PerReplicaSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stratagem._data import nests
from stratagem._data.ragged import Ragged


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one leaf; `None` in the shape stands for a size that varies.

    Example:
        >>> import stratagem as sg
        >>> sg.data.Dataset.range(5).batch(2).element_spec
        TensorSpec(shape=(None,), dtype=torch.int64)
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ObjectSpec:
    """Shape and kind of a leaf that is not a tensor: text, bytes, an array of them, or a `Ragged`.

    Example:
        >>> from stratagem import data
        >>> data.Dataset.from_tensor_slices(["a", "b"]).element_spec
        ObjectSpec(shape=(), kind='str')
    """

    shape: tuple[int | None, ...]
    kind: str


@dataclass(frozen=True)
class PerReplicaSpec:
    """Specs of one leaf on each replica.

    Example:
        >>> from stratagem.data import PerReplicaSpec, TensorSpec
        >>> len(PerReplicaSpec((TensorSpec((2,), torch.float32),) * 2).specs)
        2
    """

    specs: tuple[Any, ...]


def spec_of(element: Any) -> Any:
    """Return the spec of an element."""
    return nests.map_leaves(_leaf_spec, element)


def _leaf_spec(leaf: Any) -> TensorSpec | ObjectSpec:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec(tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, Ragged):
        return ObjectSpec((len(leaf),), f"ragged {leaf.values.dtype}")
    if isinstance(leaf, np.ndarray):
        return ObjectSpec(tuple(leaf.shape), str(leaf.dtype))
    return ObjectSpec((), type(leaf).__name__)


def with_rows(spec: Any, rows: int | None) -> Any:
    """Return the spec of a batch of elements of `spec`."""
    return nests.map_leaves(lambda s: _reshape(s, (rows, *s.shape)), spec)


def of_rows(spec: Any) -> Any:
    """Return the spec of one row of a batch of `spec`."""
    return nests.map_leaves(lambda s: _reshape(s, s.shape[1:]), spec)


def first_dimension(spec: Any, rows: int | None) -> Any:
    """Return the same spec with another first dimension."""
    return nests.map_leaves(lambda s: _reshape(s, (rows, *s.shape[1:])) if s.shape else s, spec)


def _reshape(spec: TensorSpec | ObjectSpec, shape: tuple[int | None, ...]) -> Any:
    if isinstance(spec, TensorSpec):
        return TensorSpec(shape, spec.dtype)
    return ObjectSpec(shape, spec.kind)
