"""Storage of variables: one tensor, one central tensor written by several replicas, or one copy per replica.

The tables of the specification's section 4 are implemented here. Strategies create storages, `Variable` uses them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from typing_extensions import override

from stratagem._core import context, reduction, values
from stratagem._core.devices import Device
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches.private_api import version
from stratagem._core.variable_writes import (
    aggregated,
    fitting,
    needs_aggregation,
    own_replica,
    write_together,
)
from stratagem._core.variables import (
    Scatter,
    Variable,
    VariableAggregation,
    VariableRequest,
    VariableSynchronization,
    Write,
)

_SCATTER: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda t, ids, rows: t.index_add_(0, ids, rows),
    "sub": lambda t, ids, rows: t.index_add_(0, ids, rows, alpha=-1),
    "mul": lambda t, ids, rows: t.scatter_reduce_(0, _per_element(ids, rows), rows, "prod"),
    "min": lambda t, ids, rows: t.scatter_reduce_(0, _per_element(ids, rows), rows, "amin"),
    "max": lambda t, ids, rows: t.scatter_reduce_(0, _per_element(ids, rows), rows, "amax"),
}


def _per_element(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return ids.reshape(-1, *[1] * (rows.ndim - 1)).expand_as(rows)


class VariableStorage(ABC):
    """Storage of one variable's value; `variable_storage` has those of one machine."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The variable's shape."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The variable's type."""

    @property
    @abstractmethod
    def device(self) -> str:
        """Canonical name of the device that holds the caller's value."""

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Return the value in the caller's context; the same tensor object where possible."""

    @abstractmethod
    def write(self, variable: Variable, how: Write, value: Any) -> torch.Tensor:
        """Assign, add or subtract in the caller's context; return the value afterwards."""

    @abstractmethod
    def scatter(self, variable: Variable, how: Scatter, ids: Any, rows: Any) -> torch.Tensor:
        """Combine rows into the variable; return the value afterwards."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows of the value; a remote storage sends only these."""
        return self.read()[ids]

    def components(self, variable: Variable) -> tuple[Variable, ...]:
        """Return the variables behind this one: itself, one for the central copy, or one per replica."""
        return (variable,)

    def copy_for(self, request: VariableRequest) -> VariableStorage:
        """Return a new storage for a deep copy of the variable."""
        raise NotImplementedError(f"a variable in {self!r} cannot be copied.")


@final
class SingleStorage(VariableStorage):
    """One tensor on one device: an ordinary variable."""

    __slots__ = ("_copied", "_device", "_leaves", "_tensor")

    def __init__(self, tensor: torch.Tensor, device: Device, *, tracks: bool) -> None:
        # A normal tensor, also when created under inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            own = tensor.to(device.torch_device, copy=True)
        self._tensor = own.requires_grad_(tracks and own.is_floating_point())
        self._device = device
        self._leaves: dict[int, torch.Tensor] = {}  # by replica, see read_from
        self._copied: dict[int, int] = {}  # version of the tensor that a leaf elsewhere holds

    @property
    @override
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    @override
    def device(self) -> str:
        return self._device.name

    @override
    def read(self) -> torch.Tensor:
        return self._tensor

    def read_from(self, replica: context.Replica) -> torch.Tensor:
        """Return one of several replicas' view: the same memory with a gradient of its own."""
        tensor = self._tensor
        if replica.device == tensor.device and not tensor.requires_grad:
            return tensor
        leaf = self._leaves.get(replica.id)
        if replica.device == tensor.device:
            if leaf is None:
                leaf = self._leaves[replica.id] = tensor.detach().requires_grad_()
            return leaf
        if leaf is None or leaf.device != replica.device:
            leaf = torch.empty_like(tensor, device=replica.device)
            self._leaves[replica.id] = leaf.requires_grad_(tensor.requires_grad)
            self._copied.pop(replica.id, None)
        # Only if it changed: copying would invalidate what autograd saved of the leaf.
        if self._copied.get(replica.id) != version(tensor):
            with torch.no_grad():
                leaf.copy_(tensor)
            self._copied[replica.id] = version(tensor)
        return leaf

    @override
    def write(self, variable: Variable, how: Write, value: Any) -> torch.Tensor:
        self.put(how, fitting(variable, how, value))
        return self._tensor.detach().clone()

    def put(self, how: Write, value: torch.Tensor) -> None:
        """Write a value of the right type and shape, in any context."""
        with torch.no_grad():
            if how == "assign":
                self._tensor.copy_(value)
            elif how == "assign_add":
                self._tensor.add_(value.to(self._tensor.device))
            else:
                self._tensor.sub_(value.to(self._tensor.device))

    @override
    def scatter(self, variable: Variable, how: Scatter, ids: Any, rows: Any) -> torch.Tensor:
        tensor = self._tensor
        ids, rows = ids.to(tensor.device), rows.detach().to(tensor.device)
        with torch.no_grad():
            if how == "update":
                # The last value of a repeated row is kept, in any order in which torch copies.
                last = {int(row): i for i, row in enumerate(ids.tolist())}
                tensor[list(last)] = rows[list(last.values())]
            elif how == "div":
                for row, divisor in zip(ids.tolist(), rows, strict=True):
                    tensor[row] = (tensor[row] / divisor).to(tensor.dtype)
            else:
                _SCATTER[how](tensor, ids, rows)
        return tensor.detach().clone()

    @override
    def copy_for(self, request: VariableRequest) -> SingleStorage:
        tensor = request.initial_tensor()
        return SingleStorage(tensor, self._device, tracks=self._tensor.requires_grad)

    @override
    def __repr__(self) -> str:
        return f"<SingleStorage on {self._device}>"


class _ReplicaStorage(VariableStorage):
    """Base of storages that several replicas write: one tensor for all, or one per replica."""

    __slots__ = ("_parts", "_request", "_singles", "_strategy")

    def __init__(
        self, singles: Sequence[SingleStorage], request: VariableRequest, strategy: StrategyHooks
    ) -> None:
        self._singles = tuple(singles)
        self._request = request
        self._strategy = strategy
        self._parts = tuple(
            Variable.at(single, _named(request, i), strategy) for i, single in enumerate(singles)
        )

    @property
    @override
    def shape(self) -> torch.Size:
        return self._singles[0].shape

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._singles[0].dtype

    @property
    @override
    def device(self) -> str:
        return self._here().device

    def _here(self) -> SingleStorage:
        """Return the tensor of this replica, or the first one."""
        replica = context.current_replica()
        own = replica is not None and replica.strategy is self._strategy
        return self._singles[replica.id if own and replica and len(self._singles) > 1 else 0]

    @override
    def components(self, variable: Variable) -> tuple[Variable, ...]:
        return self._parts

    @override
    def copy_for(self, request: VariableRequest) -> VariableStorage:
        singles = [
            single.copy_for(replace(request, initial_value=part.read_value))
            for part, single in zip(self._parts, self._singles, strict=True)
        ]
        return type(self)(singles, request, self._strategy)

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {[single.device for single in self._singles]}>"


@final
class CentralStorage(_ReplicaStorage):
    """One tensor that several replicas write: their writes are aggregated (central storage, R > 1)."""

    __slots__ = ()

    @override
    def read(self) -> torch.Tensor:
        replica = context.current_replica()
        if replica is None or replica.strategy is not self._strategy:
            return self._singles[0].read()
        return self._singles[0].read_from(replica)

    @override
    def write(self, variable: Variable, how: Write, value: Any) -> torch.Tensor:
        replica = own_replica(variable, self._strategy)
        if replica is None or context.update_device() is not None:
            if isinstance(value, values.DistributedValues):
                value = value.component(0)
            return self._singles[0].write(variable, how, value)
        if variable.aggregation is VariableAggregation.NONE:
            raise needs_aggregation(variable, how)

        def apply(brought: list[Any]) -> list[torch.Tensor]:
            total = aggregated(variable, brought)
            return [self._singles[0].write(variable, how, total)] * len(brought)

        return write_together(replica, variable, how, value, apply)

    @override
    def scatter(self, variable: Variable, how: Scatter, ids: Any, rows: Any) -> torch.Tensor:
        replica = own_replica(variable, self._strategy)
        if replica is None:
            return self._singles[0].scatter(variable, how, ids, rows)

        def apply(brought: list[Any]) -> list[torch.Tensor]:
            # Not aggregated: one replica's update after the other (VAR-13).
            for each in brought:
                if each is not None:
                    result = self._singles[0].scatter(variable, how, *each)
            return [result] * len(brought)

        return write_together(replica, variable, f"scatter_{how}", (ids, rows), apply)


@final
class MirroredStorage(_ReplicaStorage):
    """One copy per replica: equal after every write, or combined when read (mirrored)."""

    __slots__ = ()

    @property
    def _on_read(self) -> bool:
        return self._request.synchronization is VariableSynchronization.ON_READ

    @override
    def read(self) -> torch.Tensor:
        replica = context.current_replica()
        if replica is not None or not self._on_read or context.update_device() is not None:
            return self._here().read()
        aggregation = self._parts[0].aggregation
        if aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"variable {self._parts[0].name!r} has a value per replica and aggregation NONE, "
                "so no value outside a replica. Create it with aggregation SUM, MEAN or "
                "ONLY_FIRST_REPLICA, or read it inside a replica."
            )
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self._singles[0].read()
        parts = [single.read().detach() for single in self._singles]
        return reduction.combine(aggregation.as_reduce_op(), parts, parts[0].device)

    @override
    def write(self, variable: Variable, how: Write, value: Any) -> torch.Tensor:
        replica = own_replica(variable, self._strategy)
        if replica is None:
            return self._write_from_outside(variable, how, value)
        alone = self._on_read or variable.aggregation is VariableAggregation.NONE
        if alone or context.update_device() is not None:
            return self._singles[replica.id].write(variable, how, value)

        def apply(brought: list[Any]) -> list[torch.Tensor]:
            total = aggregated(variable, brought)
            return [single.write(variable, how, total) for single in self._singles]

        return write_together(replica, variable, how, value, apply)

    def _write_from_outside(self, variable: Variable, how: Write, value: Any) -> torch.Tensor:
        summed = self._on_read and variable.aggregation is VariableAggregation.SUM
        if summed and how != "assign":
            raise ValueError(
                f"{how} of variable {variable.name!r} outside a replica: it is summed when read, "
                "so it is unclear which copy to change. Use assign, or write inside a replica."
            )
        for i, single in enumerate(self._singles):
            each = value.component(i) if isinstance(value, values.DistributedValues) else value
            fit = fitting(variable, how, each)
            if summed:
                fit = (fit / len(self._singles)).to(fit.dtype)
            single.put(how, fit)
        if self._on_read and variable.aggregation is VariableAggregation.NONE:
            return self._here().read()
        return self.read().detach().clone()

    @override
    def scatter(self, variable: Variable, how: Scatter, ids: Any, rows: Any) -> torch.Tensor:
        if self._on_read:
            raise NotImplementedError(
                f"scatter_{how} of variable {variable.name!r}, which is synchronized on read, is "
                "not supported. Use assign, or synchronization ON_WRITE."
            )
        replica = own_replica(variable, self._strategy)
        if replica is None:
            results = [single.scatter(variable, how, ids, rows) for single in self._singles]
            return results[0]
        if variable.aggregation is VariableAggregation.NONE:
            return self._singles[replica.id].scatter(variable, how, ids, rows)
        only_first = variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
        if how in ("min", "max", "update") and not only_first:
            raise NotImplementedError(
                f"scatter_{how} of mirrored variable {variable.name!r} with aggregation "
                f"{variable.aggregation.name} is not supported: rows cannot be combined that way. "
                "Use aggregation ONLY_FIRST_REPLICA."
            )

        def apply(brought: list[Any]) -> list[torch.Tensor]:
            present = [each for each in brought if each is not None]
            present = present[:1] if only_first else present
            share = len(present) if variable.aggregation is VariableAggregation.MEAN else 1
            all_ids = torch.cat([each[0].cpu() for each in present])
            all_rows = torch.cat([each[1].cpu() for each in present]) / share
            all_rows = all_rows.to(self.dtype)
            return [single.scatter(variable, how, all_ids, all_rows) for single in self._singles]

        return write_together(replica, variable, f"scatter_{how}", (ids, rows), apply)


# ------------------------------------------------------------------ creating variables


def mirrored(
    request: VariableRequest, devices: Sequence[Device], strategy: StrategyHooks
) -> Variable:
    """Create a variable with one copy per device (the table of spec section 4)."""
    if request.synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"variable {request.name!r}: synchronization NONE makes no sense for copies on several "
            "devices. Use AUTO, ON_WRITE or ON_READ."
        )
    tensor = request.initial_tensor()
    if request.aggregation is VariableAggregation.MEAN and not (
        tensor.is_floating_point() or tensor.is_complex()
    ):
        raise ValueError(
            f"variable {request.name!r} of {tensor.dtype}: aggregation MEAN needs a floating point "
            "type. Use a float dtype, or SUM."
        )
    if request.synchronization is not VariableSynchronization.ON_READ:
        request = replace(request, synchronization=VariableSynchronization.ON_WRITE)
    tracks = request.tracks_gradient()
    singles = [SingleStorage(tensor, device, tracks=tracks) for device in devices]
    return Variable.at(MirroredStorage(singles, request, strategy), request, strategy)


def central(
    request: VariableRequest, device: Device, strategy: StrategyHooks, *, shared: bool
) -> Variable:
    """Create a variable with one tensor; ``shared`` if several replicas write it."""
    single = SingleStorage(request.initial_tensor(), device, tracks=request.tracks_gradient())
    storage: VariableStorage = CentralStorage([single], request, strategy) if shared else single
    return Variable.at(storage, request, strategy)


def _named(request: VariableRequest, number: int) -> VariableRequest:
    return request if number == 0 else replace(request, name=f"{request.name}/replica_{number}")
