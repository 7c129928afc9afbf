"""Tensors all replicas share never get R replicas' gradients unnoticed (issue 2, section 3)."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stratagem as sg
from stratagem._core.torch_patches import autograd_engine

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(2))


def cut(strategy, *tensors):
    size = strategy.num_replicas_in_sync
    return tuple(sg.PerReplica(list(torch.tensor_split(each, size))) for each in tensors)


def refused(strategy, step, match, args=None):
    with pytest.raises(sg.errors.ForeignParameterError, match=match):
        strategy.run(step, args=cut(strategy, X, Y) if args is None else args)


SCOPE = r"inside `with strategy.scope\(\):`"


@pytest.fixture
def searches(monkeypatch):
    """The replica numbers of the passes whose graph was searched."""
    found = []
    plain = autograd_engine._PassCheck._search

    def counting(check):
        found.append(check._replica.id)
        return plain(check)

    monkeypatch.setattr(autograd_engine._PassCheck, "_search", counting)
    return found


def test_a_single_replica_refuses_the_model_of_several(several):
    """A step would leave the parameters as they are: they get gradients from their own replicas only."""
    with several.scope():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    with sg.OneDeviceStrategy("cpu:0") as alone:
        refused(alone, step, rf"belongs to {type(several).__name__}.*{SCOPE}", args=(X, Y))
        plain = nn.Linear(4, 2)
        before = plain.weight.detach().clone()
        model, optimizer = plain, torch.optim.SGD(plain.parameters(), lr=0.1)
        alone.run(step, args=(X, Y))
    assert not torch.equal(plain.weight, before)


@pytest.mark.parametrize("way", ["tensor", "autograd", "inputs", "edge"])
def test_backward_in_run_of_a_model_made_outside_is_refused(way, several):
    """Whoever would step afterwards: the gradients would be R times too large."""
    model = nn.Linear(4, 2)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        if way == "tensor":
            loss.backward()
        elif way == "autograd":
            torch.autograd.backward([loss])
        elif way == "inputs":
            loss.backward(inputs=list(model.parameters()))
        else:
            torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))

    refused(several, step, rf"\((2, 4|2,)\).*belongs to no strategy.*{SCOPE}")


def test_a_bare_leaf_beside_a_model_of_the_scope_is_refused_without_an_optimizer(several):
    bare = torch.ones(2, requires_grad=True)
    with several.scope():
        model = nn.Linear(4, 2)

    def step(x, y):
        F.mse_loss(model(x) * bare, y).backward()

    refused(several, step, r"shape \(2,\).*make it an nn\.Parameter of an nn\.Module")


def test_a_leaf_that_is_the_root_itself_is_refused(several):
    scalar = torch.tensor(3.0, requires_grad=True)
    refused(several, scalar.backward, r"shape \(\).*belongs to no strategy", args=())


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_central_parameters_taken_outside_run_may_be_used_in_the_loss(aggregation, make_strategy):
    """A weight penalty over a list made outside counts, in every pass, with accumulated gradients too."""
    strategy = make_strategy("central2", gradient_aggregation=aggregation)
    with strategy.scope():
        model = nn.Linear(4, 2)
    reference = copy.deepcopy(model)
    taken = list(model.parameters())

    def step(x, y, model=model, parameters=taken, share=1.0):
        (
            F.mse_loss(model(x), y) * share + sum(p.square().sum() for p in parameters) * share
        ).backward()
        (sum(p.abs().sum() for p in parameters) * share).backward()

    share = 0.5 if aggregation == "sum" else 1.0
    for _ in range(3):
        strategy.run(lambda x, y: step(x, y, share=share), args=cut(strategy, X[:4], Y[:4]))
        step(X[:4], Y[:4], reference, list(reference.parameters()))
        for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad)


def test_tensors_of_one_replica_take_gradients_as_always(several):
    """An adversarial input, a module made in the replica: nobody shares them."""
    with several.scope():
        model = nn.Linear(4, 2)

    def step(x, y):
        x = x.clone().requires_grad_()
        own = nn.Linear(2, 2)
        with torch.no_grad():
            own.weight.copy_(torch.eye(2))
            own.bias.zero_()
        F.mse_loss(own(model(x)), y, reduction="sum").backward()
        assert own.weight.grad is not None
        return x.grad

    for _ in range(3):
        got = several.gather(several.run(step, args=cut(several, X, Y)), axis=0)
    plain = X.clone().requires_grad_()
    F.mse_loss(model(plain), Y, reduction="sum").backward()
    torch.testing.assert_close(got, plain.grad)


def test_a_step_like_the_ones_before_is_not_searched_again(two, searches):
    """Nothing that grows with the graph is paid in the steady state."""
    with two.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for _ in range(10):
        two.run(step, args=cut(two, X, Y))
    assert searches.count(0) == searches.count(1) < 10  # the 1st, 2nd, 4th and 8th of a kind
    searches.clear()
    for _ in range(4):
        two.run(step, args=cut(two, X, Y))
    assert searches == []


def test_a_foreign_twin_is_found_although_the_step_looks_the_same(two, searches):
    """As many nodes, as many operators: but other leaves of ours get a gradient, namely none."""
    with two.scope():
        ours = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    theirs = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def step(x, y, model):
        F.mse_loss(model(x), y).backward()

    for _ in range(5):
        two.run(step, args=(*cut(two, X, Y), ours))
    searches.clear()
    refused(two, step, SCOPE, args=(*cut(two, X, Y), theirs))
    assert set(searches) == {0, 1}


def test_one_replica_trains_models_made_anywhere():
    """With nobody to share with, the numbers are plain PyTorch's."""
    model = nn.Linear(4, 2)
    reference = copy.deepcopy(model)
    F.mse_loss(reference(X), Y).backward()
    with sg.OneDeviceStrategy("cpu:0") as one:
        one.run(lambda: F.mse_loss(model(X), Y).backward())
    assert torch.equal(model.weight.grad, reference.weight.grad)


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_gradients_made_in_run_are_stepped_outside_with_the_same_numbers(
    aggregation, make_strategy
):
    """13.7: backward() in run, clipping and step() outside, uneven batches: as one device."""
    for kind in ("central2", "central3", "mirrored2"):
        strategy = make_strategy(kind, gradient_aggregation=aggregation)
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        plain.load_state_dict(model.state_dict())
        plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)

        def loss(model, x, y, aggregation=aggregation):
            return F.mse_loss(model(x), y, reduction=aggregation)

        for rows in (5, 1, 6):
            strategy.run(
                lambda x, y, model=model, loss=loss: loss(model, x, y).backward(),
                args=cut(strategy, X[:rows], Y[:rows]),
            )
            loss(plain, X[:rows], Y[:rows]).backward()
            for a, b in ((model, optimizer), (plain, plain_optimizer)):
                nn.utils.clip_grad_norm_(a.parameters(), 0.5)
                b.step()
                b.zero_grad()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
