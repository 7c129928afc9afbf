"""`ShardedVariable`: SHV-1 … SHV-9, on shards in this process."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg

VALUE = torch.arange(16.0).reshape(8, 2)


def sharded(sizes=(3, 3, 2), value=VALUE, **options):
    parts = torch.split_with_sizes(value, list(sizes))
    return sg.ShardedVariable([sg.Variable(part, **options) for part in parts])


def rows(ids, values, size=(8, 2)):
    return torch.sparse_coo_tensor(torch.tensor([ids]), torch.tensor(values), size)


@pytest.fixture(autouse=True)
def _checked_sparse_tensors():
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield


def test_construction_is_checked():
    """SHV-1."""
    for bad in ([], None, 3, [torch.zeros(2)], [sg.Variable([1.0]), 2.0]):
        with pytest.raises(TypeError, match=r"sg\.Variable"):
            sg.ShardedVariable(bad)
    with pytest.raises(ValueError, match="float64"):
        sg.ShardedVariable([sg.Variable([1.0]), sg.Variable([1.0], dtype=torch.float64)])
    with pytest.raises(ValueError, match="shape"):
        sg.ShardedVariable([sg.Variable([[1.0]]), sg.Variable([[1.0, 2.0]])])
    with pytest.raises(IndexError, match="no axis"):
        sg.ShardedVariable([sg.Variable(1.0)])
    assert sg.ShardedVariable([sg.Variable([1.0])]).shape == (1,)


def test_attributes_of_a_sharded_variable():
    """SHV-2."""
    made = sharded()
    assert (made.shape, made.dtype, made.name) == ((8, 2), torch.float32, "ShardedVariable")
    assert [tuple(part.shape) for part in made] == [(3, 2), (3, 2), (2, 2)]
    assert made.variables == list(made) or len(made.variables) == 3
    assert made.is_sharded_variable
    assert bool(made)
    np.testing.assert_array_equal(made.numpy(), VALUE.numpy())
    for absent in ("read_value", "value", "device", "trainable", "aggregation", "handle"):
        with pytest.raises(AttributeError):
            getattr(made, absent)
    for impossible in (len, float):
        with pytest.raises(TypeError):
            impossible(made)
    with pytest.raises(TypeError):
        made[0] = 1


def test_operators_act_on_the_concatenation():
    """SHV-3, and torch functions take it as a tensor."""
    made = sharded()
    torch.testing.assert_close(made + 1, VALUE + 1)
    torch.testing.assert_close(2 * made - made, VALUE)
    torch.testing.assert_close(made @ torch.ones(2, 1), VALUE @ torch.ones(2, 1))
    torch.testing.assert_close(-made, -VALUE)
    assert bool((made == VALUE).all())
    torch.testing.assert_close(torch.exp(made), torch.exp(VALUE))
    torch.testing.assert_close(sg.convert_to_tensor(made), VALUE)
    for make in (torch.tensor, torch.as_tensor, torch.asarray):
        torch.testing.assert_close(make(made), VALUE)


def test_assignment_needs_the_right_size_and_type():
    """SHV-4 as corrected by 13.1: a wrong size raises."""
    made = sharded()
    assert made.assign(VALUE * 2) is made
    made.assign_add(torch.ones(8, 2)).assign_sub(VALUE)
    torch.testing.assert_close(sg.convert_to_tensor(made), VALUE + 1)
    for bad in (torch.ones(7, 2), torch.ones(9, 2), torch.tensor(1.0), torch.ones(8, 3)):
        with pytest.raises(ValueError, match="shape"):
            made.assign(bad)
    with pytest.raises(ValueError, match="float64"):
        made.assign(torch.ones(8, 2, dtype=torch.float64))
    torch.testing.assert_close(sg.convert_to_tensor(made), VALUE + 1)


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "div", "min", "max", "update"])
def test_scatter_equals_an_unsharded_variables(operation):
    """SHV-5: duplicates accumulate, whatever shard they fall in."""
    delta = rows([7, 0, 3, 7, 2], [[2.0, 3.0]] * 3 + [[4.0, 0.5], [1.0, 1.0]])
    made, plain = sharded(), sg.Variable(VALUE)
    assert getattr(made, f"scatter_{operation}")(delta) is made
    getattr(plain, f"scatter_{operation}")(delta)
    torch.testing.assert_close(sg.convert_to_tensor(made), sg.convert_to_tensor(plain))


def test_scatter_raises_for_rows_that_do_not_fit():
    """SHV-5."""
    made = sharded()
    made.scatter_add(torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0, 2), (8, 2)))
    made.batch_scatter_update(rows([1], [[9.0, 9.0]]))
    assert made[1].tolist() == [9.0, 9.0]
    with pytest.raises(ValueError, match="row id 8"):
        made.scatter_add(rows([8], [[1.0, 1.0]], (9, 2)))
    with pytest.raises(ValueError, match="axes of indices"):
        made.scatter_add(torch.ones(8, 2).to_sparse())
    with pytest.raises(AttributeError, match="sparse"):
        made.scatter_add(torch.ones(8, 2))
    with pytest.raises(NotImplementedError, match="div rule"):
        sharded((2, 3, 3)).scatter_add(rows([1], [[9.0, 9.0]]))


def test_rows_come_in_the_order_asked():
    """SHV-6 as corrected by 13.1."""
    made = sharded()
    ids = torch.tensor([7, 0, 3, 1, 7])
    torch.testing.assert_close(made.sparse_read(ids), VALUE[ids])
    torch.testing.assert_close(made.sparse_read(ids.reshape(5, 1)), VALUE[ids.reshape(5, 1)])
    assert made.sparse_read(torch.tensor([], dtype=torch.int64)).shape == (0, 2)
    with pytest.raises(ValueError, match="out of range"):
        made.sparse_read(torch.tensor([8]))
    with pytest.raises(NotImplementedError, match="div rule"):
        sharded((2, 3, 3)).sparse_read(ids)


INDICES = [0, -1, 5, slice(None), slice(2, 7), slice(7, 1, -2), slice(-20, 20, 3), slice(3, 3)]
INDICES += [(4, 1), (slice(1, 6), 0), (slice(None, None, -1), slice(0, 1)), (slice(3, 3), 0)]
INDICES += [
    (slice(1, 6, 2), slice(None, None, -1)),
    (3, slice(None, None, -1)),
    (..., slice(0, None, -2)),
]
INDICES += [
    (None, 2, slice(None, None, -1)),
    (slice(None), slice(5, 0, -1)),
    (slice(None), slice(-9, 0, -1)),
]
INDICES += [..., (..., 0), None, (None, 2), np.arange(8) % 2 == 0, torch.arange(8) > 4]


@pytest.mark.parametrize("sizes", [(3, 3, 2), (1, 5, 2), (8,)], ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_numpys(index, sizes):
    """SHV-8, empty slices with the right shape (13.1)."""
    key = index.numpy() if isinstance(index, torch.Tensor) else index
    expected = VALUE.numpy()[key]
    np.testing.assert_array_equal(sharded(sizes)[index].numpy(), expected)


def test_indexing_refuses_what_lists_refuse():
    """SHV-8."""
    made = sharded()
    with pytest.raises(IndexError, match="8"):
        made[8]
    with pytest.raises(ValueError, match="zero"):
        made[::0]
    for bad in (torch.tensor([1, 2]), 1.5, [0, 1], slice(torch.tensor(1), None), "a"):
        with pytest.raises(TypeError):
            made[bad]


def test_gradients_flow_through_the_container():
    """SHV-9, LIM-7: plain autograd, into the shards."""
    made = sharded(trainable=True)
    (made * VALUE).sum().backward()
    torch.testing.assert_close(torch.cat([part.grad for part in made]), VALUE)
    made = sharded(trainable=True)
    sg.nn.embedding_lookup(made, torch.tensor([7, 0, 7])).sum().backward()
    assert made.variables[0].grad.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert made.variables[1].grad is None
    assert made.variables[2].grad.tolist() == [[0, 0], [2, 2]]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.tuples(*[st.none() | st.integers(-30, 30)] * 2),
    st.none() | st.integers(-5, 5).filter(bool),
)
def test_any_slice_of_any_shards_is_the_lists(sizes, borders, step):
    value = torch.arange(float(sum(sizes)))
    made = sharded(sizes, value)
    key = slice(*borders, step)
    assert made[key].tolist() == value.tolist()[key]


class TestLookup:
    """`sg.nn`: SHV-7."""

    def test_lookup_keeps_order_and_shape(self):
        ids = torch.tensor([[7, 0], [3, 3]])
        for params in (sharded(), VALUE, sg.Variable(VALUE), torch.nn.Parameter(VALUE)):
            torch.testing.assert_close(sg.nn.embedding_lookup(params, ids), VALUE[ids])

    def test_long_rows_are_returned_shortened_and_stay_as_they_are(self):
        made = sharded()
        found = sg.nn.embedding_lookup(made, torch.tensor([0, 7]), max_norm=2.0)
        torch.testing.assert_close(found.norm(dim=1), torch.tensor([1.0, 2.0]))
        torch.testing.assert_close(sg.convert_to_tensor(made), VALUE)

    def test_bad_ids_are_named(self):
        for params in (sharded(), VALUE):
            with pytest.raises(ValueError, match="-1"):
                sg.nn.embedding_lookup(params, torch.tensor([-1]))
        with pytest.raises(ValueError, match="integers"):
            sg.nn.embedding_lookup(VALUE, torch.tensor([1.0]))

    @pytest.mark.parametrize(
        ("combiner", "expected"),
        [
            ("sum", lambda w, e: (w[:, None] * e).sum(0)),
            ("mean", lambda w, e: (w[:, None] * e).sum(0) / w.sum()),
            ("sqrtn", lambda w, e: (w[:, None] * e).sum(0) / w.square().sum().sqrt()),
        ],
    )
    def test_sparse_lookup_combines(self, combiner, expected):
        where = torch.tensor([[0, 0, 2], [0, 1, 0]])
        ids = torch.sparse_coo_tensor(where, torch.tensor([1, 5, 7]), (3, 2))
        weights = torch.sparse_coo_tensor(where, torch.tensor([0.5, 2.0, 3.0]), (3, 2))
        found = sg.nn.embedding_lookup_sparse(sharded(), ids, weights, combiner=combiner)
        one = expected(torch.tensor([0.5, 2.0]), VALUE[[1, 5]])
        two = expected(torch.tensor([3.0]), VALUE[[7]])
        torch.testing.assert_close(found, torch.stack([one, torch.zeros(2), two]))

    def test_safe_lookup_drops_bad_entries(self):
        """Ids below 0 and weights of 0 or less are left out; empty rows are zeros or a default."""
        where = torch.tensor([[0, 0, 1, 2], [0, 1, 0, 0]])
        ids = torch.sparse_coo_tensor(where, torch.tensor([1, -1, 5, -3]), (4, 2))
        weights = torch.sparse_coo_tensor(where, torch.tensor([1.0, 1.0, 0.0, 1.0]), (4, 2))
        safe = sg.nn.safe_embedding_lookup_sparse
        zeros = torch.zeros(2)
        torch.testing.assert_close(
            safe(sharded(), ids), torch.stack([VALUE[1], VALUE[5], zeros, zeros])
        )
        torch.testing.assert_close(
            safe(sharded(), ids, weights), torch.stack([VALUE[1], zeros, zeros, zeros])
        )
        torch.testing.assert_close(
            safe(sharded(), ids, weights, default_id=2),
            torch.stack([VALUE[1], VALUE[2], VALUE[2], VALUE[2]]),
        )

    def test_bad_arguments_are_explained(self):
        ids = torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.tensor([1]), (1, 1))
        with pytest.raises(ValueError, match="combiner='max'"):
            sg.nn.embedding_lookup_sparse(VALUE, ids, combiner="max")
        with pytest.raises(ValueError, match="sparse"):
            sg.nn.embedding_lookup_sparse(VALUE, torch.tensor([[1]]))
        other = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.tensor([1.0]), (1, 2))
        with pytest.raises(ValueError, match="same indices"):
            sg.nn.embedding_lookup_sparse(VALUE, ids, other)
