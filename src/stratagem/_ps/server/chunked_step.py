"""Optimizer steps on large shards, one chunk at a time, so that temporary memory stays small.

A step of Adam makes tensors as large as its parameter. On chunks that fit the caches it makes small ones again
and again: a server needs hardly any memory beside parameters and state, and only the first pass goes through main
memory (Adam's arithmetic on 96 MB, one core: 187 ms whole, 63 in chunks). Only for classes that treat every
number by itself, so that the result is the same. Knows tensors and optimizer classes.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem._ps.malloc import give_back_freed_memory
from stratagem._wire.shm import zeros_apart

CHUNK_BYTES: Final = 1 << 20
"""How much of a parameter is stepped at once; the time above is about the same from 0.5 to 4 MB."""

_VECTOR: Final = 64
"""Chunks begin at multiples of so many numbers, so that no number changes its place in torch's loops."""

ELEMENTWISE: Final = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Classes whose step treats each number of a parameter by itself; a subclass may do anything."""


def bounds(parameter: Tensor) -> list[tuple[int, int]]:
    """Return where the chunks of a parameter begin and end, in rows; a tensor without axes is one row.

    Example:
        >>> bounds(torch.empty(1 << 18, 2))
        [(0, 131072), (131072, 262144)]
        >>> bounds(torch.empty(3))
        [(0, 3)]
    """
    rows = parameter.shape[0] if parameter.dim() else 1
    if parameter.nbytes <= CHUNK_BYTES:
        return [(0, rows)]
    each = max(1, CHUNK_BYTES * rows // parameter.nbytes)
    if each > _VECTOR:
        each -= each % _VECTOR
    return [(start, min(start + each, rows)) for start in range(0, rows, each)]


class RowsOfGradient:
    """A gradient of a parameter's shape, or of some of its rows, taken chunk by chunk.

    Example:
        >>> rows = RowsOfGradient(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 1]))
        >>> rows.between(0, 2, torch.zeros(2, 1))
        tensor([[0.],
                [2.]])
    """

    def __init__(self, values: Tensor, ids: Tensor | None) -> None:
        if ids is not None and not bool((ids[1:] > ids[:-1]).all()):
            ids, order = ids.sort()
            values = values.index_select(0, order)
        self._values = values if ids is not None else values.reshape(-1)
        self._ids = ids

    @property
    def is_rows(self) -> bool:
        """True if the gradient has only some of the rows."""
        return self._ids is not None

    def between(self, start: int, end: int, like: Tensor) -> Tensor:
        """Return the gradient of rows `start` to `end` (without rows: of these numbers), shaped as `like`."""
        if self._ids is None:
            return self._values[start:end]
        first, last = torch.searchsorted(self._ids, torch.tensor((start, end))).tolist()
        places = self._ids[first:last] - start
        return torch.zeros_like(like).index_copy_(0, places, self._values[first:last])


def step_in_chunks(
    optimizer: Optimizer, index: int, parameter: nn.Parameter, gradient: RowsOfGradient
) -> None:
    """Do one step of `optimizer` on one parameter of its group `index`, chunk by chunk."""
    groups = optimizer.param_groups
    members = [group["params"] for group in groups]
    state: MutableMapping[str, Any] = optimizer.state[parameter]
    whole = parameter.detach()
    per_number, others = _sorted_by_kind(state, whole)
    if not gradient.is_rows:  # rows may be longer than a chunk, and are not needed
        whole = whole.view(-1)
        per_number = {key: value.view(-1) for key, value in per_number.items()}
    is_new = not state
    counts: dict[str, Any] = {}  # step counts and the like: every chunk leaves the same
    try:
        for group in groups:
            group["params"] = []
        for start, end in bounds(whole):
            chunk = nn.Parameter(whole[start:end], requires_grad=False)
            chunk.grad = gradient.between(start, end, chunk)
            groups[index]["params"] = [chunk]
            if not is_new:
                optimizer.state[chunk] = {key: _own(value) for key, value in others.items()}
                for key, value in per_number.items():
                    optimizer.state[chunk][key] = value[start:end]
            try:
                optimizer.step()
            finally:
                after = optimizer.state.pop(chunk, {})
            for key, value in after.items():
                if not _is_like(value, chunk):
                    counts[key] = value
                    continue
                if key not in per_number:  # the first step makes the state
                    state[key] = zeros_apart(tuple(parameter.shape), value.dtype, beside=parameter)
                    per_number[key] = state[key].view(whole.shape)
                kept = per_number[key][start:end]
                if kept.data_ptr() != value.data_ptr():
                    kept.copy_(value)
    finally:
        for group, own in zip(groups, members, strict=True):
            group["params"] = own
    for key, value in counts.items():
        _keep(state, key, value)
    if is_new:
        give_back_freed_memory()  # the new state lies between freed temporaries


def _keep(state: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Store a step count in the memory it had before.

    Anything small that is allocated anew and stays would keep apart the holes that temporaries leave.
    """
    known = state.get(key)
    if isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape == value.shape:
        known.copy_(value)
    else:
        state[key] = value


def _sorted_by_kind(
    state: MutableMapping[str, Any], parameter: Tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state with one value per number of the parameter, and the rest (step counts)."""
    per_number, others = {}, {}
    for key, value in state.items():
        if _is_like(value, parameter):
            per_number[key] = state[key] = value.contiguous()
        else:
            others[key] = value
    return per_number, others


def _is_like(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == tensor.shape


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in lists that make about a chunk together.

    Example:
        >>> made = [nn.Parameter(torch.empty(1 << 17)) for _ in range(5)]
        >>> [len(batch) for batch in batches(made)]
        [2, 2, 1]
    """
    batch: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if batch and size + parameter.nbytes > CHUNK_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(parameter)
        size += parameter.nbytes
    if batch:
        yield batch
