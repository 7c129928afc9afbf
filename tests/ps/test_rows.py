"""Rows taken, put, sorted and summed: what torch's own operators give, by faster ways."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem._ps import rows
from stratagem._ps.rows import put_rows, sort_ids, sum_rows, take_rows


@pytest.fixture(scope="module", params=["as installed", "without kernels"], autouse=True)
def implementation(request):
    """Both implementations; see also `test_row_kernels.py`."""
    before = rows.kernels
    rows.kernels = before if request.param == "as installed" else None
    yield
    rows.kernels = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 3), (7, 2, 2), (7, 1), (7, 0), (7,)])
@pytest.mark.parametrize("ids", [[], [5], [0, 3, 6]])
def test_rows_are_taken_and_put_as_torch_does(dtype, shape, ids):
    """Moving rows as pieces of memory gives what index_select and index_copy_ give."""
    table = torch.arange(7.0).reshape(7, *[1] * (len(shape) - 1)).expand(shape).to(dtype).clone()
    chosen = torch.tensor(ids, dtype=torch.int64)
    taken = take_rows(table, chosen)
    assert torch.equal(taken, table.index_select(0, chosen))
    expected = table.clone().index_copy_(0, chosen, taken * 2 + 1)
    put_rows(table, chosen, taken * 2 + 1)
    assert torch.equal(table, expected)


def test_rows_of_a_table_that_is_not_in_one_piece():
    """A transposed table has no rows in one piece; it is moved by torch."""
    table = torch.arange(12.0).reshape(3, 4).t()
    chosen = torch.tensor([1, 3])
    taken = take_rows(table, chosen)
    assert torch.equal(taken, table.index_select(0, chosen))
    put_rows(table, chosen, torch.zeros(2, 3))
    assert torch.equal(table[chosen], torch.zeros(2, 3))


@given(st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), max_size=40), st.booleans())
def test_sorted_ids_are_those_of_torch_unique(ids, doubled):
    """Whatever the ids, the largest 64 bits hold included; equal ones keep their order."""
    asked = torch.tensor(ids * 2 if doubled else ids, dtype=torch.int64)
    found = sort_ids(asked)
    unique, places = torch.unique(asked, return_inverse=True)
    assert torch.equal(found.unique, unique)
    assert torch.equal(found.places, places)
    assert torch.equal(found.order, torch.argsort(asked, stable=True))
    assert torch.equal(asked[found.order][found.starts], unique)


def test_ids_keep_their_shape_and_may_be_of_any_integer_type():
    for dtype in (torch.uint8, torch.int32, torch.int64):
        found = sort_ids(torch.tensor([[9, 2, 9], [2, 0, 9]], dtype=dtype))
        assert found.unique.tolist() == [0, 2, 9]
        assert found.unique.dtype == torch.int64
        assert found.places.tolist() == [[2, 1, 2], [1, 0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "rows"), [(20, 9), (3000, 40), (3000, 10**6)])
def test_many_rows_are_taken_and_summed_bit_for_bit_as_torch_does(dtype, count, rows):
    """Few and many, with few and with many repetitions: the same additions in the same order."""
    random = torch.Generator().manual_seed(count + rows)
    table = torch.randn(min(rows, 5000), 16, generator=random, dtype=dtype)
    ids = torch.randint(0, rows, (count,), generator=random)
    found = sort_ids(ids)
    values = torch.randn(count, 16, generator=random, dtype=dtype)
    expected = torch.zeros(found.unique.numel(), 16, dtype=dtype)
    for place, value in zip(found.places.tolist(), values, strict=True):
        expected[place] += value
    assert torch.equal(sum_rows(values, found), expected)
    chosen = ids % table.shape[0]
    assert torch.equal(take_rows(table, chosen), table.index_select(0, chosen))


def test_rows_of_a_gradient_that_is_not_in_one_piece_are_summed():
    """A gradient expanded from one number (of a plain sum) has no rows in memory."""
    found = sort_ids(torch.randint(0, 50, (1000,), generator=torch.Generator().manual_seed(1)))
    ones = torch.ones(()).expand(1000, 16)
    counts = torch.bincount(found.places, minlength=found.unique.numel())
    assert torch.equal(sum_rows(ones, found), counts.float().unsqueeze(1).expand(-1, 16))
