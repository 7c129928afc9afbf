"""Context objects that users' functions receive: `ReplicaContext`, `ValueContext`, `InputContext`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from stratagem._core.context import current_replica, default_strategy, entered, require_replica
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches.compiling import eagerly


class ReplicaContext:
    """One replica's view of the run it takes part in; returned by `get_replica_context`.

    Example:
        >>> import torch, stratagem as sg
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step():
        ...     context = sg.get_replica_context()
        ...     return context.all_reduce(
        ...         "sum", torch.tensor(1.0) + context.replica_id_in_sync_group
        ...     )
        >>> strategy.reduce("mean", strategy.run(step), axis=None)
        tensor(3.)
        >>> strategy.close()
    """

    __slots__ = ("__weakref__", "_id", "_strategy", "_tensor")

    def __init__(
        self, strategy: StrategyHooks, replica_id_in_sync_group: int | torch.Tensor | None
    ) -> None:
        given: Any = replica_id_in_sync_group
        if given is not None and (
            isinstance(given, bool) or not isinstance(given, int | torch.Tensor)
        ):
            raise ValueError(
                f"replica_id_in_sync_group={given!r} is not a replica's number: expected an int, "
                "an integer tensor or None."
            )
        self._strategy = strategy
        self._id: int | torch.Tensor | None = given
        self._tensor: torch.Tensor | None = None

    @property
    def strategy(self) -> Any:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
        return int(self._strategy.num_replicas_in_sync)

    @property
    def replica_id_in_sync_group(self) -> int | torch.Tensor | None:
        """Number of this replica: an int32 scalar tensor (the plain int 0 in the default context)."""
        if self._strategy._is_default or self._id is None or isinstance(self._id, torch.Tensor):
            return self._id
        if self._tensor is None:
            self._tensor = torch.tensor(self._id, dtype=torch.int32, device="cpu")
        return self._tensor

    @property
    def devices(self) -> Any:
        """Device of this replica, in the form that tf.distribute returns (deprecated there)."""
        require_replica(self, "ReplicaContext.devices")
        return self._strategy._replica_devices(self._number())

    def _number(self) -> int:
        return 0 if self._id is None else int(self._id)

    @eagerly
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for all replicas, run ``merge_fn(strategy, *args, **kwargs)`` once, return its result.

        ``merge_fn`` runs in cross-replica context. The replicas' arguments are merged as ``run`` merges
        results. If ``merge_fn`` returns a distributed value, each replica gets its own component.

        Example:
            >>> import stratagem as sg
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def together(strategy, value):
            ...     return sum(strategy.local_results(value))
            >>> def step():
            ...     context = sg.get_replica_context()
            ...     return context.merge_call(
            ...         together, args=(float(context.replica_id_in_sync_group),)
            ...     )
            >>> strategy.run(step)
            1.0
            >>> strategy.close()
        """
        require_replica(self, "ReplicaContext.merge_call")
        if not callable(merge_fn):
            raise TypeError(f"merge_call needs a function, got {merge_fn!r}.")
        replica = current_replica()
        if replica is None:
            with entered(self._strategy, None):
                return merge_fn(self._strategy, *args, **(kwargs or {}))
        from stratagem._core import replicas

        return replicas.merge_call(replica, merge_fn, tuple(args), dict(kwargs or {}))

    @eagerly
    def all_reduce(self, reduce_op: Any, value: Any, options: object = None) -> Any:
        """Return the sum or mean of ``value`` over all replicas, on every replica; differentiable.

        Args:
            reduce_op: `ReduceOp` or its name in any letter case.
            value: a tensor, or a nest of tensors.
            options: accepted for tf.distribute's signature and ignored.
        """
        require_replica(self, "ReplicaContext.all_reduce")
        from stratagem._core import collectives

        return collectives.all_reduce(current_replica(), reduce_op, value)

    @eagerly
    def all_gather(self, value: Any, axis: int, options: object = None) -> Any:
        """Join the replicas' tensors along ``axis`` in replica order, on every replica; differentiable.

        Args:
            value: a tensor of rank ≥ 1, or a nest of them; sizes may differ along ``axis`` only.
            axis: the dimension to join along.
            options: accepted for tf.distribute's signature and ignored.
        """
        require_replica(self, "ReplicaContext.all_gather")
        from stratagem._core import collectives

        return collectives.all_gather(current_replica(), value, axis)

    @override
    def __repr__(self) -> str:
        return f"<ReplicaContext {self._number()} of {self.num_replicas_in_sync}>"


@functools.cache
def default_context() -> ReplicaContext:
    """Return the context of code outside any scope."""
    return ReplicaContext(default_strategy(), 0)


@dataclass(frozen=True, slots=True, repr=False)
class ValueContext:
    """Argument of a value function of ``distribute_values_from_function``.

    Example:
        >>> import stratagem as sg
        >>> sg.ValueContext(1, 2).replica_id_in_sync_group
        1
    """

    replica_id_in_sync_group: int = 0
    """The replica the value is for."""
    num_replicas_in_sync: int = 1
    """Number of replicas."""

    @override
    def __repr__(self) -> str:
        return f"ValueContext({self.replica_id_in_sync_group}, {self.num_replicas_in_sync})"


@dataclass(frozen=True, slots=True, repr=False)
class InputContext:
    """Argument of a dataset function of ``distribute_datasets_from_function``.

    Example:
        >>> import stratagem as sg
        >>> sg.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(64)
        16
    """

    num_input_pipelines: int = 1
    """Number of input pipelines."""
    input_pipeline_id: int = 0
    """Number of this pipeline, from 0."""
    num_replicas_in_sync: int = 1
    """Number of replicas."""

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the global batch size divided by the number of replicas; raise if it is not divisible."""
        size = self.num_replicas_in_sync
        if global_batch_size % size != 0:
            raise ValueError(
                f"global_batch_size={global_batch_size!r} does not divide evenly by the {size} replicas in sync. "
                f"Choose a multiple of {size}."
            )
        return global_batch_size // size

    @override
    def __repr__(self) -> str:
        return (
            f"InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total {self.num_input_pipelines}, replicas in sync {self.num_replicas_in_sync})"
        )
