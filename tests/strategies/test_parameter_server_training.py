"""With one worker, training on parameter servers gives plain PyTorch's weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stratagem as sg
from stratagem.errors import ForeignParameterError, UnsupportedOptimizer

P = sg.partitioners


@pytest.fixture(scope="module")
def cluster():
    """One worker and two parameter servers, as threads of this process."""
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as made:
        yield made


class Ranker(nn.Module):
    """A little of everything: a bag, a shared table, a dense part, statistics."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.words = nn.Embedding(13, 4, padding_idx=2, sparse=sparse)
        self.tags = nn.EmbeddingBag(7, 4, mode="sum", sparse=sparse)
        self.hidden = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 1)

    def forward(self, words, tags):
        found = torch.cat([self.words(words).mean(1), self.tags(tags)], 1)
        return self.out(F.relu(self.norm(self.hidden(found)))).squeeze(1)


class Tables(nn.Module):
    """Only what can have sparse gradients."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 4, sparse=True)
        self.tags = nn.EmbeddingBag(7, 4, mode="sum", sparse=True)

    def forward(self, words, tags):
        return (self.words(words).mean(1) * self.tags(tags)).sum(1)


class BareTables(nn.Module):
    """Sparse gradients of parameters that belong to no embedding layer (DLRM's QREmbeddingBag)."""

    def __init__(self):
        super().__init__()
        self.words = nn.Parameter(torch.randn(13, 4))
        self.tags = nn.Parameter(torch.randn(7, 4))

    def forward(self, words, tags):
        words = F.embedding_bag(words, self.words, mode="mean", sparse=True)
        return (words * F.embedding_bag(tags, self.tags, mode="sum", sparse=True)).sum(1)


def batches(count=5):
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield (
            torch.randint(0, 13, (6, 3), generator=generator),
            torch.randint(0, 7, (6, 2), generator=generator),
            torch.randn(6, generator=generator),
        )


def step_of(model, optimizer, *, clip=None):
    def step(words, tags, target):
        optimizer.zero_grad()
        loss = F.mse_loss(model(words, tags), target)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.item()

    return step


def train_plainly(model, optimizer, *, clip=None, after=lambda: None):
    step = step_of(model, optimizer, clip=clip)
    losses = []
    for batch in batches():
        losses.append(step(*batch))
        after()
    return losses


def train_on_servers(strategy, model, optimizer, *, clip=None, after=lambda: None):
    with sg.ClusterCoordinator(strategy) as coordinator:
        step = step_of(model, optimizer, clip=clip)
        values = []
        for batch in batches():
            values.append(coordinator.schedule(step, args=batch))
            after()
        coordinator.join(timeout_s=120)
        state = copy.deepcopy(model.state_dict())
        return coordinator.fetch(values), state


def assert_same(losses, state, plain_losses, plain):
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses))
    torch.testing.assert_close(dict(state), dict(plain.state_dict()))


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "LazyAdam": (sg.optim.LazyAdam, {"lr": 0.01}),
    "RowWiseAdagrad": (sg.optim.RowWiseAdagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
}
PARTITIONERS = {
    "whole": None,
    "sharded": P.FixedShardsPartitioner(2),
    "rows": P.MaxSizePartitioner(max_shard_bytes=64),
}


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trained_weights_equal_plain_pytorch(cluster, name, partitioner):
    """Issue 4.2: every optimizer, sharded and not; buffers included."""
    make, options = OPTIMIZERS[name]
    torch.manual_seed(1)
    plain = Ranker()
    with sg.ParameterServerStrategy(cluster.resolver, PARTITIONERS[partitioner]) as strategy:
        with strategy.scope():
            model = Ranker()
            model.load_state_dict(plain.state_dict())
            optimizer = make(model.parameters(), **options)
        losses, state = train_on_servers(strategy, model, optimizer)
    assert_same(losses, state, train_plainly(plain, make(plain.parameters(), **options)), plain)


@pytest.mark.parametrize("tables", [Tables, BareTables])
@pytest.mark.parametrize("partitioner", ["whole", "sharded"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SparseAdam, {"lr": 0.05}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (sg.optim.LazyAdam, {"lr": 0.05}),
        (sg.optim.RowWiseAdagrad, {"lr": 0.1}),
    ],
    ids=["SparseAdam", "SGD", "Adagrad", "LazyAdam", "RowWiseAdagrad"],
)
def test_sparse_gradients_equal_plain_pytorch(cluster, make, options, partitioner, tables):
    """Lookups with ``sparse=True`` and optimizers that take their gradients."""
    torch.manual_seed(1)
    plain = tables()
    with sg.ParameterServerStrategy(cluster.resolver, PARTITIONERS[partitioner]) as strategy:
        with strategy.scope():
            model = tables()
            model.load_state_dict(plain.state_dict())
            optimizer = make(list(model.parameters()), **options)
        losses, state = train_on_servers(strategy, model, optimizer)
    expected = train_plainly(plain, make(list(plain.parameters()), **options))
    assert_same(losses, state, expected, plain)


def both(cluster, make_optimizer, *, partitioner="sharded", prepare=lambda model: None, **how):
    """Train the same thing both ways and compare."""
    torch.manual_seed(1)
    plain = Ranker()
    prepare(plain)
    with sg.ParameterServerStrategy(cluster.resolver, PARTITIONERS[partitioner]) as strategy:
        with strategy.scope():
            model = Ranker()
            model.load_state_dict(plain.state_dict())
            prepare(model)
            optimizer, after = make_optimizer(model)
        losses, state = train_on_servers(strategy, model, optimizer, after=after, **how)
    optimizer, after = make_optimizer(plain)
    assert_same(losses, state, train_plainly(plain, optimizer, after=after, **how), plain)


def nothing():
    pass


def test_clipping_in_the_worker(cluster):
    """The norm over rows is the norm of the gradient."""
    both(cluster, lambda m: (torch.optim.SGD(m.parameters(), lr=0.5), nothing), clip=0.1)


def test_learning_rate_from_a_scheduler_on_the_coordinator(cluster):
    """Each closure sees the rate of the time it was scheduled."""

    def make(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5).step

    both(cluster, make)


def test_parameter_groups_and_frozen_parameters(cluster):
    def make(model):
        rest = [*model.hidden.parameters(), *model.out.parameters()]
        groups = [{"params": model.words.parameters(), "lr": 0.5}, {"params": rest}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9), nothing

    both(cluster, make, prepare=lambda model: model.out.weight.requires_grad_(False))


def test_two_optimizers_in_one_step(cluster):
    """Tables by Adagrad, the rest by Adam."""
    torch.manual_seed(1)
    plain = Ranker()

    def make(model):
        tables = [*model.words.parameters(), *model.tags.parameters()]
        rest = [p for p in model.parameters() if all(p is not t for t in tables)]
        return torch.optim.Adagrad(tables, lr=0.1), torch.optim.Adam(rest, lr=0.01)

    def step_with(model, first, second):
        def step(words, tags, target):
            first.zero_grad()
            second.zero_grad()
            loss = F.mse_loss(model(words, tags), target)
            loss.backward()
            first.step()
            second.step()
            return loss.item()

        return step

    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            model = Ranker()
            model.load_state_dict(plain.state_dict())
            optimizers = make(model)
        with sg.ClusterCoordinator(strategy) as coordinator:
            step = step_with(model, *optimizers)
            found = [coordinator.schedule(step, args=batch) for batch in batches()]
            coordinator.join(timeout_s=120)
            losses, state = coordinator.fetch(found), copy.deepcopy(model.state_dict())
    step = step_with(plain, *make(plain))
    assert_same(losses, state, [step(*batch) for batch in batches()], plain)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 4)
        self.out = nn.Linear(4, 13, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words, tags):
        return self.out(self.words(words).mean(1)).mean(1)


@pytest.mark.parametrize("partitioner", ["whole", "sharded"])
def test_tied_weights_stay_tied(cluster, partitioner):
    """A table looked up in one layer and used whole in another gets both gradients."""
    torch.manual_seed(1)
    plain = Tied()
    with sg.ParameterServerStrategy(cluster.resolver, PARTITIONERS[partitioner]) as strategy:
        with strategy.scope():
            model = Tied()
            model.load_state_dict(plain.state_dict())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses, state = train_on_servers(strategy, model, optimizer)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    assert_same(losses, state, train_plainly(plain, optimizer), plain)


def test_several_steps_in_one_function(cluster):
    """The second step of a function sees the first one's update."""
    torch.manual_seed(1)
    plain = Ranker()
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            model = Ranker()
            model.load_state_dict(plain.state_dict())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        step = step_of(model, optimizer)
        with sg.ClusterCoordinator(strategy) as coordinator:
            every = list(batches())
            losses = coordinator.schedule(lambda: [step(*batch) for batch in every]).fetch()
            state = copy.deepcopy(model.state_dict())
    expected = train_plainly(plain, torch.optim.Adam(plain.parameters(), lr=0.05))
    assert_same(losses, state, expected, plain)


def test_whole_tensor_optimizers_are_refused_on_shards_by_name(cluster):
    """Issue 4.2."""
    for make in (torch.optim.Adafactor, torch.optim.LBFGS):
        with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as strategy:
            with strategy.scope():
                model = nn.Linear(4, 4)
                optimizer = make(model.parameters())
            with sg.ClusterCoordinator(strategy) as coordinator:
                with pytest.raises(UnsupportedOptimizer, match=make.__name__):
                    coordinator.schedule(lambda: optimizer.zero_grad())


def test_adafactor_works_on_unsharded_variables(cluster):
    both(cluster, lambda m: (torch.optim.Adafactor(m.parameters()), nothing), partitioner="whole")


@pytest.fixture(scope="module")
def pair():
    """Two workers: neither may write trained parameters."""
    with sg.LocalCluster(workers=2, ps=2, in_process=True) as made:
        yield made


def test_writing_a_parameter_in_a_function_is_explained(pair):
    """What a function writes into its own copy would be lost; the servers' value is put back."""
    with sg.ParameterServerStrategy(pair.resolver) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1)
            nn.init.ones_(model.weight)

        def write():
            with torch.no_grad():
                model.weight.mul_(5)

        with sg.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(write)
            with pytest.raises(ForeignParameterError, match="'weight' was written in place"):
                coordinator.join(timeout_s=120)
            value = coordinator.schedule(lambda: model.weight.detach().clone())
            assert value.fetch().tolist() == [[1.0, 1.0]]


def test_writing_through_data_is_explained_too(pair):
    """No version tells of it (weights clipped as for WGANs), and it would hide the servers' writes."""
    with sg.ParameterServerStrategy(pair.resolver) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
            for parameter in model.parameters():
                nn.init.ones_(parameter)

        def clip():
            for parameter in model.parameters():
                parameter.data.clamp_(-0.01, 0.01)

        def look():
            return [parameter.detach().clone() for parameter in model.parameters()]

        with sg.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(clip)
            with pytest.raises(ForeignParameterError, match="was written in place"):
                coordinator.join(timeout_s=120)
            with torch.no_grad():
                model[0].weight.fill_(3.0)  # on the coordinator: reaches the server
            first, *others = coordinator.schedule(look).get()
            assert first.tolist() == [[3.0, 3.0]]
            assert all(bool((other == 1).all()) for other in others)


def test_an_optimizer_made_outside_scope_is_explained_not_copied(cluster):
    """Workers would train copies nobody sees; a model without an optimizer may be copied."""
    elsewhere = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(elsewhere.parameters(), lr=0.1)
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with sg.ClusterCoordinator(strategy) as coordinator:
            with pytest.raises(ForeignParameterError, match=r"inside `with strategy\.scope\(\):`"):
                coordinator.schedule(lambda: optimizer.step())
            with pytest.raises(ForeignParameterError, match="SGD"):
                coordinator.schedule(lambda o: o.step(), args=(optimizer,))
            x = torch.ones(1, 2)
            value = coordinator.schedule(lambda: elsewhere(x).detach())
            torch.testing.assert_close(value.get(), elsewhere(x).detach())
