"""tf.distribute's historical method names on every strategy.

`Strategy.__getattr__` calls `lookup` for unknown names. A name is an older spelling of a method (`RENAMED`) or a method that
exists only for ported programs (`KEPT`). V1-only names belong to the classes of `stratagem.compat.v1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from stratagem._strategies.base import Strategy

RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "experimental_run_v2": "run",
        "experimental_distribute_dataset": "distribute_dataset",
        "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
        "experimental_distribute_values_from_function": "distribute_values_from_function",
        "experimental_local_results": "local_results",
    }
)
"""Older spelling -> method with the same arguments."""

_V1_ONLY: Final = frozenset(
    {
        "experimental_run",
        "make_dataset_iterator",
        "make_input_fn_iterator",
        "update_config_proto",
    }
)


def lookup(strategy: Strategy, name: str) -> Any:
    """Return the method for a historical name, bound to `strategy`.

    Raises:
        AttributeError: the name is unknown, or a V1-only name.
    """
    today = RENAMED.get(name)
    if today is not None:
        return getattr(strategy, today)
    kept = KEPT.get(name)
    if kept is not None:
        return MethodType(kept, strategy)
    kind = type(strategy).__name__
    if name in _V1_ONLY:
        raise AttributeError(
            f"{kind!r} object has no attribute {name!r}: it belongs to tf.compat.v1. Use "
            f"sg.compat.v1.OneDeviceStrategy, or run() and distribute_dataset() of this strategy."
        )
    raise AttributeError(f"{kind!r} object has no attribute {name!r}")


def make_numpy_dataset(strategy: Strategy, numpy_input: Any, session: object = None) -> Any:
    """Return a dataset of the rows of NumPy arrays.

    Args:
        strategy: not used.
        numpy_input: a nest of arrays, split along their first dimension. A list of arrays is stacked
            into one array, as tf.data does.
        session: ignored.
    """
    from stratagem._data.dataset import Dataset

    return Dataset.from_tensor_slices(numpy_input)


def assign_to_logical_device(
    strategy: Strategy, tensor: torch.Tensor, logical_device_id: int
) -> torch.Tensor:
    """Return the tensor; a replica has one logical device, number 0."""
    if logical_device_id != 0:
        raise ValueError(
            f"logical_device_id={logical_device_id!r} is not a logical device: a replica of "
            f"{type(strategy).__name__} has one, so expected 0."
        )
    return tensor


def split_to_logical_devices(
    strategy: Strategy, tensor: torch.Tensor, partition_dimensions: Sequence[int]
) -> torch.Tensor:
    """Return the tensor; a replica has one logical device, so every dimension has one part."""
    if list(partition_dimensions) != [1] * tensor.ndim:
        raise ValueError(
            f"partition_dimensions={list(partition_dimensions)!r} for a tensor of shape "
            f"{tuple(tensor.shape)}: a replica of {type(strategy).__name__} has one logical device, "
            f"so expected {[1] * tensor.ndim}."
        )
    return tensor


def replicate_to_logical_devices(strategy: Strategy, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor: it is on the one logical device of its replica."""
    return tensor


KEPT: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "experimental_make_numpy_dataset": make_numpy_dataset,
        "experimental_assign_to_logical_device": assign_to_logical_device,
        "experimental_split_to_logical_devices": split_to_logical_devices,
        "experimental_replicate_to_logical_devices": replicate_to_logical_devices,
    }
)
"""Historical name -> function; its first argument is the strategy."""
