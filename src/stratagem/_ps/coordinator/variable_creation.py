"""Create `Variable` s on parameter servers: undivided, in shards, or one per worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.values import convert_to_tensor
from stratagem._core.variables import Variable, VariableRequest
from stratagem._ps.client.remote_storage import ReadCache, RemoteStorage
from stratagem._ps.client.remote_variable import RemoteVariable
from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables
from stratagem._ps.partition import Partitioner, number_of_shards
from stratagem._ps.placement import Description
from stratagem._ps.tables.sharded_variable import ShardedVariable


class PerWorkerVariable:
    """Independent variable per worker; a scheduled function uses its worker's (PSS-13).

    It is neither trained nor synchronised. A replaced worker starts with the initial value.
    """

    def __init__(self, remotes: Sequence[RemoteVariable], request: VariableRequest) -> None:
        self._remotes = tuple(remotes)
        self._request = request

    @property
    def name(self) -> str:
        """Name of the variable."""
        return self._request.name

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self._remotes[0].dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of each worker's variable."""
        return torch.Size(self._remotes[0].shape)

    @property
    def trainable(self) -> bool:
        """Always False."""
        return False

    @property
    def descriptions(self) -> tuple[Description, ...]:
        """Places of the workers' variables."""
        return tuple(remote.description for remote in self._remotes)

    @property
    def request(self) -> VariableRequest:
        """The request; its initial value is a tensor."""
        return self._request

    def read_all(self) -> list[Tensor]:
        """Return every worker's value, in worker order."""
        return [remote.read() for remote in self._remotes]

    @override
    def __repr__(self) -> str:
        return f"<PerWorkerVariable {self.name!r} of {len(self._remotes)} workers>"


def create(
    owner: CoordinatorVariables,
    request: VariableRequest,
    *,
    strategy: StrategyHooks,
    cache: ReadCache,
) -> Variable | ShardedVariable:
    """Create a variable on the servers, divided as the strategy's partitioner says (PRT-1 … PRT-5)."""
    if request.initial_value is None:
        raise ValueError(
            f"variable {request.name!r} has no initial value: expected a tensor, array, number, or a "
            "function that makes one."
        )
    partitioner: Partitioner | None = None if owner.beside is not None else owner.partitioner
    fill: Callable[..., Any] | None = None
    whole: Tensor | None = None
    if callable(request.initial_value) and request.shape is not None and request.dtype is not None:
        fill = request.initial_value
        shape, dtype = request.shape, request.dtype
    else:
        whole = request.initial_tensor()
        shape, dtype = tuple(whole.shape), whole.dtype
    shards = number_of_shards(partitioner, shape, dtype)
    if shards == 1 and whole is None:
        whole = request.initial_tensor()
    description = owner.place_variable(request.name, shape, dtype, shards)
    tracks = request.tracks_gradient()

    def made(part: Description, value: Tensor, asked: VariableRequest) -> Variable:
        remote = owner.new_variable(part)
        remote.put(value)
        place = RemoteStorage(remote, tracks=tracks, strategy=strategy, cache=cache)
        return Variable.at(place, asked, strategy)

    if shards == 1:
        assert whole is not None
        return made(description, whole, request)
    parts = []
    for index, offset in enumerate(description.layout.offsets):
        part = description.part(index)
        if whole is None:
            assert fill is not None
            value, whole = _fill_shard(fill, part, offset, request)
        else:
            value = whole[offset : offset + part.shape[0]]
        parts.append(made(part, value, replace(request, name=part.name, shape=part.shape)))
    return ShardedVariable(parts)


def _fill_shard(
    fill: Callable[..., Any], part: Description, offset: int, request: VariableRequest
) -> tuple[Tensor, Tensor | None]:
    """Return one shard's initial value; and the whole one, if the function makes only that (PRT-4)."""
    offsets = (offset, *[0] * (len(part.shape) - 1))
    try:
        made = convert_to_tensor(fill(partition_shape=part.shape, partition_offset=offsets))
        made = made.detach().to(part.dtype)
    except (TypeError, ValueError):
        made = request.initial_tensor()
    if tuple(made.shape) == part.shape:
        return made, None
    if tuple(made.shape) != request.shape:
        raise ValueError(
            f"the initial value of {request.name!r} has shape {tuple(made.shape)}: expected "
            f"{part.shape} (the shard asked for) or {request.shape} (the whole variable)."
        )
    return made[offset : offset + part.shape[0]], made


def create_per_worker(
    owner: CoordinatorVariables, request: VariableRequest, workers: Sequence[int]
) -> PerWorkerVariable:
    """Create one variable for each worker, given by index, on the servers in turn."""
    value = request.initial_tensor()
    remotes = []
    for worker in workers:
        name = f"{request.name}/worker_{worker}"
        where = owner.place_variable(name, tuple(value.shape), value.dtype, 1)
        remote = owner.new_variable(where)
        remote.put(value)
        remotes.append(remote)
    return PerWorkerVariable(remotes, replace(request, initial_value=value))
