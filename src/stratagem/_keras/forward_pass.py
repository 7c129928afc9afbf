"""The state of one split call: values that replicas write, and the losses that their layers add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem._core.context import Replica

KEY = "keras forward pass"
"""The key of the pass in ``ReplicaGroup.shared``."""


class _Assigned(torch.autograd.Function):
    """The value that a layer assigned to a trained variable; its gradient goes to the variable."""

    @staticmethod
    def forward(_: Any, _variable: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ForwardPass:
    """One call of a layer on several replicas.

    Replicas share the central tensors of variables on their device; on another device they get a differentiable copy. A value
    that a layer assigns is the replica's own until the pass ends. Then the values of all replicas become one, as the
    variable's ``aggregation`` says.
    """

    def __init__(self, central_device: torch.device, sizes: Sequence[int]) -> None:
        self._device = central_device
        total = sum(sizes)
        self._weights = [size / total for size in sizes]
        self._copies: list[dict[int, Tensor]] = [{} for _ in sizes]
        self._written: list[dict[int, Tensor]] = [{} for _ in sizes]
        self._variables: dict[int, Any] = {}
        self._losses: list[dict[int, list[Tensor]]] = [{} for _ in sizes]
        self._layers: dict[int, Any] = {}

    @property
    def weights(self) -> list[float]:
        """Each replica's share of the rows."""
        return self._weights

    def read(self, replica: Replica, variable: Any, central: Tensor) -> Tensor:
        """Return the value of a variable for a replica."""
        written = self._written[replica.id].get(id(variable))
        if written is None:
            return self.central_value(replica, central)
        if not central.requires_grad:
            return written
        # As on one device: the layer computes with the new value, and its gradient is the variable's.
        result: Tensor = _Assigned.apply(self.central_value(replica, central), written)  # type: ignore[no-untyped-call]
        return result

    def central_value(self, replica: Replica, central: Tensor) -> Tensor:
        """Return a central tensor for a replica: itself, or a differentiable copy on the replica's device."""
        if central.device == replica.device:
            return central
        copies = self._copies[replica.id]
        if id(central) not in copies:
            copies[id(central)] = central.to(replica.device)
        return copies[id(central)]

    def write(self, replica: Replica, variable: Any, value: Tensor) -> None:
        """Note the value that a replica assigns."""
        self._variables[id(variable)] = variable
        self._written[replica.id][id(variable)] = value.detach()

    def add_losses(self, replica_id: int, layer: Any, losses: Sequence[Tensor]) -> None:
        """Note losses that a layer adds in a replica."""
        self._layers[id(layer)] = layer
        self._losses[replica_id].setdefault(id(layer), []).extend(losses)

    def finish(self) -> None:
        """Bring the written values to the central variables, and the losses to the layers."""
        for key, variable in self._variables.items():
            self._assign(key, variable)
        for key, layer in self._layers.items():
            added = [losses.get(key, []) for losses in self._losses]
            if len({len(losses) for losses in added}) > 1:
                raise ValueError(
                    f"layer {layer.name!r} called add_loss() {[len(each) for each in added]} times in the replicas: "
                    "every replica must add the same losses."
                )
            for parts in zip(*added, strict=True):
                # Each replica's loss is a mean over its rows, as those of activity regularizers are.
                weighted = [
                    part.to(self._device) * weight
                    for part, weight in zip(parts, self._weights, strict=True)
                ]
                layer._losses.append(torch.stack(weighted).sum(0))

    def _assign(self, key: int, variable: Any) -> None:
        central = variable.value
        found = [written.get(key) for written in self._written]
        values = [central if value is None else value.to(self._device) for value in found]
        how = variable.aggregation
        if how == "only_first_replica":
            merged = values[0]
        elif how == "mean":
            merged = torch.stack(
                [value * weight for value, weight in zip(values, self._weights, strict=True)]
            ).sum(0)
        elif how == "sum":
            merged = central + torch.stack([value - central for value in values]).sum(0)
        else:
            merged = values[0]
            if not all(torch.allclose(value, merged, rtol=1e-5, atol=1e-7) for value in values):
                raise ValueError(
                    f"replicas assigned different values to {variable.path!r}, which has aggregation={how!r}: the strategy "
                    "does not know how to make them one. Create the weight with aggregation='mean' (a moving "
                    "average), 'sum' (a count or total) or 'only_first_replica': "
                    "self.add_weight(..., aggregation='mean')."
                )
        with torch.no_grad():
            variable.assign(merged.detach())
