"""`Strategy`: the base class of all strategies.

Public methods are concrete and final: they check arguments and context. A strategy is a final subclass that overrides
hooks (names with one underscore). `_core` calls the hooks of `StrategyHooks`; the others are:

    _parameter_names       devices of variables, for ``extended.parameter_devices``
    _slices                whether run() passes each replica its components, or whole values
    _spread                whether variables have one copy per replica
    _between_graph         a flag of tf.distribute's ``extended``
    _run                   runs a function on the replicas; rarely overridden
    _run_steps             runs the batches of `run_steps`
    _reduce, _gather, …    implement the public methods of the same name
    _colocated             held by colocate_vars_with (`compat/extended.py`)
    _arguments             constructor arguments, for deepcopy and repr
"""

from __future__ import annotations

import functools
import importlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, Self, final

import torch
from typing_extensions import override

from stratagem import config
from stratagem._core import (
    context,
    keras_import,
    reduction,
    torch_patches,
    values,
    variable_storage,
    variables,
)
from stratagem._core.devices import Device
from stratagem._core.managed import ManagedBuffer, ManagedParameter
from stratagem._core.replica_threads import ReplicaThreads
from stratagem._core.replicas import ReplicaGroup
from stratagem._core.torch_patches import compiling, module_members
from stratagem._core.user_contexts import InputContext, ValueContext
from stratagem._owner import Owner
from stratagem._strategies import step_loop
from stratagem._strategies.async_functions import refuse_async, refuse_unawaited
from stratagem._strategies.constructor_call import arguments_of, constructor_call
from stratagem.errors import ContextError, MisuseError

GradientAggregation = Literal["mean", "sum"]


class Strategy(Owner):
    """Placement of variables and computation. Abstract: use one of its subclasses.

    Example:
        >>> import stratagem as sg
        >>> with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        ...     result = strategy.run(lambda: sg.get_replica_context().num_replicas_in_sync)
        >>> result
        2
    """

    _is_default: ClassVar[bool] = False
    _steps_here: ClassVar[bool] = True
    _slices: ClassVar[bool] = True
    _spread: ClassVar[bool] = False
    _between_graph: ClassVar[bool] = False
    _parallel_replicas = False
    _devices: tuple[Device, ...]

    def __init__(self, *, gradient_aggregation: GradientAggregation = "mean") -> None:
        if gradient_aggregation not in ("mean", "sum"):
            raise ValueError(
                f"gradient_aggregation={gradient_aggregation!r} is not known: use 'mean' or 'sum'."
            )
        config.log_as_environment_says()
        self._gradient_aggregation = gradient_aggregation
        torch_patches.install(torch_patches.STRATEGY)
        if replicas := self._needs_replica_patches():
            torch_patches.install(torch_patches.REPLICAS)
        keras_import.prepare_keras(replicas=replicas or self.cluster_resolver is not None)
        self._threads = ReplicaThreads(type(self).__name__)
        self._finalizer = weakref.finalize(self, self._threads.close)

    # -------------------------------------------------------------- closing and copying

    @final
    @override
    def close(self) -> None:
        """End the replica threads and release resources. May be called again.

        A strategy that was not closed does this when it is garbage-collected.
        """
        self._close()
        self._threads.close()

    def __copy__(self) -> Self:
        raise MisuseError(
            f"{self!r} cannot be copied: two objects would claim the same variables. Use "
            "copy.deepcopy for an independent strategy, or pass the strategy itself."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self)(**self._arguments())
        memo[id(self)] = twin
        return twin

    @override
    def __repr__(self) -> str:
        return constructor_call(type(self), self._arguments())

    # -------------------------------------------------------------- properties

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
        return len(self._compute_devices)

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver; None for a strategy of one machine."""
        return None

    @property
    def gradient_aggregation(self) -> str:
        """``"mean"`` over the rows of the global batch, or ``"sum"`` over replicas."""
        return self._gradient_aggregation

    @property
    def extended(self) -> Any:
        """The methods tf.distribute keeps under ``extended``, as a thin view (see `compat`)."""
        return _compat("extended").extended_view(self)

    def __getattr__(self, name: str) -> Any:
        # Python calls this for names it does not find: tf.distribute's historical spellings.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _compat("spelling").lookup(self, name)

    # -------------------------------------------------------------- methods

    @final
    def scope(self) -> context.Scope:
        """Return a context manager: models, optimizers and variables created in it belong to this strategy.

        Example:
            >>> import stratagem as sg
            >>> strategy = sg.OneDeviceStrategy("cpu:0")
            >>> with strategy.scope() as current:
            ...     current is strategy
            True
        """
        return context.Scope(self)

    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: object = None,
    ) -> Any:
        """Call ``fn`` once per replica; return the merged results.

        If an argument is a distributed value, each replica receives its own component. Plain values that are
        equal on all replicas are returned once, other results as a `PerReplica`.

        Args:
            fn: any callable.
            args: positional arguments, a tuple or list.
            kwargs: keyword arguments.
            options: `sg.compat.RunOptions`, accepted and ignored.

        Raises:
            ValueError: ``args`` is not a tuple or list.
            TypeError: ``fn`` is not callable, or asynchronous (``async def``).
            RuntimeError: called inside a replica or under another strategy.

        Example:
            >>> import stratagem as sg
            >>> strategy = sg.OneDeviceStrategy("cpu:0")
            >>> strategy.run(lambda x: 2 * x, args=(21,))
            42
        """
        if not isinstance(args, tuple | list):
            raise ValueError(
                f"args={args!r:.40} has type {type(args).__name__}: expected a tuple or list of positional "
                "arguments, such as args=(batch,)."
            )
        return self._call_for_each_replica(fn, args, kwargs)

    @final
    def run_steps(
        self, step: Callable[[Any], Any], dataset: Any, *, steps: int | None = None
    ) -> Iterator[Any]:
        """Call ``step(batch)`` for every global batch; yield the results in batch order.

        A generator: no step runs until you iterate over it, with a loop or ``list(...)``. On one machine each
        batch is one `run`. With parameter servers each batch is scheduled on a worker, and later batches already
        run when a result is yielded. Numbers that replicas return are averaged over the rows of the batch.

        Args:
            step: the training step, a function of one batch.
            dataset: any iterable of global batches.
            steps: stop after this many batches; None: use all of them.
        """
        step_loop.check_arguments(step, steps)
        return step_loop.reminding(self._run_steps(step, dataset, steps))

    @final
    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Return the sum or mean of a per-replica value, over replicas and, with ``axis``, dimensions.

        Args:
            reduce_op: `ReduceOp` or its name in any letter case.
            value: a result of ``run``.
            axis: None to reduce elementwise over replicas; a dimension (or tuple of them), typically 0,
                to reduce the rows as well. A mean then divides by the number of all rows.

        Example:
            >>> import torch, stratagem as sg
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> losses = sg.PerReplica([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0])])
            >>> strategy.reduce("mean", losses, axis=0)
            tensor(3.)
            >>> strategy.close()
        """
        context.require_cross_replica_or_default(self, "reduce()")
        return self._reduce(reduction.as_reduce_op(reduce_op), value, axis)

    @final
    def gather(self, value: Any, axis: int) -> Any:
        """Join the components of a per-replica value along ``axis``, in replica order.

        Example:
            >>> import torch, stratagem as sg
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.gather(sg.PerReplica([torch.tensor([1, 2]), torch.tensor([3])]), axis=0)
            tensor([1, 2, 3])
            >>> strategy.close()
        """
        replica = context.current_replica()
        if replica is not None and replica.strategy is self:
            raise ContextError(
                f"gather() of {self!r} was called inside {context.describe_context()}. In a "
                "replica use get_replica_context().all_gather(value, axis)."
            )
        context.require_cross_replica_or_default(self, "gather()")
        reduction.refuse_sparse(value, "gather")
        return self._gather(value, axis)

    @final
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value on this machine's replicas, as a tuple.

        Example:
            >>> import stratagem as sg
            >>> sg.OneDeviceStrategy("cpu:0").local_results(3)
            (3,)
        """
        return self._local_results(value)

    @final
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a distributed value with one component per replica, each from a call of ``value_fn``.

        Example:
            >>> import stratagem as sg
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> value = strategy.distribute_values_from_function(
            ...     lambda context: context.replica_id_in_sync_group
            ... )
            >>> strategy.local_results(value)
            (0, 1)
            >>> strategy.close()
        """
        if not callable(value_fn):
            raise TypeError(
                f"value_fn={value_fn!r} is not callable: expected a function of one ValueContext."
            )
        context.require_cross_replica_or_default(self, "distribute_values_from_function()")
        return self._values_from_function(value_fn)

    @final
    def distribute_dataset(self, dataset: Any, options: config.InputOptions | None = None) -> Any:
        """Return an iterable of distributed batches: each global batch split into one part per replica.

        Args:
            dataset: any iterable of global batches: a `sg.data.Dataset`, a DataLoader, a list.
            options: `InputOptions`.
        """
        return self._distribute_dataset(dataset, options)

    @final
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: config.InputOptions | None = None,
    ) -> Any:
        """Return an iterable of distributed batches from a dataset of per-replica batches.

        Args:
            dataset_fn: gets an `InputContext`, returns a dataset batched per replica.
            options: `InputOptions`.
        """
        return self._distribute_from_function(dataset_fn, options)

    # -------------------------------------------------------------- hooks

    @property
    def _compute_devices(self) -> tuple[Device, ...]:
        """Devices of the replicas, one entry per replica."""
        return self._devices

    @property
    @abstractmethod
    def _parameter_names(self) -> tuple[str, ...]:
        """Names of the devices that hold variables (``extended.parameter_devices``)."""

    def _arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments, from which a deep copy is created."""
        return arguments_of(self)

    def _close(self) -> None:  # most strategies hold nothing more
        """Release the resources of the subclass."""

    def _scope_entered(self) -> AbstractContextManager[object]:
        """Return a context manager held while the outermost scope of a thread is open."""
        return nullcontext()

    def _replica_devices(self, replica_id: int) -> Any:
        """Return ``ReplicaContext.devices``: a list holding this replica's device in a list."""
        return [[self._compute_devices[replica_id].name]]

    @final
    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """Implement `run` without the check of ``args`` (``extended.call_for_each_replica``)."""
        if not callable(fn):
            raise TypeError(
                f"fn={fn!r:.200} has type {type(fn).__name__}, which is not callable: expected the step function "
                "itself, such as strategy.run(step, args=(batch,))."
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(
                f"kwargs={kwargs!r:.200} has type {type(kwargs).__name__}: expected a dict of keyword "
                'arguments, such as kwargs={"scale": 2.0}, or None.'
            )
        refuse_async(fn, "run()")
        context.require_cross_replica_or_default(self, "run()")
        return refuse_unawaited(self._run(fn, args, kwargs or {}), fn, "run()")

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        devices = self._compute_devices
        size = len(devices)
        if size == 0:
            raise IndexError(
                f"{self!r} has no compute device, so there is no replica to run on. Give it at "
                'least one, such as compute_devices=["cpu:0"].'
            )
        if not self._slices:
            return ReplicaGroup(self, devices).run_alone(fn, args, kwargs)
        compiling.skip_frames()
        seen: list[values.PerReplica] = []
        parts = values.split_call(args, kwargs, size, seen)
        rows = values.row_counts(seen, size)
        group = ReplicaGroup(self, devices, rows=rows, parallel=self._parallel_replicas)
        if size == 1:
            if parts is not None:
                args, kwargs = parts[0]
            return group.run_alone(fn, args, kwargs)
        torch_patches.install(torch_patches.RANDOM)
        if parts is None:
            calls = [functools.partial(fn, *args, **kwargs)] * size
        else:
            calls = [functools.partial(fn, *part[0], **part[1]) for part in parts]
        return _merge(group, group.run(calls, self._threads), rows)

    def _run_steps(self, step: Any, dataset: Any, steps: int | None) -> Iterator[Any]:
        return step_loop.run_here(self, step, dataset, steps)

    @abstractmethod
    def _reduce(self, op: reduction.ReduceOp, value: Any, axis: Any) -> Any:
        """Implement `reduce`, with a checked operation."""

    @abstractmethod
    def _gather(self, value: Any, axis: int) -> Any:
        """Implement `gather`, in the right context."""

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, values.DistributedValues):
            return value.values
        if values.open_node(value) is None:
            return (value,)
        size = self.num_replicas_in_sync
        parts = values.split(value, size)
        return (value,) * size if parts is None else tuple(parts)

    def _values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        size = self.num_replicas_in_sync
        made = [value_fn(ValueContext(i, size)) for i in range(size)]
        return values.wrap(made)

    def _create_variable(self, request: variables.VariableRequest) -> Any:
        """Create a variable; by default one copy on the variable device."""
        return variable_storage.central(
            request,
            self._variable_device,
            self,
            shared=self._slices and self.num_replicas_in_sync > 1,
        )

    def _check_updated(self, variable: Any) -> None:
        """Raise if ``extended.update`` cannot update ``variable``."""
        if not isinstance(variable, variables.Variable):
            raise ValueError(
                f"update({variable!r}, …): expected a variable, got a {type(variable).__name__}."
            )

    def _colocated(self, variable: variables.Variable) -> AbstractContextManager[object]:
        return nullcontext()

    @property
    def _variable_device(self) -> Device:
        """The logical device that holds variables with one copy."""
        return self._compute_devices[0]

    def _distribute_dataset(self, dataset: Any, options: config.InputOptions | None) -> Any:
        from stratagem._data import distribute

        devices = [device.torch_device for device in self._compute_devices]
        return distribute.distribute_dataset(dataset, devices, options)

    def _distribute_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: config.InputOptions | None,
    ) -> Any:
        from stratagem._data import distribute

        devices = [device.torch_device for device in self._compute_devices]
        return distribute.distribute_datasets_from_function(dataset_fn, devices, options)

    def _needs_replica_patches(self) -> bool:
        """Return whether replicas get tensors of their own: several replicas, or one on another device."""
        devices = self._compute_devices
        return len(devices) > 1 or any(d.torch_device != self._central_device for d in devices)

    @property
    def _central_device(self) -> torch.device:
        """The torch device that holds central parameters and buffers."""
        return self._variable_device.torch_device

    def _adopt_parameter(
        self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
    ) -> ManagedParameter | None:
        return module_members.adopt_parameter(self, name, parameter, self._central_device)

    def _adopt_buffer(
        self, module: torch.nn.Module, name: str, buffer: torch.Tensor
    ) -> ManagedBuffer | None:
        return module_members.adopt_buffer(self, buffer, self._central_device)

    def _step_optimizer(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        return step()


def _merge(group: ReplicaGroup, results: list[Any], rows: Sequence[int] | None) -> Any:
    """Merge results; those of a replica without rows contribute nothing to a later reduce.

    Such a replica may return None where others return a structure. Other results of it are kept, with
    row counts: the mean loss over no rows is NaN and must not spread.
    """
    weights = group.row_weights
    if 0.0 not in weights or rows is None:
        return values.merge(results)
    if any(r is None and w == 0 for r, w in zip(results, weights, strict=True)):
        present = next((r for r, w in zip(results, weights, strict=True) if w > 0), None)
        nothing = values.map_leaves(lambda _: None, present)
        results = [
            nothing if result is None and weight == 0 else result
            for result, weight in zip(results, weights, strict=True)
        ]

    def marked(leaf: Any) -> Any:
        if isinstance(leaf, values.PerReplica) and leaf.rows is None:
            return values.PerReplica(leaf.values, rows=rows)
        return leaf

    return values.map_leaves(marked, values.merge(results))


def _compat(module: str) -> Any:
    """Return a module of `compat`, a higher layer: it implements attributes of the strategy object."""
    return importlib.import_module(f"stratagem.compat.{module}")
