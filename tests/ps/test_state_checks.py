"""State and arithmetic that would end the process of a parameter server are refused, or done safely."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stratagem._ps.server.store import VariableStore
from stratagem._ps.types import Gradient, GroupSpec, StateEntry


def adam_store(**settings: bool | float) -> VariableStore:
    store = VariableStore()
    store.create(1, "w", (64, 64), torch.float32).zero_()
    groups = [GroupSpec((1,), {"lr": 0.1, **settings})]
    store.create_optimizer(1, "torch.optim.Adam", groups, defaults={"fused": True})
    return store


def state(**values: Tensor | float) -> list[StateEntry]:
    good = {
        "step": torch.ones(()),
        "exp_avg": torch.zeros(64, 64),
        "exp_avg_sq": torch.zeros(64, 64),
    }
    return [StateEntry(variable=1, key=key, value=one) for key, one in {**good, **values}.items()]


@pytest.mark.parametrize(
    "wrong",
    [
        {"exp_avg": torch.zeros(1)},
        {"exp_avg_sq": torch.zeros(4096)},
        {"exp_avg": torch.zeros(64, 63)},
        {"exp_avg": torch.zeros(64, 64, dtype=torch.float64)},
        {"exp_avg": torch.zeros(64, 64, dtype=torch.uint8)},
        {"exp_avg": torch.zeros(64, 64).to_sparse()},
        {"step": torch.zeros(0)},
        {"step": torch.zeros(64, 64)},
        {"step": torch.zeros((), dtype=torch.complex64)},
    ],
    ids=["size", "axes", "columns", "float64", "uint8", "sparse", "step", "steps", "complex"],
)
def test_state_that_does_not_fit_its_parameter_is_refused(wrong: dict[str, Tensor]) -> None:
    """A fused step would write beyond it; nothing of the load is kept."""
    store = adam_store(fused=True)
    with pytest.raises(
        ValueError, match=f"cannot load the state '{next(iter(wrong))}' of variable 1"
    ):
        store.load_optimizer_state(1, state(**wrong))
    assert store.optimizer_state(1) == []
    store.load_optimizer_state(1, state())
    store.push(1, [Gradient(variable=1, values=torch.ones(64, 64))])
    assert store.read(1).max() < 0


def test_rows_of_state_must_have_the_shape_of_the_state() -> None:
    store = adam_store()
    store.load_optimizer_state(1, state())
    entry = StateEntry(variable=1, key="exp_avg", value=torch.ones(2, 1))
    with pytest.raises(ValueError, match="do not fit"):
        store.write_optimizer_rows(1, entry, 3)


def test_a_gradient_of_another_dtype_is_refused() -> None:
    store = adam_store()
    with pytest.raises(ValueError, match=r"float64: expected .*float32"):
        store.push(1, [Gradient(variable=1, values=torch.ones(64, 64, dtype=torch.float64))])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_dividing_the_smallest_integer_by_minus_one_does_not_end_the_process(
    dtype: torch.dtype,
) -> None:
    """The processor would trap (SIGFPE); the result wraps around, as a multiplication by -1 does."""
    smallest = torch.iinfo(dtype).min
    store = VariableStore()
    store.create(1, "n", (4,), dtype).copy_(torch.tensor([smallest, 7, -9, smallest]))
    ids = torch.tensor([0, 1, 2, 3])
    store.scatter(1, "div", ids, torch.tensor([-1, -1, 2, 1], dtype=dtype))
    assert store.read(1).tolist() == [smallest, -7, -4, smallest]


def test_a_value_is_not_expanded_to_more_than_the_machine_has() -> None:
    store = VariableStore()
    store.create(1, "w", (4, 1 << 20), torch.float32)
    ids = torch.zeros(1 << 16, dtype=torch.int64)
    with pytest.raises(ValueError, match="Scatter fewer rows"):
        store.scatter(1, "max", ids, torch.ones(()))
