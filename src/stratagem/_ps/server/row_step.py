"""Steps of an optimizer class on some rows: gather rows and their state, step, write them back.

For classes in which a zero gradient changes nothing, so that the result is that of the dense gradient. Called by
`shard_optimizer.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad

from stratagem._core.row_optimizers import ROW_OPTIMIZERS, new_state, rows_with_gradient, step_rows
from stratagem._ps.row_kernels import is_plain, kernels
from stratagem._ps.rows import put_rows, take_rows, touch_rows
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
    """Step an optimizer on rows of variables of one group."""
    kind: Any = type(optimizer)
    for item in items:
        if kind is torch.optim.SGD:
            _step_sgd(group, item)
        elif kind is torch.optim.Adagrad:
            _step_adagrad(group, item)
        elif kind in ROW_OPTIMIZERS:
            _step_row_optimizer(kind, group, item)
        else:
            _step_sparse_adam(optimizer, group, item)


def _step_sgd(group: Mapping[str, Any], item: RowsToStep) -> None:
    """Do the whole of plain SGD's step."""
    table, _, ids, values = item
    rate = float(group["lr"]) * (-1 if group["maximize"] else 1)
    if kernels is not None and is_plain(table, values) and ids.is_contiguous():
        touch_rows(table, ids)
        kernels.step_sgd(table, ids, values, rate)
        return
    # The ids are unique: this is `index_add_`, in half its time.
    put_rows(table, ids, take_rows(table, ids).add_(values, alpha=-rate))


def _step_adagrad(group: Mapping[str, Any], item: RowsToStep) -> None:
    table, state, ids, values = item
    sums, count = state["sum"], state["step"]
    is_usual = not group.get("fused")  # torch's fused step rounds differently
    if kernels is None or not (is_usual and is_plain(table, values, sums) and ids.is_contiguous()):
        rows, sums_of_rows = take_rows(table, ids), take_rows(sums, ids)
        step_adagrad([rows], [values], [sums_of_rows], [count], group)
        put_rows(table, ids, rows)
        put_rows(sums, ids, sums_of_rows)
        return
    touch_rows(table, ids)
    touch_rows(sums, ids)
    count += 1
    rate = float(group["lr"]) * (-1 if group["maximize"] else 1)
    if group["lr_decay"]:
        rate /= 1 + (count.item() - 1) * group["lr_decay"]
    kernels.step_adagrad(table, sums, ids, values, rate, group["eps"])


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
