"""Optimizers for tables change the rows of the batch alone, and say so when another class does not."""

import copy

import pytest
import torch
from torch import nn

import stratagem as sg

CLASSES = [sg.optim.LazyAdam, sg.optim.RowWiseAdagrad]


def start():
    return nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3).clone())


def gradients(rows):
    generator = torch.Generator().manual_seed(0)
    for ids in rows:
        yield torch.tensor(ids), torch.randn(len(ids), 3, generator=generator)


def trained(kind, rows, *, sparse, **options):
    weight = start()
    optimizer = kind([weight], lr=0.1, **options)
    for ids, values in gradients(rows):
        found = torch.sparse_coo_tensor(ids[None], values, (4, 3), check_invariants=True)
        weight.grad = found if sparse else found.to_dense()
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


SOME_ROWS = [[0, 2], [2], [1, 0], [2, 1]]


@pytest.mark.parametrize("kind", CLASSES)
def test_rows_without_a_gradient_stay_with_their_state(kind):
    weight, state = trained(kind, SOME_ROWS, sparse=True)
    assert torch.equal(weight[3], start().detach()[3])
    for value in state.values():
        if isinstance(value, torch.Tensor):
            assert not value[3].any()
            assert value[:3].all()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_dense_and_sparse_gradients_give_the_same_bits(kind, maximize):
    dense, _ = trained(kind, SOME_ROWS, sparse=False, maximize=maximize)
    sparse, _ = trained(kind, SOME_ROWS, sparse=True, maximize=maximize)
    assert torch.equal(dense, sparse)


def test_a_row_of_zeros_in_a_sparse_gradient_is_no_row_of_the_batch():
    weight = start()
    optimizer = sg.optim.LazyAdam([weight], lr=0.1)
    for _ in range(2):
        values = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
        weight.grad = torch.sparse_coo_tensor([[0, 1]], values, (4, 3), check_invariants=True)
        optimizer.step()
    assert torch.equal(weight.detach()[1:], start().detach()[1:])


def test_lazy_adam_is_adam_for_rows_that_always_have_a_gradient():
    every = [[0, 1, 2, 3]] * 4
    weight, _ = trained(sg.optim.LazyAdam, every, sparse=True)
    expected, _ = trained(torch.optim.Adam, every, sparse=False)
    torch.testing.assert_close(weight, expected, rtol=0.0, atol=1e-7)


def test_row_wise_adagrad_adds_the_mean_of_squares():
    weight, state = trained(sg.optim.RowWiseAdagrad, SOME_ROWS, sparse=True, eps=1e-6)
    expected, total = start().detach().clone(), torch.zeros(4)
    for ids, values in gradients(SOME_ROWS):
        for row, value in zip(ids.tolist(), values, strict=True):
            total[row] += (value**2).mean()
            expected[row] -= 0.1 * value / (total[row].sqrt() + 1e-6)
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(state["sum"], total)


@pytest.mark.parametrize("kind", CLASSES)
def test_state_dict_goes_on_where_it_ended(kind):
    weight = start()
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    copied = nn.Parameter(weight.detach().clone())
    other = kind([copied], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, parameter in ((optimizer, weight), (other, copied)):
        parameter.grad = torch.full((4, 3), 0.5)
        one.step()
    assert torch.equal(weight, copied)


@pytest.mark.parametrize("kind", CLASSES)
def test_bad_settings_are_refused(kind):
    with pytest.raises(ValueError, match="lr=-1"):
        kind([start()], lr=-1)
