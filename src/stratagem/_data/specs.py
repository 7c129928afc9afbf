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


def spec_of(element: Any, *, rows_vary: bool) -> Any:
    """Return the spec of an element; with `rows_vary`, other elements may have other first dimensions."""
    return nests.map_leaves(lambda leaf: leaf_spec(leaf, rows_vary=rows_vary), element)


def leaf_spec(leaf: Any, *, rows_vary: bool) -> TensorSpec | ObjectSpec:
    """Return the spec of one leaf."""
    sizes = (len(leaf),) if isinstance(leaf, Ragged) else getattr(leaf, "shape", ())
    shape: tuple[int | None, ...] = (None, *sizes[1:]) if rows_vary and sizes else tuple(sizes)
    if isinstance(leaf, torch.Tensor):
        return TensorSpec(shape, leaf.dtype)
    if isinstance(leaf, Ragged):
        return ObjectSpec(shape, f"ragged {leaf.values.dtype}")
    return ObjectSpec(
        shape, str(leaf.dtype) if isinstance(leaf, np.ndarray) else type(leaf).__name__
    )
