"""Tables larger than the coordinator: initialised on their servers, never built here."""

import resource
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stratagem as sg
from stratagem._ps.tables.table_parameter import TableParameter
from stratagem.errors import ForeignParameterError

P = sg.partitioners


@pytest.fixture(scope="module")
def cluster():
    """One worker and two parameter servers, as threads of this process."""
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as made:
        yield made


@pytest.fixture
def strategy(cluster, monkeypatch):
    """Tensors of 4 KB and more count as too large here."""
    monkeypatch.setenv("STRATAGEM_REMOTE_TABLE_BYTES", "4096")
    with sg.ParameterServerStrategy(cluster.resolver, P.FixedShardsPartitioner(2)) as made:
        yield made


@pytest.fixture
def coordinator(strategy):
    with sg.ClusterCoordinator(strategy) as made:
        yield made


def fetch(coordinator, fn):
    value = coordinator.schedule(fn)
    coordinator.join(timeout_s=120)
    return value.get()


def test_an_embedding_is_planned_and_made_by_the_servers(strategy, coordinator):
    """The usual nn.Embedding: standard normal rows, a padding row of zeros."""
    with strategy.scope():
        layer = nn.Embedding(1000, 8, padding_idx=700)
        small = nn.Embedding(10, 8)
    assert isinstance(layer.weight, TableParameter)
    assert not isinstance(small.weight, TableParameter)
    rows = fetch(coordinator, lambda: layer(torch.arange(1000)).detach())
    assert rows.shape == (1000, 8)
    assert not rows[700].any()
    assert abs(float(rows.mean())) < 0.05
    assert abs(float(rows.std()) - 1) < 0.05
    assert not torch.equal(rows[:500], rows[500:])
    torch.testing.assert_close(layer(torch.tensor([3, 999])).detach(), rows[[3, 999]])


def test_the_same_seed_makes_the_same_table(strategy, coordinator):
    def make():
        torch.manual_seed(5)
        with strategy.scope():
            return nn.Embedding(1000, 8)

    one, two = make(), make()
    ids = torch.tensor([0, 499, 500, 999])
    assert torch.equal(one(ids), two(ids))


@pytest.mark.parametrize(
    ("initialise", "low", "high", "std"),
    [
        (lambda w: nn.init.uniform_(w, -2, 2), -2, 2, 4 / 12**0.5),
        (lambda w: nn.init.constant_(w, 3.0), 3, 3, 0),
        (lambda w: nn.init.zeros_(w), 0, 0, 0),
        (lambda w: nn.init.normal_(w, std=0.1), -1, 1, 0.1),
        (lambda w: nn.init.xavier_uniform_(w), -0.08, 0.08, (2 / 1008) ** 0.5),
        (lambda w: nn.init.kaiming_uniform_(w, a=5**0.5), -0.36, 0.36, (1 / 24) ** 0.5),
        (lambda w: w.data.uniform_(0, 1), 0, 1, 1 / 12**0.5),
    ],
    ids="uniform constant zeros normal xavier kaiming data".split(),
)
def test_initialisers_run_on_the_servers(strategy, initialise, low, high, std):
    with strategy.scope():
        layer = nn.Embedding(1000, 8)
        initialise(layer.weight)
    rows = layer(torch.arange(1000)).detach()
    assert low - 1e-6 <= float(rows.min()) <= float(rows.max()) <= high + 1e-6
    assert abs(float(rows.std()) - std) <= 0.05 * std + 1e-6


class Own(nn.Module):
    """A module of the user's own, with factories that fill."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1000, 8))
        self.ones = nn.Parameter(torch.ones(1000, 8))
        self.sevens = nn.Parameter(torch.full((1000, 8), 7.0))


def test_factories_that_fill(strategy):
    with strategy.scope():
        made = Own()
    with strategy.scope():
        looking = nn.Embedding(1000, 8)
        with pytest.raises(ForeignParameterError, match="trunc_normal_"):
            nn.init.trunc_normal_(looking.weight)
    ids = torch.arange(1000)
    assert abs(float(F.embedding(ids, made.table).detach().std()) - 1) < 0.05
    assert float(made.ones[ids].detach().sum()) == 8000
    assert float(made.sevens[999].detach().sum()) == 56


def test_it_trains_like_any_other(strategy, coordinator):
    """Adagrad on rows; the optimizer's state is never built here either."""
    with strategy.scope():
        layer = nn.Embedding(1000, 8)
        nn.init.ones_(layer.weight)
        optimizer = torch.optim.Adagrad(layer.parameters(), lr=0.5)
    plain = nn.Embedding.from_pretrained(torch.ones(1000, 8), freeze=False)
    other = torch.optim.Adagrad(plain.parameters(), lr=0.5)
    ids = torch.tensor([1, 501, 1, 999])

    def training(layer, optimizer):
        def step():
            optimizer.zero_grad()
            layer(ids).square().sum().backward()
            optimizer.step()

        return step

    for _ in range(3):
        fetch(coordinator, training(layer, optimizer))
        training(plain, other)()
    every = torch.arange(1000)
    torch.testing.assert_close(layer(every).detach(), plain(every).detach())


def test_whole_values_can_be_loaded(strategy):
    value = torch.arange(8000.0).reshape(1000, 8)
    with strategy.scope():
        layer = nn.Embedding(1000, 8)
    layer(torch.tensor([0]))
    layer.load_state_dict({"weight": value})
    assert torch.equal(layer(torch.tensor([3, 998])).detach(), value[[3, 998]])
    with pytest.raises(ForeignParameterError, match="are on parameter servers already"):
        nn.init.zeros_(layer.weight)


@pytest.mark.parametrize(
    "use",
    [
        lambda data: data.sum(),
        lambda data: data[3] + 1,
        lambda data: torch.cat([data, data]),
        lambda data: data + 1,
        lambda data: data.add_(1),
        lambda data: F.embedding(torch.tensor([1]), data),
        lambda data: torch.tril(data),
    ],
)
def test_large_data_made_under_the_scope_is_refused_with_the_remedy(strategy, use):
    with (
        strategy.scope(),
        pytest.raises(ForeignParameterError, match=r"outside the scope|nn\.init"),
    ):
        use(torch.zeros(1000, 8))


def test_a_bad_threshold_is_explained(cluster, monkeypatch):
    monkeypatch.setenv("STRATAGEM_REMOTE_TABLE_BYTES", "much")
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        with pytest.raises(ValueError, match="'much'"), strategy.scope():
            pass


@pytest.mark.process
def test_the_coordinator_does_not_hold_the_table(cluster, monkeypatch):
    """64 MB of rows on servers in other processes; this process grows by much less."""
    monkeypatch.setenv("STRATAGEM_REMOTE_TABLE_BYTES", str(1 << 20))
    with sg.LocalCluster(workers=1, ps=2) as apart:
        with sg.ParameterServerStrategy(apart.resolver, P.FixedShardsPartitioner(2)) as strategy:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with strategy.scope():
                layer = nn.Embedding(4_000_000, 4)
                torch.optim.Adagrad(layer.parameters(), lr=0.1)
            found = layer(torch.tensor([3_999_999])).detach()
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert float(found.abs().sum()) > 0
    assert grown < 16 << 10  # kilobytes


def resident_bytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


@pytest.mark.process
def test_a_server_holds_its_rows_their_state_and_little_more(monkeypatch):
    """Issue 4.5: at most 1.1 times parameters and optimizer state; small things aside, 4 MB."""
    monkeypatch.setenv("STRATAGEM_REMOTE_TABLE_BYTES", str(1 << 20))
    rows, width = 1_000_000, 16
    with sg.LocalCluster(workers=1, ps=1) as apart:
        pid = apart.pid("ps", 0)
        with sg.ParameterServerStrategy(apart.resolver) as strategy:

            def train(layer, optimizer):
                def step(ids):
                    optimizer.zero_grad()
                    layer(ids).sum().backward()
                    optimizer.step()

                # Rows in every page: state that is still zero takes no memory.
                every_page = torch.arange(0, layer.num_embeddings, 32)
                coordinator.schedule(step, args=(every_page,))
                coordinator.join(timeout_s=120)

            def make(rows):
                with strategy.scope():
                    layer = nn.Embedding(rows, width)
                    return layer, torch.optim.Adagrad(layer.parameters(), lr=0.1)

            with sg.ClusterCoordinator(strategy) as coordinator:
                small = make(100_000)  # what the server imports and sets up for a first step
                train(*small)
                before = resident_bytes(pid)
                large = make(rows)
                train(*large)
                grown = resident_bytes(pid) - before
    needed = rows * width * 4 * 2  # Adagrad keeps one number per parameter
    assert 0.9 * needed <= grown <= 1.1 * needed + (4 << 20)


def test_a_hook_on_it_is_refused_before_and_after_its_first_use(strategy, coordinator):
    """It used to be put on a copy, and never called."""
    with strategy.scope():
        layer = nn.Embedding(1000, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match="gradient exists only as rows"):
            layer.weight.register_hook(lambda gradient: gradient)
        with pytest.raises(ValueError, match="gradient exists only as rows"):
            layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        assert fetch(coordinator, lambda: layer(torch.tensor([1])).numel()) == 8
