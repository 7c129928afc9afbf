"""A replica goes on after ``backward()`` until it uses a gradient: what it sees is what it would see if it had waited."""

import copy
import sys

import pytest
import torch
from meeting import me
from torch import nn
from torch.nn import functional as F
from warm_start import run_program

import stratagem as sg
from stratagem._core.torch_patches import private_api

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(9, 2, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Another test of this process may have called torch.compile."""
    monkeypatch.setattr(private_api, "compiler_used", lambda: False)


def cut(strategy, *tensors):
    size = strategy.num_replicas_in_sync
    return tuple(sg.PerReplica(list(torch.tensor_split(each, size))) for each in tensors)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def pair(strategy):
    """Return a model under the strategy and its plain twin, each with an optimizer."""
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = make()
    return model, optimizer, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_plain_step_changes_turns_at_the_step_alone(compiled, make_strategy, monkeypatch):
    """If torch.compile was used, a gradient may be read while the compiler locks out other replicas: they wait at once."""
    monkeypatch.setattr(private_api, "compiler_used", lambda: compiled)
    strategy = make_strategy("central2")
    model, optimizer, *_ = pair(strategy)
    seen = []

    def step(x, y):
        seen.append(f"begins {me()}")
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        seen.append(f"after backward {me()}")
        optimizer.step()
        seen.append(f"after step {me()}")

    strategy.run(step, args=cut(strategy, X, Y))
    places = [
        "begins 0",
        "after backward 0",
        "begins 1",
        "after backward 1",
        "after step 1",
        "after step 0",
    ]
    if compiled:
        places = [
            "begins 0",
            "begins 1",
            "after backward 1",
            "after backward 0",
            "after step 0",
            "after step 1",
        ]
    assert seen == places


@pytest.mark.process
def test_a_call_of_the_compiler_is_noticed_before_it_compiles():
    code = (
        "import torch\n"
        "from stratagem._core.torch_patches import private_api\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "optimizer.zero_grad()\n"
        "before = private_api.compiler_used()\n"
        "torch.compile(model)\n"
        "print(before, private_api.compiler_used())\n"
        "torch._dynamo.reset()\n"
        "print(private_api.compiler_used())\n"
    )
    ended = run_program(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.split() == ["False", "True", "True"]


LOOKS = {
    "reads": lambda model, seen: seen.append([p.grad.clone() for p in model.parameters()]),
    "clips": lambda model, seen: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "scales": lambda model, seen: [p.grad.mul_(0.5) for p in model.parameters()],
    "replaces": lambda model, seen: [setattr(p, "grad", p.grad * 2) for p in model.parameters()],
    "zeroes": lambda model, seen: model.zero_grad(),
    "deletes": lambda model, seen: [delattr(p, "grad") for p in model.parameters()],
    "copies": lambda model, seen: copy.deepcopy(next(model.parameters())),
    "writes": lambda model, seen: [p.data.sub_(p.grad) for p in model.parameters()],
    "backward": lambda model, seen: F.mse_loss(
        model(torch.ones(1, 4)), torch.ones(1, 2)
    ).backward(),
}


@pytest.mark.parametrize("how", LOOKS)
@pytest.mark.parametrize("kind", ["central3", "mirrored2"])
def test_code_after_backward_finds_the_gradient_of_the_whole_batch(how, kind, make_strategy):
    strategy = make_strategy(kind)
    model, optimizer, plain, alone = pair(strategy)
    found, expected = [], []

    def step(model, optimizer, x, y, seen):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        LOOKS[how](model, seen)
        optimizer.step()

    for _ in range(3):
        strategy.run(lambda x, y: step(model, optimizer, x, y, found), args=cut(strategy, X, Y))
        step(plain, alone, X, Y, expected)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    size = strategy.num_replicas_in_sync
    assert len(found) == size * len(expected)
    torch.testing.assert_close(found, [each for each in expected for _ in range(size)])


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_replica_may_look_at_its_gradients(who, make_strategy):
    """Logging in one replica: the others do not wait there, and nothing is out of step."""
    strategy = make_strategy("central3")
    model, optimizer, plain, alone = pair(strategy)
    norms, expected = [], []

    def norm(model):
        return torch.stack([p.grad.norm() for p in model.parameters()]).norm()

    def step(x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if me() == who:
            norms.append(norm(model))
        optimizer.step()
        if me() == who:
            norms.append(norm(model))

    for _ in range(3):
        strategy.run(step, args=cut(strategy, X, Y))
        alone.zero_grad()
        F.mse_loss(plain(X), Y).backward()
        expected += [norm(plain)] * 2
        alone.step()
    torch.testing.assert_close(norms, expected)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_hook_acts_before_backward_returns(make_strategy):
    """Hooks on parameters are code of the user's: no replica goes on before it ran."""
    strategy = make_strategy("central2")
    model, optimizer, *_ = pair(strategy)
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("hook"))

    def step(x, y):
        F.mse_loss(model(x), y).backward()
        seen.append(me())
        optimizer.step()

    strategy.run(step, args=cut(strategy, X, Y))
    assert seen == ["hook", 1, 0]


@pytest.mark.parametrize("who", [0, 1])
def test_a_gradient_with_a_graph_in_one_replica_is_refused(who, make_strategy):
    strategy = make_strategy("central2")
    model, optimizer, *_ = pair(strategy)
    before = copy.deepcopy(model.state_dict())

    def step(x, y):
        F.mse_loss(model(x), y).backward(create_graph=me() == who)
        optimizer.step()

    with pytest.raises(sg.errors.ReplicaError, match="create_graph=True"):
        strategy.run(step, args=cut(strategy, X, Y))
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("who", [0, 1])
def test_a_replica_without_a_backward_pass_is_named(who, make_strategy):
    strategy = make_strategy("central2")
    model, optimizer, *_ = pair(strategy)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        if me() == who:
            loss.backward()
        optimizer.step()

    with pytest.raises(sg.errors.ReplicaMismatch, match=r"the end of backward\(\)"):
        strategy.run(step, args=cut(strategy, X, Y))


class Counting:
    """A step that moves a number and a tensor between backward and step."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.steps, self.average = 0, torch.zeros(())

    def __call__(self, x, y):
        self.optimizer.zero_grad()
        self.loss = F.mse_loss(self.model(x), y)
        self.loss.backward()
        self.steps += 1
        self.average.mul_(0.5).add_(self.steps)
        self.optimizer.step()


def test_what_a_step_moves_after_backward_moves_once(make_strategy):
    strategy = make_strategy("central2")
    model, optimizer, plain, alone = pair(strategy)
    mine, reference = Counting(model, optimizer), Counting(plain, alone)
    for _ in range(4):
        strategy.run(mine, args=cut(strategy, X, Y))
        reference(X, Y)
    assert (mine.steps, mine.average) == (reference.steps, reference.average)
