"""Steps that a client repeats with new values in the same memory (`repeated_push`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem._ps.server.repeated_push import repeated_push
from stratagem._ps.server.row_step import step_adagrad
from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import Gradient, GroupSpec, StateEntry
from stratagem.errors import NotFoundError

SHAPES = {1: (5, 3), 2: (7,), 3: (), 4: (2, 2)}
KINDS: dict[str, dict[str, Any]] = {
    "torch.optim.SGD": {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0},
    "torch.optim.Adagrad": {"lr": 0.1, "lr_decay": 0, "weight_decay": 0, "eps": 1e-10},
    "torch.optim.Adam": {"lr": 0.1},
}


def filled(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def store_of(kind: str, **settings: Any) -> VariableStore:
    """Return a store with variables in two groups; no step uses variable 4."""
    store = VariableStore()
    for number, shape in SHAPES.items():
        store.create(number, f"v{number}", shape, torch.float32).copy_(filled(number, shape))
    rates = {**KINDS[kind], **settings}
    groups = [
        GroupSpec(variables=(1, 2), settings=rates),
        GroupSpec(variables=(3, 4), settings={**rates, "lr": 0.3}),
    ]
    store.create_optimizer(9, kind, groups)
    return store


def gradients(values: dict[int, Tensor]) -> list[Gradient]:
    return [Gradient(variable=number, values=value) for number, value in values.items()]


@pytest.mark.parametrize("settings", [{}, {"maximize": True}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_push_gives_the_bits_of_single_pushes(kind: str, settings: Any) -> None:
    once, again = store_of(kind, **settings), store_of(kind, **settings)
    memory = {number: torch.empty(SHAPES[number]) for number in (1, 2, 3)}
    push = repeated_push(again, 9, gradients(memory), None)
    for step in range(4):
        for number, value in memory.items():
            value.copy_(filled(100 * step + number, SHAPES[number]))
        push()
        once.push(9, gradients({number: value.clone() for number, value in memory.items()}))
    assert once.versions() == again.versions() == {1: 4, 2: 4, 3: 4, 4: 0}
    for number in SHAPES:
        assert torch.equal(once.read(number), again.read(number))
    for one, other in zip(once.optimizer_state(9), again.optimizer_state(9), strict=True):
        assert torch.equal(torch.as_tensor(one.value), torch.as_tensor(other.value))


def test_a_repeated_push_sees_state_that_was_loaded_meanwhile() -> None:
    store = store_of("torch.optim.Adagrad")
    push = repeated_push(store, 9, gradients({2: torch.ones(7)}), None)
    push()
    push()
    sums = torch.full((7,), 8.0)
    step = StateEntry(variable=2, key="step", value=torch.tensor(1.0))
    store.load_optimizer_state(9, [step, StateEntry(variable=2, key="sum", value=sums)])
    before = store.read(2).clone()
    push()
    assert torch.equal(store.tensor_of(2, 9, "sum"), torch.full((7,), 9.0))
    assert torch.allclose(before - store.read(2), torch.full((7,), 0.1 / 3))


def test_a_repeated_push_reports_its_writes_to_a_cut() -> None:
    store = store_of("torch.optim.SGD")
    push = repeated_push(store, 9, gradients({1: torch.ones(5, 3)}), None)
    push()
    seen: list[int] = []
    store.begin_cut([1]).before_write = lambda variable, ids=None: seen.append(variable)  # type: ignore[method-assign,misc]
    push()
    store.end_cut()
    push()
    assert seen == [1]


def test_a_gradient_of_another_shape_is_refused_at_each_push() -> None:
    store = store_of("torch.optim.SGD")
    push = repeated_push(store, 9, gradients({1: torch.ones(3, 5)}), None)
    for _ in range(2):
        with pytest.raises(ValueError, match="expected"):
            push()
    assert store.version(1) == 0


def test_an_unknown_optimizer_is_found_before_the_write_is_admitted() -> None:
    with pytest.raises(NotFoundError):
        repeated_push(store_of("torch.optim.SGD"), 8, gradients({1: torch.ones(5, 3)}), None)


@pytest.mark.parametrize("maximize", [False, True])
def test_plain_adagrad_gives_the_bits_of_torch(maximize: bool) -> None:
    parameter = torch.nn.Parameter(filled(1, (33, 7)))
    theirs = torch.optim.Adagrad([parameter], lr=0.07, eps=1e-8, maximize=maximize)
    ours, total, step = parameter.detach().clone(), torch.zeros(33, 7), torch.tensor(0.0)
    for number in range(5):
        parameter.grad = filled(number, (33, 7))
        theirs.step()
        step_adagrad([ours], [parameter.grad], [total], [step], theirs.param_groups[0])
    assert torch.equal(ours, parameter.detach())
    assert torch.equal(total, theirs.state[parameter]["sum"])
    assert step == theirs.state[parameter]["step"] == 5
