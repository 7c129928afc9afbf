"""Random numbers in replicas: own streams, repeatable bit for bit whatever the timing."""

from __future__ import annotations

import importlib
import importlib.util
import threading

import pytest
import torch
import torch.nn.functional as F
from meeting import me
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from stratagem._core.context import current_replica

if importlib.util.find_spec("tqdm"):
    # torch.compile may show a bar, which starts a thread and maps a lock that stay for good.
    tqdm = importlib.import_module("tqdm")
    tqdm.tqdm.monitor_interval = 0
    tqdm.std.TqdmDefaultWriteLock.create_mp_lock()

X = torch.linspace(-1, 1, 64).reshape(8, 8)
MHA = torch.nn.MultiheadAttention(8, 2, dropout=0.5)
LSTM = torch.nn.LSTM(8, 8, 2, dropout=0.5)

DRAWS = {
    "rand": lambda: torch.rand(8),
    "randn": lambda: torch.randn(8),
    "randint": lambda: torch.randint(0, 10_000, (8,)),
    "randperm": lambda: torch.randperm(64),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 10_000),
    "normal": lambda: torch.normal(X, 1.0),
    "normal_": lambda: torch.empty(8).normal_(),
    "uniform_": lambda: torch.empty(8).uniform_(),
    "random_": lambda: torch.empty(8, dtype=torch.int64).random_(),
    "exponential_": lambda: torch.empty(8).exponential_(),
    "log_normal_": lambda: torch.empty(8).log_normal_(),
    "cauchy_": lambda: torch.empty(8).cauchy_(),
    "geometric_": lambda: torch.empty(64).geometric_(0.1),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "bernoulli_": lambda: torch.empty(64).bernoulli_(0.5),
    "multinomial": lambda: torch.multinomial(torch.ones(64), 8),
    "poisson": lambda: torch.poisson(torch.full((64,), 9.0)),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(8), 1.0).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(8)).sample(),
    "binomial": lambda: torch.binomial(torch.full((64,), 100.0), torch.tensor(0.5)),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout_": lambda: F.dropout(X.clone(), 0.5, inplace=True),
    "dropout1d": lambda: F.dropout1d(torch.ones(8, 32, 1), 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(
        torch.ones(8, 32, 2), 0.5, training=True
    ),
    "rrelu": lambda: F.rrelu(X, training=True),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(
        torch.arange(1024.0).reshape(1, 1, 32, 32), 2, output_size=13
    ),
    "attention": lambda: F.scaled_dot_product_attention(
        X[None, None], X[None, None], X[None, None], dropout_p=0.5
    ),
    "multihead_attention": lambda: MHA(X, X, X)[0],
    "lstm": lambda: LSTM(X)[0],
    "initialization": lambda: torch.nn.Linear(8, 8).weight.detach(),
    "trunc_normal_": lambda: torch.nn.init.trunc_normal_(torch.empty(8)),
    "vmap": lambda: torch.func.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(X),
    "checkpoint": lambda: checkpoint(lambda x: F.dropout(x, 0.5), X, use_reentrant=False),
}


@pytest.fixture(scope="module")
def two():
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        strategy.run(lambda: None)  # its threads are the module's, not the first test's
        yield strategy


def seeded(strategy, fn, seed=7):
    torch.manual_seed(seed)
    return strategy.run(fn).values


@pytest.mark.parametrize("name", DRAWS)
def test_streams_differ_and_repeat(two, name):
    """Issue 2.3: each replica has its own stream; the same seed gives the same bits."""
    draw = DRAWS[name]
    first, second = seeded(two, draw)
    assert not torch.equal(first, second), "replicas draw different numbers"
    again = seeded(two, draw)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    other = seeded(two, draw, seed=8)
    assert not torch.equal(first, other[0]), "another seed, other numbers"


def test_timing_does_not_matter(two_parallel):
    """Whichever of two parallel replicas draws first, the numbers are the same."""
    two = two_parallel

    def step(first):
        gate = gates[0]
        if me() != first:
            gate.wait(60)
        drawn = torch.rand(4)
        gate.set()
        return drawn

    results = []
    for first in (0, 1):
        gates = [threading.Event()]
        torch.manual_seed(3)
        results.append(two.run(step, args=(first,)).values)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_runs_continue_the_stream(two):
    """Run after run draws new numbers, and the whole sequence repeats."""

    def sequence():
        torch.manual_seed(1)
        return [two.run(lambda: torch.rand(2)).values for _ in range(3)]

    first, again = sequence(), sequence()
    assert not torch.equal(first[0][0], first[1][0])
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


def test_a_run_without_random_numbers_leaves_the_generator_alone(two):
    """Only a run that draws moves the default generator on."""
    before = torch.get_rng_state()
    two.run(lambda: torch.ones(2).sum())
    assert torch.equal(before, torch.get_rng_state())
    two.run(lambda: torch.rand(1))
    assert not torch.equal(before, torch.get_rng_state())


def test_a_run_that_only_reads_its_state_leaves_the_generator_alone(two):
    """torch.compile and checkpoints save and restore the state. What a replica draws afterwards does not depend on it."""

    def read():
        torch.set_rng_state(torch.get_rng_state())

    def read_and_draw():
        read()
        return torch.rand(3)

    torch.manual_seed(4)
    before = torch.get_rng_state()
    two.run(read)
    assert torch.equal(torch.get_rng_state(), before)
    first = two.run(read_and_draw)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    second = two.run(lambda: torch.rand(3))
    for one, other in zip(
        two.experimental_local_results(first), two.experimental_local_results(second), strict=True
    ):
        assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(after, before)


def test_the_default_stream_outside_is_torchs_own(two):
    """Numbers drawn outside replicas are what plain PyTorch draws."""
    two.run(lambda: None)
    torch.manual_seed(0)
    assert torch.allclose(torch.rand(2), torch.tensor([0.4963, 0.7682]), atol=1e-4)
    one = sg.OneDeviceStrategy("cpu")
    torch.manual_seed(0)
    assert torch.allclose(one.run(lambda: torch.rand(2)), torch.tensor([0.4963, 0.7682]), atol=1e-4)


def test_a_generator_given_is_used(two):
    """An explicit generator stays what the program says."""

    def step():
        return torch.rand(3, generator=torch.Generator().manual_seed(5))

    first, second = two.run(step).values
    assert torch.equal(first, second)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("layer", ["dropout", "rrelu"])
def test_the_backward_pass_uses_the_same_mask(two, layer):
    """The mask drawn forward is the one applied backward."""

    def step():
        x = X.clone().requires_grad_()
        y = F.dropout(x, 0.5) if layer == "dropout" else F.rrelu(x, training=True)
        y.sum().backward()
        return torch.allclose(x.grad * X, y.detach())

    assert two.run(step) is True


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_draws_the_same_mask_twice(two, reentrant):
    """get_rng_state and set_rng_state mean the replica's stream inside one."""

    def step():
        x = torch.ones(1000, requires_grad=True)
        y = checkpoint(lambda t: F.dropout(t * 1.0, 0.5), x, use_reentrant=reentrant)
        between = torch.rand(1)
        y.sum().backward()
        return torch.equal(x.grad, y.detach()), float(between)

    same, between = two.run(step)
    assert same is True
    assert between.values[0] != between.values[1]


def test_rng_functions_in_a_replica(two):
    """manual_seed, fork_rng and the state belong to the replica that calls them."""

    def step():
        torch.manual_seed(11 + me())
        seed = torch.initial_seed()
        state = torch.get_rng_state()
        first = torch.rand(3)
        with torch.random.fork_rng(devices=[]):
            torch.rand(10)
        second = torch.rand(3)
        torch.set_rng_state(state)
        return torch.equal(first, torch.rand(3)), torch.equal(second, torch.rand(3)), seed, first

    before = torch.get_rng_state()
    first_same, second_same, seeds, drawn = two.run(step)
    assert first_same is True
    assert second_same is True
    assert seeds.values == (11, 12)
    assert torch.equal(drawn.values[0], torch.rand(3, generator=torch.Generator().manual_seed(11)))
    # Seeding a replica's stream asks for it once, so the run's base seed is drawn; nothing more.
    assert torch.initial_seed() not in (11, 12)
    assert before.shape == torch.get_rng_state().shape


def test_training_with_dropout_repeats_bit_for_bit(two):
    """Issue 2.3: model, optimizer and dropout; the same seed gives the same weights to the bit."""

    def train():
        torch.manual_seed(5)
        with two.scope():
            model = torch.nn.Sequential(
                torch.nn.Linear(8, 16),
                torch.nn.Dropout(0.5),
                torch.nn.RReLU(),
                torch.nn.Linear(16, 1),
            )
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []
        for _ in range(5):
            x = torch.randn(6, 8)
            parts = sg.PerReplica([x[:4], x[4:]])
            losses.append(two.reduce("sum", two.run(step, args=(parts,)), axis=None))
        return torch.stack(losses), [p.detach().clone() for p in model.parameters()]

    (losses, weights), (again, same) = train(), train()
    assert torch.equal(losses, again)
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def test_meetings_draw_from_the_default_generator(two):
    """What is done once for all replicas uses the one stream, repeatably."""

    def step():
        replica = current_replica()
        return replica.group.rendezvous(
            replica.id, "draw", None, lambda all_: [torch.rand(1)] * len(all_)
        )

    torch.manual_seed(0)
    first = two.run(step)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(1))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_draw_from_the_replicas_streams(two, backend):
    """torch.compile: streams differ; once compiled, runs repeat."""
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend=backend)
    seeded(two, lambda: compiled(X))
    first, second = seeded(two, lambda: compiled(X))
    again = seeded(two, lambda: compiled(X))
    assert not torch.equal(first, second)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    torch._dynamo.reset()
