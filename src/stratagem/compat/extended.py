"""`strategy.extended`: reduce to a device, update a variable on its device.

The view has no state. Library code does not use it. Strategies differ by the class attributes ``_slices`` (one replica
needs no reducing) and ``_spread`` (variables, and so updates, have one copy per replica).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from stratagem._core import context, devices, reduction, values
from stratagem._core.values import DistributedValues, Mirrored
from stratagem._core.variables import Variable
from stratagem._strategies.base import Strategy
from stratagem.compat import spelling
from stratagem.errors import ContextError, WrongArgumentType


def extended_view(strategy: Strategy) -> StrategyExtended:
    """Return the view of a strategy; called by `Strategy.extended`."""
    return StrategyExtended(strategy)


@final
class StrategyExtended:
    """The methods tf.distribute keeps under ``strategy.extended``.

    Example:
        >>> import torch, stratagem as sg
        >>> strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> value = sg.PerReplica([torch.tensor(1.0), torch.tensor(2.0)])
        >>> strategy.extended.reduce_to("sum", value, "cpu:0")
        tensor(3.)
        >>> strategy.extended.parameter_devices
        ('/device:CPU:0',)
        >>> strategy.close()
    """

    # EXT-9: the same for every strategy, except for `experimental_between_graph`.
    should_checkpoint = True
    should_save_summary = True
    experimental_should_init = True
    experimental_require_static_shapes = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __repr__(self) -> str:
        return f"<StrategyExtended of {self._strategy!r}>"

    # -------------------------------------------------------------- properties

    @property
    def worker_devices(self) -> Sequence[str]:
        """Names of the replicas' devices: a list under central storage, else a tuple."""
        strategy = self._strategy
        if strategy._is_default:
            raise ContextError(
                "the default strategy places nothing, so it has no worker devices. Use one of the "
                "other strategies to choose devices."
            )
        names = [each.name for each in strategy._compute_devices]
        return names if strategy._slices and not strategy._spread else tuple(names)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Names of the devices that hold variables; the default strategy raises RuntimeError."""
        return self._strategy._parameter_names

    @property
    def experimental_between_graph(self) -> bool:
        """True if variables are apart from the replicas (central storage, parameter servers)."""
        return self._strategy._between_graph

    # -------------------------------------------------------------- running and reducing

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `Strategy.run` without the check of ``args``."""
        return self._strategy._call_for_each_replica(fn, args, kwargs)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call ``fn(steps, inputs)`` for the iterator's next ``iterations`` inputs.

        ``fn`` runs one step in cross-replica context and sets outputs in ``steps``, a `MultiStepContext`.
        """
        return run_steps(self._strategy, fn, iterator, iterations, initial_loop_values)

    def reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: object = None
    ) -> Any:
        """Return the sum or mean over replicas, on the devices of ``destinations``.

        ``destinations`` is a device name, or a tensor, variable or distributed value on that device; ``value`` itself
        makes it an all-reduce. ``options`` are ignored. Return a tensor for one destination device, a `Mirrored` for
        several; with one device or the default strategy the value itself.
        """
        strategy = self._strategy
        context.require_cross_replica_or_default(strategy, "reduce_to()")
        op = reduction.as_reduce_op(reduce_op)
        places = _destination_devices(destinations)
        if not strategy._slices:
            return value
        reduced = reduction.reduce(
            op, value, None, size=strategy.num_replicas_in_sync, nests=strategy._spread
        )
        return values.map_leaves(
            lambda leaf: _placed(leaf, places) if isinstance(leaf, torch.Tensor) else leaf, reduced
        )

    def batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: object = None
    ) -> list[Any]:
        """Call `reduce_to` for several (value, destinations) pairs."""
        for pair in value_destination_pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(
                    f"value_destination_pairs holds {pair!r}: expected tuples (value, destinations)."
                )
        return [self.reduce_to(reduce_op, *pair) for pair in value_destination_pairs]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to ``destinations``: a tensor for one device, a `Mirrored` for several."""
        context.require_cross_replica_or_default(self._strategy, "broadcast_to()")
        if destinations is None:
            raise WrongArgumentType(
                "destinations=None: expected a device name, tensor or variable."
            )
        if isinstance(tensor, int | float):
            return tensor
        places = _destination_devices(destinations)
        if not self._strategy._slices:
            return tensor
        return _placed(values.convert_to_tensor(tensor), places)

    # -------------------------------------------------------------- updating variables

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(variable, *args)`` on the variable's device; on every copy if it has several.

        In a replica, wait for all replicas and merge their arguments. ``fn`` gets the copy and the copy's
        components of distributed arguments; assignments in it change that copy only. ``group=False`` returns a tuple
        with one result per copy.
        """
        self._strategy._check_updated(var)
        replica = context.current_replica()
        if replica is not None and replica.strategy is self._strategy:
            return replica.context.merge_call(
                lambda _, *merged, **named: self._update(var, fn, merged, named, group=group),
                args=tuple(args),
                kwargs=kwargs,
            )
        context.require_cross_replica_or_default(self._strategy, "extended.update()")
        with context.entered(self._strategy, None):
            return self._update(var, fn, args, kwargs or {}, group=group)

    def _update(
        self,
        variable: Any,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        group: bool,
    ) -> Any:
        strategy = self._strategy
        if not strategy._slices or not isinstance(variable, Variable):
            targets: tuple[Any, ...] = (variable,)
        else:
            targets = variable.values if strategy._spread else (variable.get(),)
        results = []
        for i, target in enumerate(targets):
            at = target.device if isinstance(target, Variable) else "here"
            with context.updating(at):
                results.append(fn(target, *self._part(args, i), **self._part(kwargs, i)))
        return self._grouped(results, group=group)

    def _part(self, tree: Any, i: int) -> Any:
        """Return component `i` of distributed arguments."""
        parts = values.split(tree, i + 1) if self._strategy._slices else None
        return tree if parts is None else parts[i]

    def _grouped(self, results: Sequence[Any], *, group: bool) -> Any:
        if not group:
            return tuple(results)
        return Mirrored(results) if self._strategy._spread and len(results) > 1 else results[0]

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(*args)`` on the devices that `non_slot_devices` returned."""
        context.require_cross_replica_or_default(self._strategy, "update_non_slot()")
        times = self._strategy.num_replicas_in_sync if self._strategy._spread else 1
        where = colocate_with[0] if isinstance(colocate_with, tuple | list) else colocate_with
        with context.entered(self._strategy, None), context.updating(where):
            results = [
                fn(*self._part(args, i), **self._part(kwargs or {}, i)) for i in range(times)
            ]
        return self._grouped(results, group=group)

    def non_slot_devices(self, var_list: Sequence[Any]) -> Any:
        """Return where an optimizer's own values are stored: the device, all devices, or a variable."""
        if self._strategy._slices and not self._strategy._spread:
            return min(var_list, key=lambda variable: variable.name)
        return tuple(each.name for each in self._strategy._compute_devices)

    # -------------------------------------------------------------- variables

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[object]:
        """Return a context manager: new variables are placed with the given one."""
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                f"colocate_vars_with({colocate_with_variable!r}): expected a variable created under the "
                f"scope of {self._strategy!r}."
            )
        context.require_scope(self._strategy, "colocate_vars_with()")
        return self._strategy._colocated(colocate_with_variable)

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a variable was created under this strategy."""
        return isinstance(v, Variable) and v._strategy is self._strategy

    def read_var(self, v: Any) -> torch.Tensor:
        """Return a copy of the variable's value."""
        if isinstance(v, Variable):
            return v.read_value()
        return values.convert_to_tensor(v).detach().clone()

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: object = None) -> Any:
        """Call the strategy's method of this name."""
        return spelling.make_numpy_dataset(self._strategy, numpy_input, session)


def _destination_devices(destinations: Any) -> tuple[torch.device, ...]:
    """Return the devices of a name, tensor, variable or distributed value, one per component.

    Raises:
        WrongArgumentType: (an AssertionError) a list or tuple of destinations.
        ValueError: no destination.
    """
    if isinstance(destinations, list | tuple):
        raise WrongArgumentType(
            f"destinations={destinations!r} has type {type(destinations).__name__}: expected one "
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
        f"destinations={destinations!r} has type {type(destinations).__name__}: expected a device "
        "name, tensor, variable or distributed value."
    )


def _placed(value: torch.Tensor, places: Sequence[torch.device]) -> Any:
    if len(places) == 1:
        return value.to(places[0])
    first = value.to(places[0])
    return Mirrored([first, *(value.to(place, copy=True) for place in places[1:])])


@final
class MultiStepContext:
    """Outputs of the last step of a multi-step run, by name; tensors are reduced."""

    def __init__(self, initial: Mapping[str, Any]) -> None:
        self.last_step_outputs: dict[str, Any] = dict(initial)
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Set ``last_step_outputs[name]``; in a replica, to the reduction of all replicas' values."""
        if context.current_replica() is None:
            strategy = context.get_strategy()
            self.last_step_outputs[name] = (
                output if reduce_op is None else strategy.reduce(reduce_op, output, axis=None)
            )
            return
        if reduce_op is None:
            raise ValueError(
                f"set_last_step_output({name!r}, …) in {context.describe_context()} needs a reduce_op: "
                'expected "sum" or "mean", to combine the replicas\' values.'
            )

        def keep(strategy: Strategy, value: Any) -> None:
            self.last_step_outputs[name] = strategy.reduce(reduce_op, value, axis=None)

        _merge(keep, output)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set ``non_tensor_outputs[name]``; in a replica, to a tuple of all replicas' values."""
        if context.current_replica() is None:
            self.non_tensor_outputs[name] = output
            return

        def keep(strategy: Strategy, value: Any) -> None:
            self.non_tensor_outputs[name] = strategy.local_results(value)

        _merge(keep, output)


def _merge(fn: Callable[..., None], value: Any) -> None:
    replica = context.get_replica_context()
    assert replica is not None
    replica.merge_call(fn, args=(value,))


def run_steps(
    strategy: Strategy,
    fn: Callable[[MultiStepContext, Any], Any],
    iterator: Iterator[Any],
    iterations: int,
    initial_loop_values: Mapping[str, Any] | None,
) -> MultiStepContext:
    """Call ``fn(steps, inputs)`` in cross-replica context for the next ``iterations`` inputs."""
    what = "extended.experimental_run_steps_on_iterator()"
    if iterations < 0:
        raise ValueError(f"iterations={iterations!r}: expected a number of steps, 0 or more.")
    if not callable(fn):
        raise TypeError(f"fn={fn!r} is not callable: expected a function of (steps, inputs).")
    context.require_cross_replica_or_default(strategy, what)
    steps = MultiStepContext(initial_loop_values or {})
    for _ in range(iterations):
        inputs = next(iterator)
        with context.entered(strategy, None):
            fn(steps, inputs)
    return steps
