"""Implementation of ``strategy.extended``: reduce to a device, update a variable on its device.

Functions of a strategy; the public view of them is in `compat`. Strategies differ by the class attributes ``_slices`` (one
replica needs no reducing) and ``_spread`` (variables, and so updates, have one copy per replica).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from stratagem._core import context, devices, reduction, values
from stratagem._core.values import DistributedValues, Mirrored
from stratagem._core.variables import Variable
from stratagem.errors import ContextError, WrongArgumentType

if TYPE_CHECKING:
    from stratagem._strategies.base import Strategy


# ------------------------------------------------------------------ destinations


def destination_devices(destinations: Any) -> tuple[torch.device, ...]:
    """Return the devices of a name, tensor, variable or distributed value, one per component.

    Raises:
        WrongArgumentType: (an AssertionError) a list or tuple of destinations.
        ValueError: no destination.
    """
    if isinstance(destinations, list | tuple):
        raise WrongArgumentType(
            f"destinations={destinations!r} is a {type(destinations).__name__}: expected one "
            "device name, tensor, variable or distributed value."
        )
    if destinations is None or (isinstance(destinations, str) and destinations == ""):
        raise ValueError(
            f"destinations={destinations!r} names no device: expected a device name, tensor, "
            "variable or distributed value."
        )
    if isinstance(destinations, str | torch.device | devices.Device):
        return (devices.resolve_device(destinations).torch_device,)
    if isinstance(destinations, Variable):
        return tuple(part.value().device for part in destinations.values)
    if isinstance(destinations, DistributedValues):
        return tuple(part.device for part in reduction.components(destinations))
    if isinstance(destinations, torch.Tensor):
        return (destinations.device,)
    raise ValueError(
        f"destinations={destinations!r} is a {type(destinations).__name__}: expected a device "
        "name, tensor, variable or distributed value."
    )


def _placed(value: torch.Tensor, places: Sequence[torch.device]) -> Any:
    if len(places) == 1:
        return value.to(places[0])
    first = value.to(places[0])
    return Mirrored([first, *(value.to(place, copy=True) for place in places[1:])])


def reduce_to(strategy: Strategy, op: Any, value: Any, destinations: Any) -> Any:
    """Reduce a value over replicas, on the destination's device(s)."""
    context.require_cross_replica_or_default(strategy, "reduce_to()")
    checked = reduction.as_reduce_op(op)
    places = destination_devices(destinations)
    if not strategy._slices:
        return value
    reduced = reduction.reduce(
        checked, value, None, size=strategy.num_replicas_in_sync, nests=strategy._spread
    )
    return values.map_leaves(
        lambda leaf: _placed(leaf, places) if isinstance(leaf, torch.Tensor) else leaf, reduced
    )


def batch_reduce_to(strategy: Strategy, op: Any, pairs: Any) -> list[Any]:
    """Call `reduce_to` for a list of (value, destinations) pairs."""
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"value_destination_pairs holds {pair!r}: expected tuples (value, destinations)."
            )
    return [reduce_to(strategy, op, value, where) for value, where in pairs]


def broadcast_to(strategy: Strategy, tensor: Any, destinations: Any) -> Any:
    """Copy a tensor to every destination device."""
    context.require_cross_replica_or_default(strategy, "broadcast_to()")
    if destinations is None:
        raise WrongArgumentType("destinations=None: expected a device name, tensor or variable.")
    if isinstance(tensor, int | float):
        return tensor
    places = destination_devices(destinations)
    if not strategy._slices:
        return tensor
    return _placed(values.convert_to_tensor(tensor), places)


# ------------------------------------------------------------------ updates


def update(
    strategy: Strategy,
    variable: Any,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    group: bool = True,
) -> Any:
    """Call ``fn(variable, …)`` on the variable's device, once per copy."""
    strategy._check_updated(variable)
    context.require_scope(strategy, "extended.update()")
    replica = context.current_replica()
    if replica is not None:
        return replica.context.merge_call(
            lambda _, *merged, **named: _update(strategy, variable, fn, merged, named, group=group),
            args=tuple(args),
            kwargs=kwargs,
        )
    return _update(strategy, variable, fn, args, kwargs or {}, group=group)


def _update(
    strategy: Strategy,
    variable: Any,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    group: bool,
) -> Any:
    if not strategy._slices or not isinstance(variable, Variable):
        targets: tuple[Any, ...] = (variable,)
    else:
        targets = variable.values if strategy._spread else (variable.get(),)
    results = []
    for i, target in enumerate(targets):
        at = target.device if isinstance(target, Variable) else "here"
        with context.updating(at):
            results.append(fn(target, *_at(args, i, strategy), **_at(kwargs, i, strategy)))
    return grouped(results, strategy, group=group)


def update_non_slot(
    strategy: Strategy,
    colocate_with: Any,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    group: bool = True,
) -> Any:
    """Call ``fn(…)`` on the device(s) that `non_slot_devices` returned."""
    context.require_cross_replica_or_default(strategy, "update_non_slot()")
    times = strategy.num_replicas_in_sync if strategy._spread else 1
    where = colocate_with[0] if isinstance(colocate_with, tuple | list) else colocate_with
    with context.entered(strategy, None), context.updating(where):
        results = [
            fn(*_at(args, i, strategy), **_at(kwargs or {}, i, strategy)) for i in range(times)
        ]
    return grouped(results, strategy, group=group)


def non_slot_devices(strategy: Strategy, var_list: Sequence[Variable]) -> Any:
    """Return the place for values that belong to several variables, for `update_non_slot`."""
    if strategy._slices and not strategy._spread:
        return min(var_list, key=lambda variable: variable.name)
    return tuple(each.name for each in strategy._compute_devices)


def _at(tree: Any, i: int, strategy: Strategy) -> Any:
    if not strategy._slices:
        return tree
    parts = values.split(tree, i + 1)
    return tree if parts is None else parts[i]


def grouped(results: Sequence[Any], strategy: Strategy, *, group: bool) -> Any:
    """Return the results of an update: the result, or a `Mirrored`; a tuple if not to be grouped."""
    if not group:
        return tuple(results)
    return Mirrored(results) if strategy._spread and len(results) > 1 else results[0]


# ------------------------------------------------------------------ variables


def colocate_vars_with(strategy: Strategy, variable: Any) -> AbstractContextManager[object]:
    """Return a context manager: new variables are placed with ``variable``."""
    if not created_in_scope(strategy, variable):
        raise ValueError(
            f"colocate_vars_with({variable!r}): expected a variable created under the scope of "
            f"{strategy!r}."
        )
    context.require_scope(strategy, "colocate_vars_with()")
    return strategy._colocated(variable)


def created_in_scope(strategy: Strategy, variable: Any) -> bool:
    """Return whether this is a variable of this strategy."""
    return isinstance(variable, Variable) and variable._strategy is strategy


def read_var(variable: Variable) -> torch.Tensor:
    """Return a copy of a variable's value."""
    return variable.read_value()


def worker_names(strategy: Strategy) -> Sequence[str]:
    """Return ``extended.worker_devices``: a list under central storage, else a tuple."""
    if strategy._is_default:
        raise ContextError(
            "the default strategy places nothing, so it has no worker devices. Use one of the "
            "other strategies to choose devices."
        )
    names = [each.name for each in strategy._compute_devices]
    return names if strategy._slices and not strategy._spread else tuple(names)
