"""Steps of an optimizer class on some rows: gather rows and their state, step, write them back.

For classes in which a zero gradient changes nothing, so that the result is that of the dense gradient. Called by
`shard_optimizer.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad

from stratagem._core.row_optimizers import ROW_OPTIMIZERS, new_state, rows_with_gradient, step_rows
from stratagem._core.torch_patches import private_api
from stratagem._ps.row_kernels import RowKernels, is_plain, kernels
from stratagem._ps.rows import as_pieces, put_rows, take_rows, touch_rows
from stratagem._wire.shm import zeros_apart

State: TypeAlias = MutableMapping[str, Any]


class RowsToStep(NamedTuple):
    """Rows of one variable with a gradient: unique ids, one value each."""

    parameter: Tensor
    state: State
    ids: Tensor
    values: Tensor


class RowViews:
    """Arrays with one item per row, over the memory of tables; making one costs as much as copying 200 rows.

    An array keeps its memory: `clear` when variables or state come or go.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Any] = {}

    def of(self, table: Tensor) -> Any:
        """Return the array of a table; None if its rows are not contiguous."""
        key = (table.data_ptr(), table.nbytes)
        if key not in self._known:
            self._known[key] = as_pieces(table)
        return self._known[key]

    def clear(self) -> None:
        """Forget all arrays."""
        self._known.clear()


def step_on_rows(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    items: Sequence[RowsToStep],
    views: RowViews,
) -> None:
    """Step an optimizer on rows of variables of one group; variables with rows of one shape step together."""
    kind: Any = type(optimizer)
    if kernels is not None and kind in (torch.optim.SGD, torch.optim.Adagrad):
        items = _step_in_place(kernels, kind, group, items)
    if not items:
        return
    if kind is torch.optim.SGD:
        _step_sgd(group, items, views)
    elif kind is torch.optim.Adagrad:
        _step_adagrad(group, items, views)
    elif kind in ROW_OPTIMIZERS:
        for item in items:
            _step_row_optimizer(kind, group, item)
    else:
        for item in items:
            _step_sparse_adam(optimizer, group, item)


def _step_in_place(
    kernels: RowKernels,
    kind: type[Optimizer],
    group: Mapping[str, Any],
    items: Sequence[RowsToStep],
) -> list[RowsToStep]:
    """Step rows where they are, without gathering them; return the items that need the other way."""
    others: list[RowsToStep] = []
    rate = float(group["lr"]) * (-1 if group["maximize"] else 1)
    for item in items:
        table, state, ids, values = item
        is_adagrad = kind is torch.optim.Adagrad
        tensors = (table, values, state["sum"]) if is_adagrad else (table, values)
        # torch's fused step rounds differently.
        if not is_plain(*tensors) or not ids.is_contiguous() or group.get("fused"):
            others.append(item)
            continue
        touch_rows(table, ids)
        if not is_adagrad:
            kernels.step_sgd(table, ids, values, rate)
            continue
        touch_rows(state["sum"], ids)
        count = state["step"]
        count += 1
        decayed = rate
        if group["lr_decay"]:
            decayed = rate / (1 + (count.item() - 1) * group["lr_decay"])
        kernels.step_adagrad(table, state["sum"], ids, values, decayed, group["eps"])
    return others


class _Joined(NamedTuple):
    """Rows of several variables in one tensor; `bounds` has each variable's first row and the end."""

    rows: Tensor
    values: Tensor
    bounds: list[int]


def _joined(items: Sequence[RowsToStep], views: RowViews) -> _Joined:
    bounds = [0]
    for item in items:
        bounds.append(bounds[-1] + item.ids.numel())
    rows = _taken([(item.parameter, item.ids) for item in items], bounds, views)
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


def _taken(
    tables: Sequence[tuple[Tensor, Tensor]], bounds: Sequence[int], views: RowViews
) -> Tensor:
    first = tables[0][0]
    found: list[Any] = [views.of(one) for one, _ in tables] if len(tables) > 1 else [None]
    if any(one is None for one in found):
        taken = [take_rows(table, ids) for table, ids in tables]
        return torch.cat(taken) if len(taken) > 1 else taken[0]
    rows = torch.empty((bounds[-1], *first.shape[1:]), dtype=first.dtype)
    into = as_pieces(rows)
    assert into is not None
    for pieces, (table, ids), start, end in zip(found, tables, bounds, bounds[1:], strict=False):
        touch_rows(table, ids)
        pieces.take(ids.numpy(), out=into[start:end], mode="clip")
    return rows


def _put(
    tables: Sequence[tuple[Tensor, Tensor]], rows: Tensor, bounds: Sequence[int], views: RowViews
) -> None:
    values = as_pieces(rows)
    for (table, ids), start, end in zip(tables, bounds, bounds[1:], strict=False):
        pieces = views.of(table)
        if pieces is None or values is None:
            put_rows(table, ids, rows[start:end])
        else:
            pieces.put(ids.numpy(), values[start:end], mode="clip")


def _by_shape(items: Sequence[RowsToStep]) -> Iterable[list[RowsToStep]]:
    if len(items) == 1:
        return [list(items)]
    found: dict[Any, list[RowsToStep]] = {}
    for item in items:
        if item.ids.numel():
            key = (item.parameter.shape[1:], item.parameter.dtype)
            found.setdefault(key, []).append(item)
    return found.values()


def _step_sgd(group: Mapping[str, Any], items: Sequence[RowsToStep], views: RowViews) -> None:
    """Do the whole of plain SGD's step. The ids are unique: this is `index_add_`, in half its time."""
    rate = float(group["lr"]) * (1 if group["maximize"] else -1)
    for some in _by_shape(items):
        joined = _joined(some, views)
        joined.rows.add_(joined.values, alpha=rate)
        _put([(one.parameter, one.ids) for one in some], joined.rows, joined.bounds, views)


def _step_adagrad(group: Mapping[str, Any], items: Sequence[RowsToStep], views: RowViews) -> None:
    if group["lr_decay"]:  # the rate depends on the step count of each variable
        for item in items:
            _step_adagrad_together(group, [item], item.state["step"], views)
        return
    if len(items) > 1:
        private_api.foreach_add_([one.state["step"] for one in items], 1)
        count = items[0].state["step"].clone()
    else:
        count = items[0].state["step"]
    for some in _by_shape(items):
        _step_adagrad_together(group, some, count, views)


def _step_adagrad_together(
    group: Mapping[str, Any], items: Sequence[RowsToStep], count: Tensor, views: RowViews
) -> None:
    joined = _joined(items, views)
    tables = [(one.state["sum"], one.ids) for one in items]
    sums = _taken(tables, joined.bounds, views)
    step_adagrad([joined.rows], [joined.values], [sums], [count], group)
    _put([(one.parameter, one.ids) for one in items], joined.rows, joined.bounds, views)
    _put(tables, sums, joined.bounds, views)


def step_adagrad(
    parameters: list[Tensor],
    gradients: list[Tensor],
    sums: list[Tensor],
    steps: list[Tensor],
    group: Mapping[str, Any],
) -> None:
    """Do Adagrad's step on these tensors, with the settings of a group."""
    if _is_plain_adagrad(group, gradients):
        rate = group["lr"] if group["maximize"] else -group["lr"]
        for parameter, gradient, total, step in zip(
            parameters, gradients, sums, steps, strict=True
        ):
            # The lines of torch's own function, which takes as long again for everything around them.
            step += 1
            total.addcmul_(gradient, gradient)
            parameter.addcdiv_(gradient, total.sqrt().add_(group["eps"]), value=rate)
        return
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


def _is_plain_adagrad(group: Mapping[str, Any], gradients: Sequence[Tensor]) -> bool:
    if type(group["lr"]) is not float or group["lr_decay"] or group["weight_decay"]:
        return False
    if group.get("foreach") or group.get("fused"):  # they round differently
        return False
    return not any(one.is_complex() or one.layout is not torch.strided for one in gradients)


def _step_row_optimizer(kind: Any, group: Mapping[str, Any], item: RowsToStep) -> None:
    parameter, state, ids, values = item
    if not state:
        make = functools.partial(zeros_apart, beside=parameter)
        state.update(new_state(kind, parameter, group, make))
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
            state[key] = zeros_apart(tuple(parameter.shape), parameter.dtype, beside=parameter)
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
