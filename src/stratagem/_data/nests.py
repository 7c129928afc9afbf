"""Walk and convert nests: nested tuples, lists and dicts of leaves.

An *element* is a nest: tuples, named tuples, lists, dicts and other mappings around leaves. A leaf is a
`torch.Tensor`, a `Ragged` column, a NumPy array of a type that torch does not have (text, bytes, objects), or
any other object, which stays unchanged. Everything here is a pure function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stratagem._data.ragged import Ragged
from stratagem.errors import DataError

# Keys that mark a NumPy array and a Ragged in a saved position.
_ARRAY = "stratagem.array"
_RAGGED = "stratagem.ragged"


def is_nest(value: object) -> bool:
    """Return whether `value` is a container that this module looks into."""
    return isinstance(value, tuple | list | dict | Mapping)


def is_arrow_table(value: object) -> bool:
    """Return whether `value` is a table of pyarrow, without importing pyarrow."""
    arrow = sys.modules.get("pyarrow")
    return arrow is not None and isinstance(value, arrow.Table)


def map_leaves(fn: Callable[[Any], Any], nest: Any) -> Any:
    """Return the same nest with `fn` applied to each leaf."""
    if isinstance(nest, torch.Tensor) or not is_nest(nest):
        return fn(nest)
    if isinstance(nest, Mapping):
        return rebuild_dict(nest, {key: map_leaves(fn, item) for key, item in nest.items()})
    return rebuild_sequence(nest, [map_leaves(fn, item) for item in nest])


def rebuild_sequence(like: Any, items: list[Any]) -> Any:
    """Return a list or tuple of the type of `like`; a named tuple takes its fields one by one."""
    if isinstance(like, list):
        return items
    named = isinstance(getattr(type(like), "_fields", None), tuple)
    return type(like)(*items) if named else tuple(items)


def rebuild_dict(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `like` if that type can be made of a dict, else a dict."""
    if type(like) is dict:
        return items
    try:
        kind: Any = type(like)  # its constructor is not known
        return kind(items)
    except TypeError:  # such as defaultdict, whose first argument is a factory
        return items


def leaves(nest: Any) -> list[Any]:
    """Return the leaves, depth first, dicts in their own order."""
    if isinstance(nest, torch.Tensor) or not is_nest(nest):
        return [nest]
    items = nest.values() if isinstance(nest, Mapping) else nest
    return [leaf for item in items for leaf in leaves(item)]


def named_leaves(nest: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves with a name such as ``[0]['ids']``, for error messages."""
    if is_nest(nest):
        for key, item in nest.items() if isinstance(nest, Mapping) else enumerate(nest):
            yield from named_leaves(item, f"{name}[{key!r}]")
    else:
        yield name or "the element", nest


def zip_leaves(fn: Callable[[list[Any]], Any], nests: Sequence[Any]) -> Any:
    """Return one nest made of several of one structure: `fn` gets the leaves of one place."""
    first = nests[0]
    if isinstance(first, torch.Tensor) or not is_nest(first):
        return fn(list(nests))
    for other in nests:
        if type(other) is not type(first) or len(other) != len(first):
            raise DataError(
                "elements of different structure cannot be combined: "
                f"{describe(first)} and {describe(other)}. Make every element the same nest."
            )
    if not isinstance(first, Mapping):
        items = [zip_leaves(fn, [n[i] for n in nests]) for i in range(len(first))]
        return rebuild_sequence(first, items)
    merged = {}
    for key in first:
        missing = [n for n in nests if key not in n]
        if missing:
            raise DataError(
                f"elements of different structure cannot be combined: key {key!r} is "
                f"missing in {describe(missing[0])}. Give every element the same keys."
            )
        merged[key] = zip_leaves(fn, [n[key] for n in nests])
    return rebuild_dict(first, merged)


def describe(nest: Any) -> str:
    """Return a short text of an element's structure: shapes and dtypes, not values."""
    if isinstance(nest, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in nest.items()) + "}"
    if isinstance(nest, tuple | list):
        return f"{type(nest).__name__}({', '.join(describe(v) for v in nest)})"
    if isinstance(nest, torch.Tensor):
        return f"tensor{list(nest.shape)} {str(nest.dtype).removeprefix('torch.')}"
    return f"{type(nest).__name__} {nest!r:.40}"


def to_leaf(value: Any) -> Any:
    """Return a leaf as a tensor if torch has a dtype for it; text and other objects unchanged."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return array_to_tensor(np.asarray(value))
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(value)
    return value


def array_to_tensor(array: np.ndarray[Any, Any]) -> Any:
    """Return a NumPy array as a tensor that shares its memory; text and objects stay NumPy arrays.

    A zero-dimensional array of text becomes the text itself.
    """
    if array.dtype.kind in "USOM":
        return array[()].item() if array.ndim == 0 and array.dtype.kind in "US" else array
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()  # torch has neither read-only memory nor negative strides
    return torch.from_numpy(array)


def is_numbers(value: object) -> bool:
    """Return whether a list holds only Python numbers, at any depth: then it stands for a tensor."""
    if isinstance(value, list):
        return bool(value) and all(is_numbers(item) for item in value)
    return isinstance(value, bool | int | float | complex)


def to_element(value: Any) -> Any:
    """Return a user's value as an element: leaves become tensors, a list of numbers one tensor."""
    if isinstance(value, torch.Tensor) or not is_nest(value):
        return to_leaf(value)
    if isinstance(value, Mapping):
        return rebuild_dict(value, {key: to_element(item) for key, item in value.items()})
    if isinstance(value, list) and is_numbers(value):
        return torch.tensor(value)
    return rebuild_sequence(value, [to_element(item) for item in value])


def to_columns(value: Any) -> Any:
    """Return the argument of `from_tensor_slices` as columns: a list is stacked into one array."""
    if isinstance(value, Mapping):
        return rebuild_dict(value, {key: to_columns(item) for key, item in value.items()})
    if isinstance(value, tuple):
        return rebuild_sequence(value, [to_columns(item) for item in value])
    if isinstance(value, list):
        return stack_list(value)
    return to_leaf(value)


def stack_list(items: list[Any]) -> Any:
    """Return a list of numbers, arrays, tensors or text as one array, as tf.data does."""
    if any(isinstance(item, torch.Tensor) for item in items):
        tensors = [torch.as_tensor(item) for item in items]
        shapes = {tuple(t.shape) for t in tensors}
        if len(shapes) > 1:
            raise ValueError(
                f"a list of tensors is stacked into one, so all need one shape; got "
                f"{sorted(shapes)}. Use a tuple for tensors that belong side by side."
            )
        return torch.stack(tensors)
    if is_numbers(items):
        return torch.tensor(items)
    if any(isinstance(item, str | bytes) for item in items):
        return np.array(items, dtype=object)
    try:
        return array_to_tensor(np.asarray(items))
    except ValueError as error:
        raise ValueError(
            f"a list is stacked into one array, and this one of {len(items)} items cannot be: "
            f"{error}. Use a tuple for arrays that belong side by side."
        ) from error


def to_plain(nest: Any) -> Any:
    """Return a nest that ``torch.save`` stores well and ``torch.load(weights_only=True)`` accepts.

    NumPy arrays become lists. A tensor that is a view of a larger one is copied, or all of that would be saved.
    """

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            is_view = leaf.untyped_storage().nbytes() > leaf.numel() * leaf.element_size()
            return leaf.clone() if is_view else leaf
        if isinstance(leaf, np.ndarray):
            return {_ARRAY: leaf.tolist(), "dtype": leaf.dtype.str}
        if isinstance(leaf, Ragged):
            return {_RAGGED: [plain(leaf.values), plain(leaf.offsets)]}
        return leaf

    return map_leaves(plain, nest)


def from_plain(nest: Any) -> Any:
    """Return the nest that `to_plain` was given."""
    if isinstance(nest, dict):
        if _ARRAY in nest:
            return np.array(nest[_ARRAY], dtype=nest["dtype"])
        if _RAGGED in nest:
            return Ragged(*nest[_RAGGED])
        return rebuild_dict(nest, {key: from_plain(item) for key, item in nest.items()})
    if isinstance(nest, list | tuple):
        return rebuild_sequence(nest, [from_plain(item) for item in nest])
    return nest


def copied(nest: Any) -> Any:
    """Return a copy of a nest with its tensors and arrays copied."""

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | Ragged):
            return leaf.clone()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(copy_leaf, nest)
