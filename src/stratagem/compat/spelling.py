"""tf.distribute's historical method names, one line each, answered on every strategy object.

`Strategy.__getattr__` asks `lookup` for names it does not have. A name is either an older spelling of
a method (`RENAMED`) or a method that exists only for people who come from TensorFlow (`KEPT`). V1-only
names are not here: they live on the classes of `stratagem.compat.v1`, and asking for one says so.
"""

from __future__ import annotations

import math
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
"""Older spelling -> today's method, with the same arguments."""

_V1_ONLY: Final = frozenset(
    {
        "experimental_run",
        "make_dataset_iterator",
        "make_input_fn_iterator",
        "update_config_proto",
    }
)

# Replicas of every strategy own one device each. A strategy that gave a replica several would make
# this a question to the strategy; the checks below already ask for the number.
_LOGICAL_DEVICES_PER_REPLICA: Final = 1


def lookup(strategy: Strategy, name: str) -> Any:
    """The method that `name` meant in some release of tf.distribute, bound to `strategy`.

    Raises:
        AttributeError: no release had it on this class; says what to use for V1-only names.

    Example:
        >>> import stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> strategy.experimental_run_v2(lambda x: x + 1, args=(1,))
        2
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
    """A dataset of the rows of NumPy arrays (INP-43).

    Args:
        strategy: not needed; there is no graph the data would have to stay out of.
        numpy_input: a nest of arrays, cut along their first dimension. A list of arrays is stacked
            into one array, as tf.data does.
        session: accepted and ignored: there are no sessions.

    Example:
        >>> import numpy as np, stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> dataset = strategy.experimental_make_numpy_dataset(np.ones([10], dtype=np.float32))
        >>> sum(float(x) for x in strategy.experimental_distribute_dataset(dataset))
        10.0
    """
    from stratagem._data.dataset import Dataset

    return Dataset.from_tensor_slices(numpy_input)


def assign_to_logical_device(
    strategy: Strategy, tensor: torch.Tensor, logical_device_id: int
) -> torch.Tensor:
    """The tensor, on that logical device of its replica (DEV-1).

    Raises:
        ValueError: the replica has no such device.

    Example:
        >>> import torch, stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> strategy.experimental_assign_to_logical_device(torch.ones(2), 0)
        tensor([1., 1.])
    """
    count = _LOGICAL_DEVICES_PER_REPLICA
    if logical_device_id not in range(count):
        raise ValueError(
            f"logical_device_id={logical_device_id!r} is not a logical device: a replica of "
            f"{type(strategy).__name__} has {count}, so expected an id from 0 to {count - 1}."
        )
    return tensor


def split_to_logical_devices(
    strategy: Strategy, tensor: torch.Tensor, partition_dimensions: Sequence[int]
) -> torch.Tensor:
    """The tensor, split over the logical devices of its replica (DEV-1).

    Raises:
        ValueError: the number of entries is not the tensor's rank, their product is not the number
            of logical devices, or a dimension cannot be divided.

    Example:
        >>> import torch, stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> strategy.experimental_split_to_logical_devices(torch.ones(2, 3), [1, 1]).shape
        torch.Size([2, 3])
    """
    parts = list(partition_dimensions)
    shape = tuple(tensor.shape)
    if len(parts) != len(shape):
        raise ValueError(
            f"partition_dimensions={parts!r} has {len(parts)} entries for a tensor of shape "
            f"{shape}: expected one entry per dimension, {len(shape)}."
        )
    count = _LOGICAL_DEVICES_PER_REPLICA
    if math.prod(parts) != count:
        raise ValueError(
            f"partition_dimensions={parts!r} makes {math.prod(parts)} parts: a replica of "
            f"{type(strategy).__name__} has {count} logical device(s), so expected a product of "
            f"{count}."
        )
    uneven = [i for i, (size, part) in enumerate(zip(shape, parts, strict=True)) if size % part]
    if uneven:
        raise ValueError(
            f"a tensor of shape {shape} cannot be split by partition_dimensions={parts!r}: "
            f"dimension {uneven[0]} is not divisible by {parts[uneven[0]]}."
        )
    return tensor


def replicate_to_logical_devices(strategy: Strategy, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, on every logical device of its replica (DEV-1): there is one, where it is.

    Example:
        >>> import torch, stratagem as sg
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> strategy.experimental_replicate_to_logical_devices(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor


KEPT: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "experimental_make_numpy_dataset": make_numpy_dataset,
        "experimental_assign_to_logical_device": assign_to_logical_device,
        "experimental_split_to_logical_devices": split_to_logical_devices,
        "experimental_replicate_to_logical_devices": replicate_to_logical_devices,
    }
)
"""Name on a seed page -> what it does here; the strategy is the first argument."""
