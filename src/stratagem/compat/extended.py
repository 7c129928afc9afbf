"""`strategy.extended`: tf.distribute's names for the functions of `_strategies.updates`.

The view has no state. Library code does not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from stratagem._core import context, values
from stratagem._core.variables import Variable
from stratagem._strategies import updates
from stratagem._strategies.base import Strategy
from stratagem.compat import multi_step, spelling


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
        return updates.worker_names(self._strategy)

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
        fn: Callable[[multi_step.MultiStepContext, Any], Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> multi_step.MultiStepContext:
        """Call ``fn(steps, inputs)`` for the iterator's next ``iterations`` inputs.

        ``fn`` runs one step in cross-replica context and sets outputs in ``steps``, a `MultiStepContext`.
        """
        return multi_step.run_steps(self._strategy, fn, iterator, iterations, initial_loop_values)

    def reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: object = None
    ) -> Any:
        """Return the sum or mean over replicas, on the devices of ``destinations``.

        ``destinations`` is a device name, or a tensor, variable or distributed value on that device; ``value`` itself
        makes it an all-reduce. ``options`` are ignored. Return a tensor for one destination device, a `Mirrored` for
        several; with one device or the default strategy the value itself.
        """
        return updates.reduce_to(self._strategy, reduce_op, value, destinations)

    def batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: object = None
    ) -> list[Any]:
        """Call `reduce_to` for several (value, destinations) pairs."""
        return updates.batch_reduce_to(self._strategy, reduce_op, value_destination_pairs)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to ``destinations``: a tensor for one device, a `Mirrored` for several."""
        return updates.broadcast_to(self._strategy, tensor, destinations)

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
        replica = context.current_replica()
        if replica is not None and replica.strategy is self._strategy:
            return updates.update(self._strategy, var, fn, args, kwargs, group=group)
        context.require_cross_replica_or_default(self._strategy, "extended.update()")
        with context.entered(self._strategy, None):
            return updates.update(self._strategy, var, fn, args, kwargs, group=group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(*args)`` on the devices that `non_slot_devices` returned."""
        return updates.update_non_slot(self._strategy, colocate_with, fn, args, kwargs, group=group)

    def non_slot_devices(self, var_list: Sequence[Any]) -> Any:
        """Return where an optimizer's own values are stored: the device, all devices, or a variable."""
        return updates.non_slot_devices(self._strategy, var_list)

    # -------------------------------------------------------------- variables

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[object]:
        """Return a context manager: new variables are placed with the given one."""
        return updates.colocate_vars_with(self._strategy, colocate_with_variable)

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a variable was created under this strategy."""
        return updates.created_in_scope(self._strategy, v)

    def read_var(self, v: Any) -> torch.Tensor:
        """Return a copy of the variable's value."""
        if isinstance(v, Variable):
            return updates.read_var(v)
        return values.convert_to_tensor(v).detach().clone()

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: object = None) -> Any:
        """Call the strategy's method of this name."""
        return spelling.make_numpy_dataset(self._strategy, numpy_input, session)
