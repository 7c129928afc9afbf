"""Every optimizer of torch.optim, schedulers, groups and gradient handling (issue 2, section 3)."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stratagem as sg

BATCHES = [
    (
        torch.randn(n, 4, generator=torch.Generator().manual_seed(n)),
        torch.randn(n, 2, generator=torch.Generator().manual_seed(n + 100)),
    )
    for n in (5, 1, 7, 2)
]

NEEDS_CLOSURE = {"LBFGS"}
SPARSE_ONLY = {"SparseAdam"}  # trained in test_equivalence_modules
MATRICES_ONLY = {"Muon"}
OPTIMIZERS = sorted(
    name
    for name, found in vars(torch.optim).items()
    if inspect.isclass(found)
    and issubclass(found, torch.optim.Optimizer)
    and found is not torch.optim.Optimizer
)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def parts(strategy, *tensors):
    size = strategy.num_replicas_in_sync
    if size == 1:
        return tensors
    return tuple(sg.PerReplica(list(torch.tensor_split(each, size))) for each in tensors)


def make_optimizer(name, model):
    if name in MATRICES_ONLY:
        return getattr(torch.optim, name)([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    return getattr(torch.optim, name)(model.parameters(), lr=0.02)


def test_the_list_of_optimizers_is_torchs():
    """A new optimizer in torch shows up here by itself."""
    assert {"SGD", "Adam", "AdamW", "Adagrad", "LBFGS", "RMSprop", "SparseAdam"} <= set(OPTIMIZERS)
    assert len(OPTIMIZERS) >= 13


@pytest.mark.parametrize("name", [o for o in OPTIMIZERS if o not in NEEDS_CLOSURE | SPARSE_ONLY])
def test_optimizer_trains_the_same(name, usual):
    # Adam-like optimizers divide by the root of tiny numbers: the first steps amplify rounding.
    sg.testing.assert_equivalent(
        mlp,
        lambda model: make_optimizer(name, model),
        step,
        BATCHES,
        usual,
        rtol=2e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("arguments", [
    {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}, {"maximize": True},
    {"foreach": True}, {"fused": True}, {"momentum": 0.9, "dampening": 0.5},
])  # fmt: skip
def test_variants_of_sgd_train_the_same(arguments, two):
    sg.testing.assert_equivalent(
        mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.05, **arguments), step, BATCHES, two
    )


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_trains_the_same(search, strategy):
    """The optimizer steps once; each time it calls its closure, every replica calls its own."""

    def closure_step(model, optimizer, batch):
        x, y = batch

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)

    # A line search amplifies rounding: the order of additions differs between replicas and one device.
    sg.testing.assert_equivalent(
        mlp, lbfgs, closure_step, BATCHES[:2], strategy, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_a_closure_returns_the_loss_of_the_whole_batch(aggregation, make_strategy):
    """An optimizer that needs no closure evaluates it once; ``step`` returns the loss over all rows."""
    strategy = make_strategy("central2", gradient_aggregation=aggregation)
    with strategy.scope():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = copy.deepcopy(model)
    x = torch.arange(12.0).reshape(4, 3)
    share = 0.5 if aggregation == "sum" else 1.0

    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean() * share
            loss.backward()
            return loss

        return optimizer.step(closure=closure)

    loss = strategy.run(step, args=(sg.PerReplica(list(x.chunk(2))),))
    wanted = reference(x).square().mean()
    wanted.backward()
    torch.testing.assert_close(strategy.local_results(loss)[0], wanted.detach())
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


def test_an_error_in_a_closure_ends_the_run(two):
    """The thread of the optimizer's step ends too; the next run works."""
    with two.scope():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters())

    def fail():
        raise KeyError("no batch")

    with pytest.raises(KeyError, match="no batch"):
        two.run(lambda: optimizer.step(fail))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    before = model(torch.ones(1, 3)).item()
    two.run(lambda: optimizer.step(closure))
    assert abs(model(torch.ones(1, 3)).item()) < abs(before)


def test_several_optimizers_and_models_train_the_same(strategy):
    """Two models, two optimizers, one of them stepped every other batch."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = mlp(), mlp()

        def forward(self, x):
            return self.a(x) - self.b(x)

    def optimizers(model):
        return (
            torch.optim.SGD(model.a.parameters(), lr=0.1),
            torch.optim.Adam(model.b.parameters(), lr=0.01),
        )

    def both(model, opts, batch):
        x, y = batch
        for opt in opts:
            opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        for opt in opts:
            opt.step()

    sg.testing.assert_equivalent(Pair, optimizers, both, BATCHES, strategy)


def test_adversarial_training_with_frozen_halves_trains_the_same(strategy):
    """requires_grad_ toggled inside the step, two losses, two optimizers, as GANs do."""

    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = nn.Linear(4, 2), nn.Linear(2, 1)

    def optimizers(model):
        return (
            torch.optim.RMSprop(model.generator.parameters(), lr=0.01),
            torch.optim.RMSprop(model.critic.parameters(), lr=0.01),
        )

    def gan_step(model, opts, batch):
        x, y = batch
        for p in model.critic.parameters():
            p.requires_grad_(True)
        opts[1].zero_grad()
        with torch.no_grad():
            fake = model.generator(x)
        (model.critic(fake).mean() - model.critic(y).mean()).backward()
        opts[1].step()
        for p in model.critic.parameters():
            p.requires_grad_(False)
        opts[0].zero_grad()
        (-model.critic(model.generator(x))).mean().backward()
        opts[0].step()

    sg.testing.assert_equivalent(Gan, optimizers, gan_step, BATCHES, strategy)


def test_parameter_groups_and_a_frozen_part_train_the_same(strategy):
    def optimizer(model):
        model[0].requires_grad_(False)
        made = torch.optim.AdamW([{"params": [model[0].weight, model[0].bias], "lr": 0.5}], lr=0.1)
        made.add_param_group({"params": model[2].weight, "lr": 0.05, "weight_decay": 0.0})
        made.add_param_group({"params": [model[2].bias]})
        return made

    sg.testing.assert_equivalent(mlp, optimizer, step, BATCHES, strategy)


SCHEDULERS = {
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o, 0.1),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
    "CosineAnnealingWarmRestarts": (
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2)
    ),
}


@pytest.mark.parametrize("inside", [False, True], ids=["outside run", "inside run"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_step_once_per_step_without_warnings(name, inside, strategy):
    """The learning rates and weights are those of plain PyTorch, wherever the scheduler is stepped."""

    def train(scope, run, cut):
        torch.manual_seed(0)
        with scope:
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = SCHEDULERS[name](optimizer)
        arguments = (1.0,) if name == "ReduceLROnPlateau" else ()

        def whole(x, y):
            step(model, optimizer, (x, y))
            if inside:
                scheduler.step(*arguments)

        rates = []
        for batch in BATCHES:
            run(whole, cut(batch))
            if not inside:
                scheduler.step(*arguments)
            rates.append(scheduler.get_last_lr())
        return model, rates

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step")  # torch's own
        plain, wanted = train(warnings.catch_warnings(), lambda f, a: f(*a), lambda b: b)
        ours, rates = train(strategy.scope(), strategy.run, lambda b: parts(strategy, *b))
    torch.testing.assert_close(torch.tensor(rates), torch.tensor(wanted))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_gradients_accumulate_over_runs_until_a_step(set_to_none, where, strategy):
    """Two runs of backward, then a step; zero_grad and step inside or outside run."""

    def train(scope, run, cut):
        torch.manual_seed(0)
        with scope:
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def backward(x, y):
            F.mse_loss(model(x), y).backward()

        def finish():
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

        for k in range(3):
            run(backward, cut(BATCHES[k]))
            run(backward, cut(BATCHES[k + 1]))
            grads = [p.grad.clone() for p in model.parameters()]
            if where == "inside":
                run(finish, ())
            else:
                finish()
        return model, grads, [p.grad for p in model.parameters()]

    plain, wanted, left = train(warnings.catch_warnings(), lambda f, a: f(*a), lambda b: b)
    ours, grads, remaining = train(strategy.scope(), strategy.run, lambda b: parts(strategy, *b))
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(remaining, left, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_gradients_accumulate_within_one_run(strategy):
    """Micro-batches: several backward passes and then one step, all in one function."""

    def micro(model, optimizer, batch):
        x, y = batch
        optimizer.zero_grad()
        for scale in (0.5, 1.5):
            (F.mse_loss(model(x * scale), y) / 2).backward()
        optimizer.step()

    sg.testing.assert_equivalent(
        mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), micro, BATCHES, strategy
    )


CLIPPINGS = {
    "norm": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
    "norm without foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=False),
    "value": lambda ps: nn.utils.clip_grad_value_(ps, 0.01),
    "by hand": lambda ps: [setattr(p, "grad", p.grad.clamp(-0.01, 0.01)) for p in ps],
    "in place": lambda ps: [p.grad.mul_(0.5) for p in ps],
}


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
@pytest.mark.parametrize("name", CLIPPINGS)
def test_clipping_acts_on_the_aggregated_gradient(name, aggregation, make_strategy):
    """KER-6, as amended: clipping inside the step sees what one device would see."""
    strategy = make_strategy("central2", gradient_aggregation=aggregation)

    def clipped(model, optimizer, batch):
        x, y = batch
        optimizer.zero_grad()
        # A sum loss is what "sum" aggregates to the same number as one device.
        loss = F.mse_loss(model(x), y, reduction=aggregation)
        loss.backward()
        CLIPPINGS[name](list(model.parameters()))
        optimizer.step()

    sg.testing.assert_equivalent(
        mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), clipped, BATCHES, strategy
    )


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_gradients_by_autograd_grad_are_aggregated_at_step(aggregation, make_strategy):
    """torch.autograd.grad and p.grad = ... by hand meet no backward(); step() aggregates them."""
    strategy = make_strategy("central3", gradient_aggregation=aggregation)

    def by_hand(model, optimizer, batch):
        x, y = batch
        loss = F.mse_loss(model(x), y, reduction=aggregation)
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            p.grad = g
        optimizer.step()

    sg.testing.assert_equivalent(
        mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.02), by_hand, BATCHES, strategy
    )


def test_sum_aggregation_accumulates_without_counting_twice(make_strategy):
    strategy = make_strategy("mirrored2", gradient_aggregation="sum")

    def micro(model, optimizer, batch):
        x, y = batch
        optimizer.zero_grad()
        for scale in (0.5, 1.5, 1.0):
            F.mse_loss(model(x * scale), y, reduction="sum").backward()
        optimizer.step()

    sg.testing.assert_equivalent(
        mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.01), micro, BATCHES, strategy
    )


def test_gradient_penalty_with_double_backward_trains_the_same(strategy):
    """autograd.grad(create_graph=True) with respect to the inputs, row by row."""

    def penalised(model, optimizer, batch):
        x, _ = batch
        x = x.clone().requires_grad_()
        optimizer.zero_grad()
        out = model(x).sum(1)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + (grad.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()

    sg.testing.assert_equivalent(
        mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.05), penalised, BATCHES, strategy
    )


def test_checkpointed_segments_train_the_same(strategy):
    """Both kinds of activation checkpointing; the reentrant one runs a backward inside a backward."""
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):

        def recomputed(model, optimizer, batch, reentrant=reentrant):
            x, y = batch
            optimizer.zero_grad()
            hidden = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=reentrant)
            F.mse_loss(model[2](hidden), y).backward()
            optimizer.step()

        sg.testing.assert_equivalent(
            mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.05), recomputed, BATCHES, strategy
        )
