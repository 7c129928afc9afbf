"""Dynamic embeddings train as plain embeddings over the same ids, under every strategy and without one."""

import copy
import io

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem._core.key_index import PROTECTED

P = sg.partitioners
OPTIMIZERS = [
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.SparseAdam,
    sg.optim.LazyAdam,
    sg.optim.RowWiseAdagrad,
]
POOL = torch.randint(-(2**62), 2**62, (60,), generator=torch.Generator().manual_seed(0))


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        places = torch.randint(0, 60, (16, 3), generator=generator)
        yield POOL[places], torch.randn(16, generator=generator)


class Model(nn.Module):
    """One dynamic table and one bag."""

    def __init__(self, **settings):
        super().__init__()
        self.one = sg.nn.DynamicEmbedding(4, max_rows=600, seed=5, **settings)
        self.bag = sg.nn.DynamicEmbeddingBag(4, mode="mean", max_rows=600, seed=6, **settings)
        self.out = nn.Linear(8, 1)

    def forward(self, ids):
        found = torch.cat([self.one(ids[:, 0]), self.bag(ids)], 1)
        return self.out(found).squeeze(1)


class Plain(nn.Module):
    """The same over positions in the pool of ids, with plain layers."""

    def __init__(self, like):
        super().__init__()
        self.one = nn.Embedding(60, 4, sparse=True)
        self.bag = nn.EmbeddingBag(60, 4, mode="mean", sparse=True)
        self.out = copy.deepcopy(like.out)
        like.eval()
        with torch.no_grad():
            self.one.weight.copy_(like.one(POOL))  # what rows begin with
            self.bag.weight.copy_(like.bag(POOL[:, None]))
        like.train()
        assert len(like.one) == len(like.bag) == 0

    def forward(self, ids):
        places = (ids[..., None] == POOL).int().argmax(-1)
        return self.out(torch.cat([self.one(places[:, 0]), self.bag(places)], 1)).squeeze(1)


def optimizers_of(model, kind):
    tables = kind([model.one.weight, model.bag.weight], lr=0.1)
    return tables, torch.optim.SGD(model.out.parameters(), lr=0.1)


def step_of(model, optimizers):
    def step(batch):
        ids, target = batch
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(ids), target)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


def make(kind, **settings):
    torch.manual_seed(0)
    model = Model(**settings)
    return model, optimizers_of(model, kind)


def trained_plainly(kind):
    torch.manual_seed(0)
    plain = Plain(Model())
    step = step_of(plain, optimizers_of(plain, kind))
    losses = torch.stack([step(batch) for batch in batches()])
    return losses, plain


def assert_same(model, losses, expected, *, rtol=1e-5):
    expected_losses, plain = expected
    torch.testing.assert_close(losses, expected_losses, rtol=rtol, atol=1e-6)
    for table, layer in ((model.one, plain.one), (model.bag, plain.bag)):
        ids, rows = table.export()
        places = (ids[:, None] == POOL).int().argmax(1)
        assert len(table) == len(ids)
        torch.testing.assert_close(rows, layer.weight.detach()[places], rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_a_strategy(kind):
    model, optimizers = make(kind)
    step = step_of(model, optimizers)
    losses = torch.stack([step(batch) for batch in batches()])
    assert_same(model, losses, trained_plainly(kind))
    assert len(model.bag) == len(torch.unique(torch.cat([ids for ids, _ in batches()])))


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: sg.OneDeviceStrategy("cpu:0"),
        lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    ],
    ids=["one", "central", "mirrored"],
)
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, sg.optim.LazyAdam])
def test_on_one_machine(strategy, kind):
    with strategy() as made:
        with made.scope():
            model, optimizers = make(kind)
        list(made.run_steps(step_of(model, optimizers), batches()))
    expected = trained_plainly(kind)
    assert_same(model, expected[0], expected, rtol=1e-4)


@pytest.fixture(scope="module")
def cluster():
    with sg.LocalCluster(workers=1, ps=3, in_process=True) as made:
        yield made


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_on_parameter_servers(cluster, kind, shards):
    """Neither the number of servers nor the order in which rows are made changes a number."""
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(shards)) as strategy:
        with strategy.scope():
            model, optimizers = make(kind)
        losses = torch.stack(list(strategy.run_steps(step_of(model, optimizers), batches())))
        assert_same(model, losses, trained_plainly(kind))


def test_all_parameters_in_one_optimizer(cluster):
    """The keys are a frozen parameter of integers: no optimizer minds."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = Model()
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        list(strategy.run_steps(step_of(model, [optimizer]), batches()))
        assert len(model.bag) > 0


def test_ids_that_are_not_admitted_give_zeros_and_are_not_trained(cluster):
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            table = sg.nn.DynamicEmbedding(2, max_rows=600, admit_after=2)
            optimizer = torch.optim.SGD([table.weight], lr=0.1)

        def step(ids):
            optimizer.zero_grad()
            rows = table(ids)
            rows.sum().backward()
            optimizer.step()
            return rows.detach()

        first, second = strategy.run_steps(step, [torch.tensor([1, 2]), torch.tensor([1, 3])])
        assert not first.any()
        assert second[0].any()
        assert not second[1].any()
        assert table.export()[0].tolist() == [1]


def evicting_step(table, optimizer):
    def step(ids):
        optimizer.zero_grad()
        table(ids).sum().backward()
        optimizer.step()

    return step


def rows_after_eviction(strategy, table, optimizer):
    """Train id 1, evict it by id 2, and return the table."""
    steps = [torch.tensor([1])] * 3 + [torch.tensor([9])] * (PROTECTED + 1) + [torch.tensor([2])]
    list(strategy.run_steps(evicting_step(table, optimizer), steps))
    return table.export()


def test_a_row_given_to_another_id_begins_with_fresh_optimizer_state(cluster):
    """On servers and on one device alike."""
    found = []
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        for each in (strategy, sg.OneDeviceStrategy("cpu:0")):
            with each.scope():
                table = sg.nn.DynamicEmbedding(2, max_rows=2, evict="age", init="zeros")
                optimizer = torch.optim.Adagrad([table.weight], lr=0.1)
            found.append(rows_after_eviction(each, table, optimizer))
    for ids, rows in found:
        assert ids.tolist() == [2, 9]
        torch.testing.assert_close(rows[0], torch.full((2,), -0.1))


def test_a_full_table_is_named_with_its_path(cluster):
    """Of 26 tables, an error must say which one is full (issue 17, point 8)."""
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            model = nn.ModuleDict({"bag": sg.nn.DynamicEmbeddingBag(4, max_rows=20)})
        coordinator = sg.ClusterCoordinator(strategy)
        text = "DynamicEmbeddingBag 'bag': .*is full: it was made for 20 rows"
        with pytest.raises(MemoryError, match=text):
            coordinator.schedule(lambda: model["bag"](torch.arange(100)[:, None])).get(timeout_s=60)


def test_evaluation_makes_no_rows():
    table = sg.nn.DynamicEmbedding(3, seed=4)
    table.eval()
    first = table(POOL)
    with torch.no_grad():
        table.train()
        assert torch.equal(table(POOL), first)
    assert len(table) == 0
    assert torch.equal(table(POOL).detach(), first)
    assert len(table) == 60


def test_state_dict_copies_and_pickles_hold_keys_and_rows():
    table = sg.nn.DynamicEmbedding(3, max_rows=100)
    expected = table(POOL[:20]).detach()
    other = sg.nn.DynamicEmbedding(3, max_rows=100)
    other.load_state_dict(table.state_dict())
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    for one in (other, copy.deepcopy(table), torch.load(file, weights_only=False)):
        assert len(one) == 20
        assert torch.equal(one(POOL[:20]), expected)


def test_frozen_layers_are_exported_without_stratagem():
    table = sg.nn.DynamicEmbedding(3, max_rows=100)
    expected = table(POOL[:20]).detach()
    program = torch.export.export(table.frozen(), (POOL[:5],))
    assert torch.equal(program.module()(POOL[:5]), expected[:5])
    assert "stratagem" not in str(program.graph)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_frozen_bags_are_bags(mode):
    bag = sg.nn.DynamicEmbeddingBag(4, mode=mode, seed=1, include_last_offset=True)
    ids, offsets = POOL[:9], torch.tensor([0, 2, 2, 9])
    expected = bag(ids, offsets).detach()
    plain = bag.frozen()
    torch.testing.assert_close(plain(ids, offsets), expected)
    program = torch.export.export(plain, (ids, offsets))
    torch.testing.assert_close(program.module()(ids, offsets), expected)
    assert "stratagem" not in str(program.graph)
    rows = bag(POOL[:4].view(2, 2)).detach()
    torch.testing.assert_close(plain(POOL[:4].view(2, 2)), rows)
    if mode == "sum":
        weights = torch.tensor([[2.0, 0.5], [1.0, 0.0]])
        weighted = bag(POOL[:4].view(2, 2), per_sample_weights=weights).detach()
        found = plain(POOL[:4].view(2, 2), per_sample_weights=weights)
        torch.testing.assert_close(found, weighted)
        known, unknown = POOL[:1], torch.tensor([12345])
        both = plain(torch.cat([known, unknown])[None])
        torch.testing.assert_close(both, plain(known[None]))  # an unknown id is a zero
    empty = sg.nn.DynamicEmbeddingBag(4, mode=mode).frozen()
    assert empty(torch.tensor([[5, 0]])).tolist() == [[0.0] * 4]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_rows": 0}, "max_rows=0"),
        ({"init": "ones"}, "init='ones'"),
        ({"evict": "size"}, "evict='size'"),
        ({"admit_probability": 2.0}, "admit_probability=2.0"),
        ({"admit_probability": 0.5, "admit_after": 2}, "not both"),
        ({"max_age": 0}, "max_age=0"),
        ({"max_age": 63}, "max_age=63: expected at least 64"),
    ],
)
def test_bad_settings_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        sg.nn.DynamicEmbedding(4, **settings)


def test_ids_must_be_integers():
    with pytest.raises(ValueError, match=r"torch\.float32"):
        sg.nn.DynamicEmbedding(4)(torch.ones(2))
