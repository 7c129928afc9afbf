"""Where variables live on one machine: in one place, around a central copy, or on every replica.

`Single` is an ordinary variable; `Central` is one seen from several replicas, whose writes meet and are
aggregated; `Copies` has one component per replica, kept equal on write or put together on read. The
tables of the specification's section 4 are this module. Made by strategies, used by `Variable`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from typing_extensions import override

from stratagem._core import context, reduction, values
from stratagem._core.devices import Device
from stratagem._core.variables import (
    Scatter,
    Variable,
    VariableAggregation,
    VariableRequest,
    VariableStorage,
    VariableSynchronization,
    Write,
)
from stratagem.errors import StrategyMismatch

_SCATTER: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda t, ids, rows: t.index_add_(0, ids, rows),
    "sub": lambda t, ids, rows: t.index_add_(0, ids, rows, alpha=-1),
    "mul": lambda t, ids, rows: t.scatter_reduce_(0, _per_element(ids, rows), rows, "prod"),
    "min": lambda t, ids, rows: t.scatter_reduce_(0, _per_element(ids, rows), rows, "amin"),
    "max": lambda t, ids, rows: t.scatter_reduce_(0, _per_element(ids, rows), rows, "amax"),
}


def _per_element(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return ids.reshape(-1, *[1] * (rows.ndim - 1)).expand_as(rows)


@final
class SingleStorage(VariableStorage):
    """One tensor on one device: an ordinary variable."""

    __slots__ = ("_copied", "_device", "_leaves", "_tensor")

    def __init__(self, tensor: torch.Tensor, device: Device, *, tracks: bool) -> None:
        # A tensor of its own, also when made under inference_mode, which it will outlive.
        with torch.inference_mode(False), torch.no_grad():
            managed = tensor.to(device.torch_device, copy=True)
        self._tensor = managed.requires_grad_(tracks and managed.is_floating_point())
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
        """What one of several replicas sees: the same memory, but a gradient of its own."""
        managed = self._tensor
        if replica.device == managed.device and not managed.requires_grad:
            return managed
        leaf = self._leaves.get(replica.id)
        if replica.device == managed.device:
            if leaf is None:
                leaf = self._leaves[replica.id] = managed.detach().requires_grad_()
            return leaf
        if leaf is None or leaf.device != replica.device:
            leaf = torch.empty_like(managed, device=replica.device)
            self._leaves[replica.id] = leaf.requires_grad_(managed.requires_grad)
            self._copied.pop(replica.id, None)
        # Only when it moved on: copying again would invalidate what autograd saved of the leaf.
        if self._copied.get(replica.id) != managed._version:
            with torch.no_grad():
                leaf.copy_(managed)
            self._copied[replica.id] = managed._version
        return leaf

    @override
    def write(self, variable: Variable, how: Write, value: Any) -> torch.Tensor:
        self.put(how, fitting(variable, how, value))
        return self._tensor.detach().clone()

    def put(self, how: Write, value: torch.Tensor) -> None:
        """Write a value that fits, whatever the context."""
        with torch.no_grad():
            if how == "assign":
                self._tensor.copy_(value)
            elif how == "assign_add":
                self._tensor.add_(value.to(self._tensor.device))
            else:
                self._tensor.sub_(value.to(self._tensor.device))

    @override
    def scatter(self, variable: Variable, how: Scatter, ids: Any, rows: Any) -> torch.Tensor:
        managed = self._tensor
        ids, rows = ids.to(managed.device), rows.detach().to(managed.device)
        with torch.no_grad():
            if how == "update":
                # Of a row named twice the last one stays, whatever order torch copies in.
                last = {int(row): i for i, row in enumerate(ids.tolist())}
                managed[list(last)] = rows[list(last.values())]
            elif how == "div":
                for row, divisor in zip(ids.tolist(), rows, strict=True):
                    managed[row] = (managed[row] / divisor).to(managed.dtype)
            else:
                _SCATTER[how](managed, ids, rows)
        return managed.detach().clone()

    @override
    def copy_for(self, request: VariableRequest) -> VariableStorage:
        return SingleStorage(
            request.initial_tensor(), self._device, tracks=self._tensor.requires_grad
        )

    @override
    def __repr__(self) -> str:
        return f"<Single on {self._device}>"


@final
class CentralStorage(VariableStorage):
    """One copy, written by several replicas: their writes meet and are aggregated (CSS, R > 1)."""

    __slots__ = ("_inner", "_single", "_strategy")

    def __init__(self, single: SingleStorage, request: VariableRequest, strategy: Any) -> None:
        self._single = single
        self._strategy = strategy
        self._inner = Variable.at(single, request, strategy)

    @property
    @override
    def shape(self) -> torch.Size:
        return self._single.shape

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._single.dtype

    @property
    @override
    def device(self) -> str:
        return self._single.device

    @override
    def components(self, variable: Variable) -> tuple[Variable, ...]:
        return (self._inner,)

    @override
    def read(self) -> torch.Tensor:
        replica = context.current_replica()
        if replica is None or replica.strategy is not self._strategy:
            return self._single.read()
        return self._single.read_from(replica)

    @override
    def write(self, variable: Variable, how: Write, value: Any) -> torch.Tensor:
        replica = own_replica(variable, self._strategy)
        if replica is None or context.update_device() is not None:
            if isinstance(value, values.DistributedValues):
                value = value.component(0)
            return self._single.write(variable, how, value)
        if variable.aggregation is VariableAggregation.NONE:
            raise needs_aggregation(variable, how)

        def apply(brought: list[Any]) -> list[torch.Tensor]:
            total = aggregated(variable, brought)
            return [self._single.write(variable, how, total)] * len(brought)

        return meet_to_write(replica, variable, how, value, apply)

    @override
    def scatter(self, variable: Variable, how: Scatter, ids: Any, rows: Any) -> torch.Tensor:
        replica = own_replica(variable, self._strategy)
        if replica is None:
            return self._single.scatter(variable, how, ids, rows)

        def apply(brought: list[Any]) -> list[torch.Tensor]:
            # Not aggregated: each replica's update in turn (VAR-13).
            for each in brought:
                if each is not None:
                    result = self._single.scatter(variable, how, *each)
            return [result] * len(brought)

        return meet_to_write(replica, variable, f"scatter_{how}", (ids, rows), apply)

    @override
    def copy_for(self, request: VariableRequest) -> VariableStorage:
        single = self._single.copy_for(request)
        assert isinstance(single, SingleStorage)
        return CentralStorage(single, request, self._strategy)

    @override
    def __repr__(self) -> str:
        return f"<Central on {self._single.device}>"


@final
class MirroredStorage(VariableStorage):
    """One component per replica: equal after every write, or put together on read (mirrored)."""

    __slots__ = ("_on_read", "_parts", "_singles", "_strategy")

    def __init__(
        self,
        singles: Sequence[SingleStorage],
        request: VariableRequest,
        strategy: Any,
        *,
        on_read: bool,
    ) -> None:
        self._singles = tuple(singles)
        self._strategy = strategy
        self._on_read = on_read
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
        replica = context.current_replica()
        if replica is not None and replica.strategy is self._strategy:
            return self._singles[replica.id]
        return self._singles[0]

    @override
    def components(self, variable: Variable) -> tuple[Variable, ...]:
        return self._parts

    @override
    def read(self) -> torch.Tensor:
        replica = context.current_replica()
        if replica is not None or not self._on_read or context.update_device() is not None:
            return self._here().read()
        aggregation = self._parts[0].aggregation
        if aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"variable {self._parts[0].name!r} has a value per replica and aggregation NONE, "
                "so no value outside a replica. Make it with aggregation SUM, MEAN or "
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

        return meet_to_write(replica, variable, how, value, apply)

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
        return self.read().detach().clone() if self._readable(variable) else self._here().read()

    def _readable(self, variable: Variable) -> bool:
        return not (self._on_read and variable.aggregation is VariableAggregation.NONE)

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

        return meet_to_write(replica, variable, f"scatter_{how}", (ids, rows), apply)

    @override
    def copy_for(self, request: VariableRequest) -> VariableStorage:
        singles = []
        for part, single in zip(self._parts, self._singles, strict=True):
            copy = single.copy_for(replace(request, initial_value=part.read_value))
            assert isinstance(copy, SingleStorage)
            singles.append(copy)
        return MirroredStorage(singles, request, self._strategy, on_read=self._on_read)

    @override
    def __repr__(self) -> str:
        kind = "on read" if self._on_read else "on write"
        return f"<Copies on {len(self._singles)} devices, synchronized {kind}>"


# ------------------------------------------------------------------ making places


def mirrored(request: VariableRequest, devices: Sequence[Device], strategy: Any) -> Variable:
    """A variable with one copy per device (the table of spec section 4)."""
    if request.synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"variable {request.name!r}: synchronization NONE makes no sense for copies on several "
            "devices. Use AUTO, ON_WRITE or ON_READ."
        )
    tensor = request.initial_tensor()
    on_read = request.synchronization is VariableSynchronization.ON_READ
    if request.aggregation is VariableAggregation.MEAN and not (
        tensor.is_floating_point() or tensor.is_complex()
    ):
        raise ValueError(
            f"variable {request.name!r} of {tensor.dtype}: aggregation MEAN needs a floating point "
            "type. Use a float dtype, or SUM."
        )
    if not on_read:
        request = replace(request, synchronization=VariableSynchronization.ON_WRITE)
    tracks = request.tracks_gradient()
    singles = [SingleStorage(tensor, device, tracks=tracks) for device in devices]
    return Variable.at(
        MirroredStorage(singles, request, strategy, on_read=on_read), request, strategy
    )


def central(request: VariableRequest, device: Device, strategy: Any, *, shared: bool) -> Variable:
    """A variable in one place; ``shared`` if several replicas write it."""
    single = SingleStorage(request.initial_tensor(), device, tracks=request.tracks_gradient())
    place: VariableStorage = CentralStorage(single, request, strategy) if shared else single
    return Variable.at(place, request, strategy)


def _named(request: VariableRequest, number: int) -> VariableRequest:
    return request if number == 0 else replace(request, name=f"{request.name}/replica_{number}")


# ------------------------------------------------------------------ writing together


def own_replica(variable: Variable, strategy: Any) -> context.Replica | None:
    """The replica that writes; None outside. Refuses a write under another strategy (VAR-14)."""
    current = context.get_strategy() if context.has_strategy() else None
    if current is not None and current is not strategy:
        raise StrategyMismatch(
            f"mixing different strategy objects: variable {variable.name!r} belongs to "
            f"{strategy!r} and cannot be written under {context.describe_context()}."
        )
    return context.current_replica()


def meet_to_write(
    replica: context.Replica,
    variable: Variable,
    how: str,
    value: Any,
    apply: Callable[[list[Any]], list[torch.Tensor]],
) -> torch.Tensor:
    """Replicas bring their values; ``apply`` writes once and returns one result per replica."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
    label = f"{how} of variable {variable.name!r}"
    # Wrapped, since None means a replica that has left.
    result: torch.Tensor = replica.group.meet(
        replica.id,
        label,
        _Brought(value),
        lambda all_: apply([each and each.value for each in all_]),
    )
    return result


class _Brought:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def aggregated(variable: Variable, brought: list[Any]) -> Any:
    """The replicas' values made one, as the variable's aggregation says (VAR-11)."""
    present = [each for each in brought if each is not None]
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return present[0]
    op = variable.aggregation.as_reduce_op()
    merged = values.merge(present) if len(present) > 1 else values.PerReplica(present)
    return reduction.reduce(op, merged, None, size=len(brought), nests=False)


def needs_aggregation(variable: Variable, how: str) -> ValueError:
    """The error of a write in a replica when nobody said how values are combined."""
    return ValueError(
        f"{how} of variable {variable.name!r} in a replica needs to know how the replicas' values "
        "become one: make it with aggregation SUM, MEAN or ONLY_FIRST_REPLICA, such as "
        "sg.Variable(..., aggregation=sg.VariableAggregation.SUM)."
    )


def fitting(variable: Variable, how: str, value: Any) -> torch.Tensor:
    """The value as a tensor of the variable's type and shape.

    Raises:
        ValueError: another shape, or a type that would change the value.
    """
    if isinstance(value, values.PerReplica) and context.current_replica() is None:
        raise AttributeError(
            f"{how} of variable {variable.name!r} got a PerReplica outside a replica: it has no "
            "single value. Use strategy.reduce(...) first."
        )
    tensor = values.convert_to_tensor(value).detach()
    if tensor.dtype != variable.dtype:
        plain = not isinstance(value, torch.Tensor | values.Convertible)
        lossless = not (tensor.is_floating_point() or tensor.is_complex()) or (
            tensor.is_floating_point()
            and (variable.dtype.is_floating_point or variable.dtype.is_complex)
        )
        if not (plain and lossless):
            raise ValueError(
                f"{how} of variable {variable.name!r} got {tensor.dtype}: expected "
                f"{variable.dtype}. Convert it with .to({variable.dtype})."
            )
        tensor = tensor.to(variable.dtype)
    if tensor.shape != variable.shape:
        raise ValueError(
            f"{how} of variable {variable.name!r} got a value of shape {tuple(tensor.shape)}: "
            f"expected {tuple(variable.shape)}."
        )
    return tensor
