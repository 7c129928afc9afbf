"""Steps of an optimizer class on some rows of variables: gather rows and their state, step, put them back.

For classes in which a zero gradient changes nothing, so that the result is that of the dense gradient. Called by
`shard_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad

from stratagem._core.row_optimizers import ROW_OPTIMIZERS, new_state, rows_with_gradient, step_rows
from stratagem._core.torch_patches import private_api
from stratagem._ps.rows import put_rows, take_rows
from stratagem._wire.shm import zeros_apart

State: TypeAlias = MutableMapping[str, Any]


class RowsToStep(NamedTuple):
    """Rows of one variable with a gradient: unique ids, one value each."""

    parameter: Tensor
    state: State
    ids: Tensor
    values: Tensor


def step_on_rows(
    optimizer: Optimizer, group: Mapping[str, Any], items: Sequence[RowsToStep]
) -> None:
    """Step an optimizer on rows of variables of one group; variables with rows of one shape step together."""
    kind: Any = type(optimizer)
    if kind is torch.optim.SGD:
        _step_sgd(group, items)
    elif kind is torch.optim.Adagrad:
        _step_adagrad(group, items)
    elif kind in ROW_OPTIMIZERS:
        for item in items:
            _step_row_optimizer(kind, group, item)
    else:
        for item in items:
            _step_sparse_adam(optimizer, group, item)


class _Joined(NamedTuple):
    """Rows of several variables in one tensor; `bounds` has each variable's first row and the end."""

    rows: Tensor
    values: Tensor
    bounds: list[int]


def _joined(items: Sequence[RowsToStep]) -> _Joined:
    bounds = [0]
    for item in items:
        bounds.append(bounds[-1] + item.ids.numel())
    rows = _taken([(item.parameter, item.ids) for item in items])
    return _Joined(rows, _joined_values([item.values for item in items], bounds[-1]), bounds)


def _joined_values(values: Sequence[Tensor], rows: int) -> Tensor:
    """Return the values one after the other; a view if they are in memory so, as workers send them."""
    first = values[0]
    address, width = first.data_ptr(), first[:1].nbytes
    for one in values:
        if one.data_ptr() != address or not one.is_contiguous():
            return torch.cat(list(values))
        address += one.shape[0] * width
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _taken(tables: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    if len(tables) == 1:
        return take_rows(*tables[0])
    return torch.cat([take_rows(table, ids) for table, ids in tables])


def _put(tables: Iterable[tuple[Tensor, Tensor]], rows: Tensor, bounds: Sequence[int]) -> None:
    for (table, ids), start, end in zip(tables, bounds, bounds[1:], strict=False):
        put_rows(table, ids, rows[start:end])


def _by_shape(items: Sequence[RowsToStep]) -> Iterable[list[RowsToStep]]:
    if len(items) == 1:
        return [list(items)]
    found: dict[Any, list[RowsToStep]] = {}
    for item in items:
        if item.ids.numel():
            key = (item.parameter.shape[1:], item.parameter.dtype)
            found.setdefault(key, []).append(item)
    return found.values()


def _step_sgd(group: Mapping[str, Any], items: Sequence[RowsToStep]) -> None:
    """Do the whole of plain SGD's step. The ids are unique: this is `index_add_`, in half its time."""
    rate = float(group["lr"]) * (1 if group["maximize"] else -1)
    for some in _by_shape(items):
        joined = _joined(some)
        joined.rows.add_(joined.values, alpha=rate)
        _put(((one.parameter, one.ids) for one in some), joined.rows, joined.bounds)


def _step_adagrad(group: Mapping[str, Any], items: Sequence[RowsToStep]) -> None:
    if group["lr_decay"]:  # the rate depends on the step count of each variable
        for item in items:
            _step_adagrad_together(group, [item], item.state["step"])
        return
    if len(items) > 1:
        private_api.foreach_add_([one.state["step"] for one in items], 1)
        count = items[0].state["step"].clone()
    else:
        count = items[0].state["step"]
    for some in _by_shape(items):
        _step_adagrad_together(group, some, count)


def _step_adagrad_together(
    group: Mapping[str, Any], items: Sequence[RowsToStep], count: Tensor
) -> None:
    joined = _joined(items)
    tables = [(one.state["sum"], one.ids) for one in items]
    sums = _taken(tables)
    step_adagrad([joined.rows], [joined.values], [sums], [count], group)
    _put(((one.parameter, one.ids) for one in items), joined.rows, joined.bounds)
    _put(tables, sums, joined.bounds)


def step_adagrad(
    parameters: list[Tensor],
    gradients: list[Tensor],
    sums: list[Tensor],
    steps: list[Tensor],
    group: Mapping[str, Any],
) -> None:
    """Run torch's own Adagrad step on these tensors, with the settings of a group."""
    adagrad(
        parameters,
        gradients,
        sums,
        steps,
        fused=group.get("fused"),
        foreach=group.get("foreach"),
        has_complex=any(parameter.is_complex() for parameter in parameters),
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        lr_decay=group["lr_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _step_row_optimizer(kind: Any, group: Mapping[str, Any], item: RowsToStep) -> None:
    parameter, state, ids, values = item
    if not state:
        state.update(new_state(kind, parameter, group, zeros_apart))
    kept = rows_with_gradient(kind, values)
    if kept is not None:
        ids, values = ids.index_select(0, kept), values.index_select(0, kept)
    rows = take_rows(parameter, ids)
    taken = _rows_of_state(state, parameter, ids)
    step_rows(kind, rows, values, taken, group)
    put_rows(parameter, ids, rows)
    _put_state(state, taken, parameter, ids)


def _step_sparse_adam(optimizer: Optimizer, group: Mapping[str, Any], item: RowsToStep) -> None:
    parameter, state, ids, values = item
    if not state:
        state["step"] = 0
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = zeros_apart(tuple(parameter.shape), parameter.dtype)
    taken = nn.Parameter(take_rows(parameter, ids), requires_grad=False)
    taken.grad = torch.sparse_coo_tensor(
        torch.arange(ids.numel()).unsqueeze(0),
        values,
        taken.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    settings = {key: value for key, value in group.items() if key != "params"}
    kind: Any = type(optimizer)
    small: Any = kind.__new__(kind)
    Optimizer.__init__(small, [{"params": [taken], **settings}], dict(optimizer.defaults))
    small.state[taken] = _rows_of_state(state, parameter, ids)
    small.step()
    put_rows(parameter, ids, taken)
    _put_state(state, small.state[taken], parameter, ids)


def _rows_of_state(state: State, parameter: Tensor, ids: Tensor) -> dict[str, Any]:
    return {
        key: take_rows(value, ids) if _is_per_row(value, parameter) else value
        for key, value in state.items()
    }


def _put_state(state: State, taken: Mapping[str, Any], parameter: Tensor, ids: Tensor) -> None:
    for key, value in taken.items():
        if _is_per_row(state[key], parameter):
            put_rows(state[key], ids, value)
        else:
            state[key] = value


def _is_per_row(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == parameter.shape[0]
