"""``table.grad`` behaves as the gradient of the whole table, and holds only its rows while that gives the same (issue 20)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stratagem._ps.tables.table_gradient import TableGradient
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem._ps.tables.worker_rows import WorkerRows

ROWS, WIDTH = 6, 2
Update = Callable[[Any], object]


class InMemory:
    """Rows in this process."""

    def __init__(self) -> None:
        self.name, self.data = "table", torch.linspace(-2, 2, ROWS * WIDTH).reshape(ROWS, WIDTH)
        self.shape, self.dtype = (ROWS, WIDTH), torch.float32

    def rows(self, ids: Tensor) -> Tensor:
        return self.data[ids]

    def rows_as_asked(self, ids: Tensor) -> Tensor:
        return self.data[ids]

    def whole(self) -> Tensor:
        return self.data

    def update_rows(self, ids: Tensor, values: Tensor) -> None:
        self.data[ids] = values


def table() -> TableParameter:
    return TableParameter.over(WorkerRows(InMemory(), [], may_write=True))


def plain() -> nn.Parameter:
    return nn.Parameter(InMemory().data)


def backward(weight: Any, ids: list[int]) -> None:
    weight.grad = None
    F.embedding(torch.tensor(ids), weight).square().sum().backward()


def without_graph(update: Update) -> Update:
    def run(p: Any) -> None:
        with torch.no_grad():
            update(p)

    return run


def set_data(p: Any) -> None:
    p.data = p.data - 0.1 * p.grad


def subtract(p: Any) -> None:
    p -= 0.1 * (p.grad + 0.1 * p)


def clip_norm(p: Any) -> None:
    nn.utils.clip_grad_norm_([p], 0.1)


def clip_value(p: Any) -> None:
    nn.utils.clip_grad_value_([p], 0.1)


def halve(p: Any) -> None:
    p.grad = p.grad * 0.5


def one_more(p: Any) -> None:
    p.grad = p.grad + 1


def halve_each_row(p: Any) -> None:
    for row in p.grad:
        row.mul_(0.5)


def set_row(p: Any) -> None:
    p.grad[1] = 0.5


def set_column(p: Any) -> None:
    p.grad.data[:, 1] = 0.5


def unscale(p: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([p]))


CHANGES: dict[str, Update] = {
    "weight decay in place": lambda p: p.grad.add_(p.data, alpha=0.5),
    "weight decay without graph": lambda p: p.grad.detach().add_(p.data, alpha=0.5),
    "scaled in place": lambda p: p.grad.mul_(0.5),
    "scaled without graph": lambda p: p.grad.detach().mul_(0.5),
    "scaled through a view": lambda p: p.grad.view(-1).mul_(0.5),
    "scaled row by row": halve_each_row,
    "foreach": lambda p: torch._foreach_mul_([p.grad], 0.5),
    "foreach with tables": lambda p: torch._foreach_add_([p.grad], [p.data]),
    "out": lambda p: torch.mul(p.grad, 2, out=p.grad),
    "copied": lambda p: p.grad.copy_(torch.ones(ROWS, WIDTH)),
    "zeroed": lambda p: p.grad.zero_(),
    "clipped by norm": clip_norm,
    "clipped by value": clip_value,
    "clamped away from zero": lambda p: p.grad.clamp_(min=0.5),
    "scaled and assigned": halve,
    "moved and assigned": one_more,
    "a row": set_row,
    "a column": set_column,
    "gradient scaler": unscale,
}
UPDATES: dict[str, Update] = {
    "data": set_data,
    "add": lambda p: p.data.add_(p.grad, alpha=-0.1),
    "sub": lambda p: p.data.sub_(0.1 * p.grad),
    "isub": without_graph(subtract),
    "addcdiv": lambda p: p.data.addcdiv_(p.grad, p.grad.abs().sqrt() + 1, value=-0.1),
    "weight decay": lambda p: p.data.add_(p.grad + 0.5 * p.data, alpha=-0.1),
    "sign": lambda p: p.data.sub_(p.grad.sign()),
    "power": lambda p: p.data.sub_(p.grad**2),
    "power 0": lambda p: p.data.sub_(p.grad**0),
    "norm": lambda p: p.data.sub_(p.grad / (p.grad.norm() + p.data.norm())),
    "norm of columns": lambda p: p.data.sub_(p.grad / p.grad.norm(dim=0)),
    "mean": lambda p: p.data.sub_(p.grad - p.grad.mean()),
    "mean of columns": lambda p: p.data.sub_(p.grad - p.grad.mean(0)),
    "largest": lambda p: p.data.sub_(p.grad / (-p.grad).max().abs().clamp(0.1)),
    "clamped away from zero": lambda p: p.data.sub_(p.grad.clamp(0.1, 1)),
    "clamped": lambda p: p.data.sub_(p.grad.clamp(-0.1, 0.1)),
    "times the table": lambda p: p.data.sub_(p.grad * p.data),
    "the table times": lambda p: p.data.sub_(p.data * p.grad),
    "a number over it": lambda p: p.data.sub_(1 / (p.grad + 20)),
    "a tensor times": lambda p: p.data.sub_(torch.tensor(0.5) * p.grad),
    "momentum": lambda p: p.data.sub_(torch.zeros_like(p.grad).mul_(0.9).add_(p.grad)),
    "shape": lambda p: p.data.sub_(torch.zeros(p.grad.shape) + p.grad + p.grad.numel() * 0.01),
    "numpy": lambda p: p.data.sub_(torch.from_numpy(p.grad.cpu().numpy().copy())),
    "vector": lambda p: p.data.sub_(nn.utils.parameters_to_vector([p.grad]).view_as(p)),
    "stack": lambda p: p.data.sub_(torch.stack([p.grad, p.grad]).sum(0)),
    "finite": lambda p: p.data.sub_(p.grad * float(torch.isfinite(p.grad).all())),
    "deep copy": lambda p: p.data.sub_(copy.deepcopy(p.grad)),
    "pickle": lambda p: p.data.sub_(pickle.loads(pickle.dumps(p.grad))),
    "added to others": lambda p: p.data.sub_(torch.ones(ROWS, WIDTH).add_(p.grad)),
}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "Rprop")


def assert_as_plain(update: Update, ids: list[int]) -> None:
    ours, theirs = table(), plain()
    for weight in (ours, theirs):
        for _ in range(2):
            backward(weight, ids)
            update(weight)
    torch.testing.assert_close(ours.detach() + 0, theirs.detach(), equal_nan=True)
    torch.testing.assert_close(ours.grad + 0, theirs.grad, equal_nan=True)


# One row is the case in which torch would spread the rows of the gradient over the whole table.
@pytest.mark.parametrize("ids", [[1], [1, 4, 1]], ids=["one row", "rows"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_gradient_changes_as_in_plain_pytorch(name: str, ids: list[int]) -> None:
    assert_as_plain(CHANGES[name], ids)


@pytest.mark.parametrize("ids", [[1], [1, 4, 1]], ids=["one row", "rows"])
@pytest.mark.parametrize("name", UPDATES)
def test_updates_by_hand_are_those_of_plain_pytorch(name: str, ids: list[int]) -> None:
    assert_as_plain(UPDATES[name], ids)


@pytest.mark.parametrize("ids", [[1], [1, 4, 1]], ids=["one row", "rows"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_this_process_step_on_a_table(name: str, ids: list[int]) -> None:
    def step(p: Any) -> None:
        getattr(torch.optim, name)([p], lr=0.1).step()

    assert_as_plain(step, ids)


@pytest.mark.parametrize(
    "name", ["scaled in place", "clipped by norm", "clipped by value", "gradient scaler", "zeroed"]
)
def test_scaling_and_clipping_keep_the_rows(name: str) -> None:
    weight = table()
    backward(weight, [1, 4])
    CHANGES[name](weight)
    assert weight.grad_ids is not None
    assert weight.grad_ids.tolist() == [1, 4]
    assert weight.gradient.value().shape == (2, WIDTH)


@pytest.mark.parametrize(
    "name", ["weight decay", "power", "mean", "largest", "finite", "deep copy"]
)
def test_what_is_only_read_keeps_the_rows(name: str) -> None:
    weight = table()
    backward(weight, [1, 4])
    UPDATES[name](weight)
    assert weight.grad_ids is not None


@pytest.mark.parametrize("name", ["add", "sub", "sign", "clamped"])
def test_an_update_adds_the_rows_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TableGradient, "whole")
    weight = table()
    backward(weight, [1, 4])
    UPDATES[name](weight)


def test_a_gradient_says_what_it_is() -> None:
    weight = table()
    backward(weight, [1, 4])
    gradient: Any = weight.grad
    assert tuple(gradient.shape) == (ROWS, WIDTH)
    assert len(gradient) == ROWS
    assert gradient.device.type == "cpu"
    assert not gradient.is_sparse
    assert repr(gradient) == f"<TableGradient ({ROWS}, {WIDTH}), 2 rows>"
    assert weight.grad is gradient


def test_code_that_bypasses_the_rows_never_gets_plausible_numbers() -> None:
    """Autograd adds gradients up in C++."""
    weight, other = table(), plain()
    backward(weight, [1, 4])
    with torch._C.DisableTorchFunctionSubclass():
        assert bool(torch.as_tensor(weight.gradient.shown()).isnan().all())
    other.grad = weight.grad
    with pytest.raises(RuntimeError, match="single memory location"):
        other.sum().backward()
