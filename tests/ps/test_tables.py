"""A table standing where `weight` stands: the numbers of plain PyTorch, only the rows needed."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stratagem._ps.tables.table_parameter import TableParameter
from stratagem.errors import ForeignParameterError

ROWS, WIDTH = 10, 3


class InMemory:
    """Rows in this process, counting what is asked of it."""

    def __init__(self, data):
        self.name, self.data = "table", data
        self.shape, self.dtype = tuple(data.shape), data.dtype
        self.fetched = 0
        self.wholes = 0
        self.shares_memory = False

    def rows_as_asked(self, ids):
        if not self.shares_memory:
            return None
        self.fetched += ids.unique().numel()
        return self.data[ids]

    def rows(self, ids):
        self.fetched += ids.numel()
        assert torch.equal(ids, ids.unique())
        return self.data[ids]

    def whole(self):
        self.wholes += 1
        return self.data

    def update_rows(self, ids, values):
        self.data[ids] = values


@pytest.fixture(params=[False, True], ids=["connection", "memory"])
def source(request):
    made = InMemory(torch.linspace(-2, 2, ROWS * WIDTH).reshape(ROWS, WIDTH).clone())
    made.shares_memory = request.param
    return made


@pytest.fixture
def table(source):
    return TableParameter.over(source)


def dense_gradient(table):
    """All rows of the table's gradient, as a plain tensor."""
    return torch.zeros(tuple(table.shape)) if table.grad is None else table.grad + 0


IDS = torch.tensor([[3, 0, 3], [7, 7, 1]])
BAG = {"input": torch.tensor([1, 2, 4, 2, 9, 0]), "offsets": torch.tensor([0, 2, 2, 4])}

LOOKUPS = {
    "embedding": lambda w: F.embedding(IDS, w),
    "embedding padding": lambda w: F.embedding(IDS, w, padding_idx=7),
    "embedding absent padding": lambda w: F.embedding(IDS, w, padding_idx=-1),
    "embedding int32": lambda w: F.embedding(IDS.int(), w),
    "embedding empty": lambda w: F.embedding(torch.zeros(0, 2, dtype=torch.int64), w),
    "embedding by frequency": lambda w: F.embedding(IDS, w, scale_grad_by_freq=True),
    "torch.embedding": lambda w: torch.embedding(w, IDS, 7),
    "bag mean": lambda w: F.embedding_bag(weight=w, **BAG),
    "bag sum": lambda w: F.embedding_bag(weight=w, mode="sum", **BAG),
    "bag max": lambda w: F.embedding_bag(weight=w, mode="max", **BAG),
    "bag weights": lambda w: F.embedding_bag(
        weight=w, mode="sum", per_sample_weights=torch.arange(6.0), **BAG
    ),
    "bag padding": lambda w: F.embedding_bag(weight=w, padding_idx=2, **BAG),
    "bag last offset": lambda w: F.embedding_bag(
        BAG["input"], w, torch.tensor([0, 2, 6]), include_last_offset=True
    ),
    "bag 2d": lambda w: F.embedding_bag(IDS, w),
    "index tensor": lambda w: w[IDS],
    "index list": lambda w: w[[4, 0, 4]],
    "index negative": lambda w: w[torch.tensor([-1, 2])],
    "index int": lambda w: w[-2],
    "index slice": lambda w: w[2:8:3],
    "index rest": lambda w: w[IDS, 1],
    "index slice rest": lambda w: w[1:4, 1:],
    "index mask": lambda w: w[torch.arange(ROWS) % 3 == 0],
    "index_select": lambda w: w.index_select(0, torch.tensor([5, 5, 2])),
    "torch.index_select": lambda w: torch.index_select(w, -2, torch.tensor([5, 5, 2])),
}

WHOLES = {
    "multiply": lambda w: w * 2,
    "matmul right": lambda w: torch.ones(2, ROWS) @ w,
    "linear": lambda w: F.linear(torch.ones(2, WIDTH), w),
    "norm": lambda w: w.norm(),
    "concatenate": lambda w: torch.cat([w, torch.ones(1, WIDTH), w]),
    "transpose": lambda w: w.t(),
    "index columns": lambda w: w[:, None, 0],
    "index new axis": lambda w: w[None],
    "index_select columns": lambda w: w.index_select(1, torch.tensor([0])),
    "index by two lists": lambda w: w[[1, 2], [0, 1]],
}


def compare(operation, table, source):
    plain = nn.Parameter(source.data.clone())
    expected, got = operation(plain), operation(table)
    torch.testing.assert_close(got, expected)
    weights = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    torch.testing.assert_close(dense_gradient(table), plain.grad)


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup_gives_plain_pytorchs_numbers_and_fetches_only_its_rows(name, table, source):
    compare(LOOKUPS[name], table, source)
    assert source.wholes == 0
    assert source.fetched < ROWS


@pytest.mark.parametrize("name", WHOLES)
def test_any_other_operator_gets_the_whole_table(name, table, source):
    compare(WHOLES[name], table, source)
    assert source.wholes > 0


def test_gradients_of_several_uses_add_up(table, source):
    """Two lookups, the whole, and a second backward before zero_grad."""
    plain = nn.Parameter(source.data.clone())
    for weight in (plain, table):
        (F.embedding(IDS, weight).sum() + 2 * weight[torch.tensor([0, 9])].sum()).backward()
    torch.testing.assert_close(dense_gradient(table), plain.grad)
    assert table.grad_ids.tolist() == [0, 1, 3, 7, 9]
    for weight in (plain, table):
        (weight.sum() + weight[3].sum()).backward()
    torch.testing.assert_close(dense_gradient(table), plain.grad)
    assert table.grad_ids is None


def test_lookup_without_backward_or_without_grad_leaves_nothing(table):
    F.embedding(IDS, table)
    with torch.no_grad():
        assert not F.embedding(IDS, table).requires_grad
    assert table.grad is None


def test_frozen_table_takes_no_gradient(source):
    frozen = TableParameter.over(source, requires_grad=False)
    assert not F.embedding(IDS, frozen).requires_grad
    assert not (frozen * 2).requires_grad


def test_clipping_acts_as_on_the_dense_gradient(table, source):
    plain, other = nn.Parameter(source.data.clone()), nn.Parameter(torch.ones(3))
    norms = []
    for weight in (plain, table):
        other.grad = None
        (F.embedding(IDS, weight).square().sum() + other.sum()).backward()
        norms.append(nn.utils.clip_grad_norm_([weight, other], 1.0))
    torch.testing.assert_close(norms[0], norms[1])
    torch.testing.assert_close(dense_gradient(table), plain.grad)


def test_zero_grad_both_ways_and_setting_grad(table):
    optimizer = torch.optim.SGD([table], lr=0.1)
    for to_none in (True, False):
        F.embedding(IDS, table).sum().backward()
        optimizer.zero_grad(set_to_none=to_none)
        assert table.grad is None if to_none else not table.grad.any()
    F.embedding(IDS, table).sum().backward()
    table.grad = table.grad * 2
    assert float(table.grad.sum()) == 2 * IDS.numel() * WIDTH
    table.grad = torch.ones(ROWS, WIDTH)
    assert table.grad_ids is None
    table.grad = torch.ones(ROWS, WIDTH).to_sparse(1)
    assert table.grad_ids.numel() == ROWS
    with pytest.raises(ValueError, match="does not fit"):
        table.grad = torch.ones(2, 2)


def test_max_norm_shortens_stored_rows_as_plain_pytorch_does(table, source):
    plain = nn.Parameter(source.data.clone())
    options = {"max_norm": 1.0, "norm_type": 2.0}
    torch.testing.assert_close(
        F.embedding(IDS, table, **options), F.embedding(IDS, plain, **options)
    )
    torch.testing.assert_close(source.data, plain.detach())
    bag = {"weight": table, "max_norm": 0.5, **BAG}
    torch.testing.assert_close(F.embedding_bag(**bag), F.embedding_bag(**{**bag, "weight": plain}))
    torch.testing.assert_close(source.data, plain.detach())


def test_sparse_layer_leaves_padding_out_of_its_gradient(table):
    F.embedding(IDS, table, padding_idx=3, sparse=True).sum().backward()
    assert table.grad_ids.tolist() == [0, 1, 7]
    assert table.gradient.sparse


def test_layers_keep_working_with_a_table_as_weight(table, source):
    layer = nn.Embedding(ROWS, WIDTH, padding_idx=1)
    layer.weight = table
    assert layer.weight is table
    plain = nn.Embedding.from_pretrained(source.data, padding_idx=1)
    torch.testing.assert_close(layer(IDS), plain(IDS))
    assert list(layer.parameters()) == [table] or next(layer.parameters()) is table


def test_writing_into_a_table_is_refused_with_advice(table):
    for write in (
        lambda: table.zero_(),
        lambda: table.mul_(2),
        lambda: nn.init.normal_(table),
        lambda: table.__setitem__(0, 1.0),
    ):
        with torch.no_grad(), pytest.raises(ForeignParameterError, match=r"optimizer\.step"):
            write()


def test_copying_and_pickling_are_refused_by_name(table):
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="'table'"):
            attempt(table)


def test_rows_out_of_range_raise_as_plain_pytorch_does(table):
    for bad in (ROWS, -1):
        with pytest.raises(IndexError, match=repr(bad)):
            F.embedding(torch.tensor([0, bad]), table)
    with pytest.raises(IndexError, match="10"):
        table[10]


def test_facts_need_no_rows(table, source):
    facts = (table.shape, table.dtype, table.dim(), table.numel(), len(table), table.requires_grad)
    assert facts == ((ROWS, WIDTH), torch.float32, 2, ROWS * WIDTH, ROWS, True)
    assert isinstance(table, nn.Parameter)
    assert repr(table) == "<TableParameter 'table' (10, 3) torch.float32>"
    assert (source.fetched, source.wholes) == (0, 0)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, ROWS - 1), max_size=6), min_size=1, max_size=4))
def test_any_sequence_of_lookups_sums_to_the_dense_gradient(batches):
    source = InMemory(torch.linspace(-2, 2, ROWS * WIDTH).reshape(ROWS, WIDTH).clone())
    table, plain = TableParameter.over(source), nn.Parameter(source.data.clone())
    for weight in (table, plain):
        for batch in batches:
            ids = torch.tensor(batch, dtype=torch.int64)
            F.embedding(ids, weight).square().sum().backward()
    torch.testing.assert_close(dense_gradient(table), plain.grad)


def many_ids(rows):
    return torch.randint(0, rows, (300, 5), generator=torch.Generator().manual_seed(4))


def test_many_rows_looked_up_have_plain_pytorchs_gradient_bit_for_bit():
    """A batch as in practice, where rows are moved by other ways than a handful of them."""
    source = InMemory(torch.randn(400, 8, generator=torch.Generator().manual_seed(3)))
    table, plain = TableParameter.over(source), nn.Parameter(source.data.clone())
    ids = many_ids(400)
    weights = torch.randn(300, 5, 8, generator=torch.Generator().manual_seed(5))
    (F.embedding(ids, table) * weights).sum().backward()
    (plain.index_select(0, ids.flatten()).view(300, 5, 8) * weights).sum().backward()
    assert torch.equal(dense_gradient(table), plain.grad)


def test_a_lookup_can_be_differentiated_twice():
    """Gradient penalties differentiate a gradient (create_graph=True)."""
    source = InMemory(torch.randn(40, 8, generator=torch.Generator().manual_seed(3)))
    table, plain = TableParameter.over(source), nn.Parameter(source.data.clone())
    ids = torch.tensor([3, 3, 17, 0])
    scale = torch.tensor(1.5, requires_grad=True)
    results = []
    for weight in (table, plain):
        rows = weight[ids] if weight is plain else F.embedding(ids, weight)
        (slope,) = torch.autograd.grad((rows * scale).pow(3).sum(), scale, create_graph=True)
        slope.pow(2).backward()
        results.append(dense_gradient(table) if weight is table else plain.grad)
    torch.testing.assert_close(results[0], results[1])
