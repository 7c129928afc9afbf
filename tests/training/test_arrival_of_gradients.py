"""Gradients that arrive in some replicas only: parameters used by one replica, several passes, any place of zero_grad.

The reference is plain PyTorch on one device, with the loss of the global batch (issue 20).
"""

import random

import pytest
import torch
from torch import nn

import stratagem as sg

ALL = ("a", "b", "c", "rows")
ZEROING = ("optimizer", "optimizer in place", "model", "one", "one in place")


class Parts(nn.Module):
    """Three vectors and an embedding; a loss may use any of them."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(4)) for _ in range(3))
        self.rows = nn.Embedding(5, 4, sparse=sparse)

    def losses(self, x, used):
        """Return the loss of each row."""
        vectors = [
            self.rows(torch.tensor([1, 2])).sum(0) if n == "rows" else getattr(self, n)
            for n in used
        ]
        return sum((x @ vector).square() for vector in vectors)


class Program:
    """A model with its optimizer, and the actions of a step.

    Actions are ``("backward", names used by each replica, how often)``, ``("zero", how, name)`` and ``("step",)``.
    """

    def __init__(self, sparse=False):
        self.model = Parts(sparse)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def zero(self, how, name):
        grad = getattr(self.model, name).grad if name != "rows" else self.model.rows.weight.grad
        if how == "optimizer":
            self.optimizer.zero_grad()
        elif how == "optimizer in place":
            self.optimizer.zero_grad(set_to_none=False)
        elif how == "model":
            self.model.zero_grad()
        elif how == "one in place":
            if grad is not None:
                grad.zero_()
        else:
            (self.model.rows.weight if name == "rows" else getattr(self.model, name)).grad = None

    def act(self, actions, loss_of):
        for kind, *given in actions:
            if kind == "backward":
                used, times = given
                loss = loss_of(used)
                for left in reversed(range(times)):
                    loss.backward(retain_graph=left > 0)
            elif kind == "zero":
                self.zero(*given)
            else:
                self.optimizer.step()

    def in_replica(self, actions, x):
        if len(x):
            me = sg.get_replica_context().replica_id_in_sync_group
            self.act(actions, lambda used: self.model.losses(x, used[me]).mean())

    def on_one_device(self, actions, parts, aggregation):
        rows = sum(map(len, parts))

        def loss_of(used):
            each = [
                self.model.losses(x, names) for x, names in zip(parts, used, strict=True) if len(x)
            ]
            return sum(one.mean() if aggregation == "sum" else one.sum() / rows for one in each)

        self.act(actions, loss_of)

    def state(self):
        """Return parameters and gradients."""
        found = {}
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            found[name] = (
                parameter.detach().clone(),
                None if grad is None else grad.to_dense().clone(),
            )
        return found


def check(strategy, steps, sparse=False):
    """Run steps (actions, rows of the batch, zeroing outside) in replicas and on one device; compare after each."""
    size, aggregation = strategy.num_replicas_in_sync, strategy.gradient_aggregation
    with strategy.scope():
        mine = Program(sparse)
    plain = Program(sparse)
    generator = torch.Generator().manual_seed(1)
    for actions, rows, outside in steps:
        parts = list(torch.tensor_split(torch.randn(rows, 4, generator=generator), size))
        plain.on_one_device(actions, parts, aggregation)
        strategy.run(
            lambda x, actions=actions: mine.in_replica(actions, x), args=(sg.PerReplica(parts),)
        )
        if outside is not None:
            mine.zero(*outside)
            plain.zero(*outside)
        torch.testing.assert_close(mine.state(), plain.state(), rtol=1e-3, atol=1e-4)


@pytest.fixture(params=["mean", "sum"])
def aggregation(request):
    """Both ways to aggregate gradients."""
    return request.param


@pytest.fixture(params=["central2", "mirrored2"])
def pair(request, aggregation, make_strategy):
    """Each strategy with two replicas and each aggregation."""
    return make_strategy(request.param, gradient_aggregation=aggregation)


def only(*names):
    """Names that each of two replicas uses: all of them in the first, these in the second."""
    return [list(ALL), list(names)]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("first", [True, False], ids=["replica 0", "replica 1"])
def test_a_later_pass_that_only_some_replicas_take_part_in(pair, first, sparse):
    """The gradient of the first pass remains in the replicas that the second does not reach."""
    used = only("a") if first else only("a")[::-1]
    actions = [
        ("zero", "optimizer", "a"),
        ("backward", [ALL, ALL], 1),
        ("backward", used, 1),
        ("step",),
    ]
    check(pair, [(actions, 5, None)] * 3, sparse)


@pytest.mark.parametrize("first", [True, False], ids=["replica 0", "replica 1"])
@pytest.mark.parametrize("outside", [None, *ZEROING])
def test_a_parameter_that_one_replica_uses_without_zero_grad_in_the_step(pair, first, outside):
    """Gradients accumulate, or code outside clears them, also in leaves of replicas that do not use the parameter."""
    used = only("b") if first else only("b")[::-1]
    actions = [("backward", used, 1), ("step",)]
    zeroing = None if outside is None else (outside, "a")
    check(pair, [(actions, 4, zeroing), ([("step",)], 4, None), (actions, 4, zeroing)])


@pytest.mark.parametrize("how", ZEROING)
def test_zero_grad_at_every_place(pair, how):
    passes = [
        ("backward", only("a"), 1),
        ("backward", only("a", "c")[::-1], 2),
        ("step",),
        ("backward", [ALL, "b"], 1),
    ]
    for place in range(len(passes) + 1):
        actions = [*passes[:place], ("zero", how, "a"), *passes[place:]]
        check(pair, [(actions, 5, None)] * 2)


def test_accumulation_over_steps_after_one_with_a_replica_without_rows(pair):
    """The replica that had no rows finds the whole gradient, not what another has added to it since."""
    actions = [("backward", [ALL, ALL], 1)]
    check(pair, [(actions, 4, None), (actions, 1, None), (actions, 4, None), (actions, 3, None)])


def test_clearing_a_sparse_gradient_in_place_reaches_the_central_parameter(pair):
    actions = [("backward", [ALL, ALL], 1)]
    check(pair, [(actions, 4, None), ([("zero", "optimizer in place", "a")], 4, None)], sparse=True)


def random_steps(seed, size):
    """Return steps of random actions."""
    rng = random.Random(seed)

    def action():
        kind = rng.choices(["backward", "zero", "step"], [5, 3, 2])[0]
        if kind == "backward":
            used = [rng.sample(ALL, rng.randint(1, len(ALL))) for _ in range(size)]
            return kind, used, rng.randint(1, 2)
        return (kind, rng.choice(ZEROING), rng.choice(ALL)) if kind == "zero" else (kind,)

    return [
        (
            [action() for _ in range(rng.randint(1, 6))],
            rng.choice([1, size, 2 * size, 2 * size + 1]),
            rng.choice([None, None, *((how, rng.choice(ALL)) for how in ZEROING)]),
        )
        for _ in range(rng.randint(2, 4))
    ]


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(k, marks=pytest.mark.soak) for k in range(1, 8))]
)
@pytest.mark.parametrize("kind", ["central2", "central3", "mirrored2"])
def test_random_programs(kind, aggregation, part, make_strategy):
    strategy = make_strategy(kind, gradient_aggregation=aggregation)
    for seed in range(20 * part, 20 * part + 20):
        check(strategy, random_steps(seed, strategy.num_replicas_in_sync), sparse=seed % 2 == 1)
