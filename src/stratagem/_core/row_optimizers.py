"""Optimizers for tables: a step changes only the rows that have a gradient.

On one device `step` finds these rows in a sparse or a dense gradient. Parameter servers get the rows of a gradient from
workers, and call `new_state` and `step_rows` directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, TypeAlias, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

State: TypeAlias = MutableMapping[str, Any]
Zeros: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


@final
class LazyAdam(Optimizer):
    """Adam for tables: moments and weights change only in rows with a gradient.

    A row whose gradient is zero everywhere counts as a row without a gradient, whether the gradient is sparse or
    dense. A row that has a gradient in every step gets the numbers of ``torch.optim.Adam``. A row without one keeps its
    moments, which Adam would decay. So a step costs the time of the batch's rows, not of the table. Parameters with
    fewer than two axes are stepped whole, as Adam does.

    Args:
        params: as for other optimizers.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the denominator.
        maximize: follow the gradient instead of its negative.

    Example:
        >>> import torch, stratagem as sg
        >>> table = torch.nn.Embedding(3, 2, sparse=True)
        >>> before = table.weight.detach().clone()
        >>> optimizer = sg.optim.LazyAdam(table.parameters(), lr=0.1)
        >>> table(torch.tensor([2])).sum().backward()
        >>> optimizer.step()
        >>> (table.weight != before).any(1)
        tensor([False, False,  True])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        maximize: bool = False,
    ) -> None:
        _check_positive("lr", lr)
        _check_positive("eps", eps)
        if not all(0.0 <= one < 1.0 for one in betas):
            raise ValueError(f"betas={betas!r}: expected two numbers from 0 to below 1.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one step; `closure`, if given, computes the loss again and is called first."""
        return _step(self, closure)


@final
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row: the mean of the row's squared gradient is added to it.

    The state of a table with rows of 64 numbers takes 1/64 of the memory of ``torch.optim.Adagrad``'s. A step changes only
    rows with a gradient. In parameters with fewer than two axes, each number is a row.

    Args:
        params: as for other optimizers.
        lr: learning rate.
        eps: added to the denominator.
        initial_accumulator_value: of every accumulator.
        maximize: follow the gradient instead of its negative.

    Example:
        >>> import torch, stratagem as sg
        >>> table = torch.nn.Embedding(3, 2, sparse=True)
        >>> optimizer = sg.optim.RowWiseAdagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([2])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"]
        tensor([0., 0., 1.])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        _check_positive("lr", lr)
        _check_positive("eps", eps)
        _check_positive("initial_accumulator_value", initial_accumulator_value)
        settings = {
            "lr": lr,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, settings)

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one step; `closure`, if given, computes the loss again and is called first."""
        return _step(self, closure)


ROW_OPTIMIZERS: Final[frozenset[type[Optimizer]]] = frozenset({LazyAdam, RowWiseAdagrad})


def new_state(
    kind: type[Optimizer], parameter: Tensor, group: Mapping[str, Any], zeros: Zeros
) -> dict[str, Any]:
    """Return the state of a parameter before its first step; `zeros` returns memory for a tensor."""
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if kind is LazyAdam:
        return {"step": 0, "exp_avg": zeros(shape, dtype), "exp_avg_sq": zeros(shape, dtype)}
    total = zeros(shape[:1] if len(shape) > 1 else shape, dtype)
    value = group["initial_accumulator_value"]
    return {"sum": total.fill_(value) if value else total}


def step_rows(
    kind: type[Optimizer],
    rows: Tensor,
    gradient: Tensor,
    state: State,
    group: Mapping[str, Any],
) -> None:
    """Step some rows of a parameter in place; tensors in `state` hold these rows."""
    if group["maximize"]:
        gradient = -gradient
    if kind is LazyAdam:
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (1 - beta2 ** state["step"]) ** 0.5
        divisor = second.sqrt().div_(scale).add_(group["eps"])
        rows.addcdiv_(first, divisor, value=-float(group["lr"]) / (1 - beta1 ** state["step"]))
        return
    squares = gradient * gradient
    if gradient.dim() > 1:
        squares = squares.flatten(1).mean(1)
    total = state["sum"].add_(squares)
    divisor = total.sqrt().add_(group["eps"])
    rows.addcdiv_(gradient, _as_rows(divisor, gradient), value=-float(group["lr"]))


def rows_with_gradient(kind: type[Optimizer], values: Tensor) -> Tensor | None:
    """Return the positions of the rows that a step changes; None for all of them."""
    if kind is not LazyAdam or values.dim() < 2 or not values.numel():
        return None  # zeros change nothing in RowWiseAdagrad
    found = values.flatten(1).any(1)
    return None if bool(found.all()) else found.nonzero().flatten()


def _step(optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    kind = type(optimizer)
    for group in optimizer.param_groups:
        for parameter in cast("Iterable[Tensor]", group["params"]):
            if parameter.grad is None:
                continue
            state: State = optimizer.state[parameter]
            if not state:
                state.update(new_state(kind, parameter, group, _zeros_on(parameter.device)))
            _step_parameter(kind, parameter, parameter.grad, state, group)
    return loss


def _step_parameter(
    kind: type[Optimizer],
    parameter: Tensor,
    gradient: Tensor,
    state: State,
    group: Mapping[str, Any],
) -> None:
    ids: Tensor | None = None
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        ids, gradient = gradient.indices()[0], gradient.values()
    kept = rows_with_gradient(kind, gradient)
    if kept is not None:
        gradient = gradient.index_select(0, kept)
        ids = kept if ids is None else ids.index_select(0, kept)
    if ids is None:
        step_rows(kind, parameter, gradient, state, group)
        return
    taken = {
        key: value.index_select(0, ids) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }
    rows = parameter.index_select(0, ids)
    step_rows(kind, rows, gradient, taken, group)
    parameter.index_copy_(0, ids, rows)
    for key, value in taken.items():
        if isinstance(value, Tensor):
            state[key].index_copy_(0, ids, value)
        else:
            state[key] = value


def _zeros_on(device: torch.device) -> Zeros:
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)


def _as_rows(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1)) if like.dim() > 1 else values


def _check_positive(name: str, value: float) -> None:
    if value < 0:
        raise ValueError(f"{name}={value!r}: expected 0 or more.")
