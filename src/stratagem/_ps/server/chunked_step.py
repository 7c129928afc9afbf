"""Large shards are stepped a piece at a time, so that an optimizer's temporaries stay small.

A step of Adam makes tensors as large as the parameter it works on. On pieces that fit the caches it
makes small ones again and again: a server needs hardly any memory beside parameters and state, and no
pass goes through main memory but the first (Adam's arithmetic on 96 MB, one core: 187 ms whole, 63 in
pieces).
Only for classes that treat every number by itself, so that the outcome is the same. Used by
`stepping.py`; knows tensors and optimizer classes.
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

_WHOLE_VECTORS: Final = 64
"""Pieces begin at multiples of so many numbers, so that no number leaves its place in torch's loops."""

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
"""Classes whose step looks at each number of a parameter alone; a subclass may do anything."""


def bounds(parameter: Tensor) -> list[tuple[int, int]]:
    """Where the pieces of a parameter begin and end, in rows; a tensor without axes is one row.

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
    if each > _WHOLE_VECTORS:
        each -= each % _WHOLE_VECTORS
    return [(start, min(start + each, rows)) for start in range(0, rows, each)]


class RowsOfGradient:
    """A gradient of a parameter's shape, or of some of its rows, handed out piece by piece.

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
        """Whether it speaks of some rows only."""
        return self._ids is not None

    def between(self, start: int, end: int, like: Tensor) -> Tensor:
        """The gradient of rows `start` to `end` (without rows: of these numbers), shaped as `like`."""
        if self._ids is None:
            return self._values[start:end]
        first, last = torch.searchsorted(self._ids, torch.tensor((start, end))).tolist()
        places = self._ids[first:last] - start
        return torch.zeros_like(like).index_copy_(0, places, self._values[first:last])


def step_in_pieces(
    optimizer: Optimizer, index: int, parameter: nn.Parameter, gradient: RowsOfGradient
) -> None:
    """One step of `optimizer` on one parameter of its group `index`, piece by piece."""
    groups = optimizer.param_groups
    members = [group["params"] for group in groups]
    state: MutableMapping[str, Any] = optimizer.state[parameter]
    whole = parameter.detach()
    per_number, others = _sorted_by_kind(state, whole)
    if not gradient.is_rows:  # rows may be longer than a piece; nothing here needs them
        whole = whole.view(-1)
        per_number = {key: value.view(-1) for key, value in per_number.items()}
    is_new = not state
    counts: dict[str, Any] = {}  # step counts and the like: every piece leaves the same
    try:
        for group in groups:
            group["params"] = []
        for start, end in bounds(whole):
            piece = nn.Parameter(whole[start:end], requires_grad=False)
            piece.grad = gradient.between(start, end, piece)
            groups[index]["params"] = [piece]
            if not is_new:
                optimizer.state[piece] = {key: _own(value) for key, value in others.items()}
                for key, value in per_number.items():
                    optimizer.state[piece][key] = value[start:end]
            try:
                optimizer.step()
            finally:
                after = optimizer.state.pop(piece, {})
            for key, value in after.items():
                if not _is_like(value, piece):
                    counts[key] = value
                    continue
                if key not in per_number:  # the first step makes the state
                    state[key] = zeros_apart(tuple(parameter.shape), value.dtype)
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
        give_back_freed_memory()  # what stays of the first step lies between what does not


def _keep(state: MutableMapping[str, Any], key: str, value: Any) -> None:
    """A step count, in the memory it had before.

    The smallest thing that stays, made anew, would keep apart the holes that temporaries leave.
    """
    known = state.get(key)
    if isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape == value.shape:
        known.copy_(value)
    else:
        state[key] = value


def _sorted_by_kind(
    state: MutableMapping[str, Any], parameter: Tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the state holds for every number of the parameter, and the rest (step counts)."""
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
    """Parameters in lists that make about a piece together.

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
