"""``torch.compile(model)`` in replicas: gradients and updates equal those of plain PyTorch (issue 20, point 2)."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stratagem as sg

if importlib.util.find_spec("tqdm"):
    # torch.compile may show a progress bar, which maps a lock that stays until the process ends.
    importlib.import_module("tqdm").std.TqdmDefaultWriteLock.create_mp_lock()

# Inductor starts a compiler when its cache is cold.
pytestmark = pytest.mark.process

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch):
    """A compiler that remembers nothing. Replicas that compile at once leave its progress bar's thread."""
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    model[1].momentum = None  # statistics of equal halves: their mean over the replicas is exact
    model[1].eval()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def zero_at_the_end(model, compiled, optimizer, x, y):
    F.mse_loss(compiled(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def fill_with_zeros(model, compiled, optimizer, x, y):
    F.mse_loss(compiled(x), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return torch.zeros(())


def never_zero(model, compiled, optimizer, x, y):
    F.mse_loss(compiled(x), y).backward()
    optimizer.step()
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm()


def two_passes(model, compiled, optimizer, x, y):
    F.mse_loss(compiled(x), y).backward()
    F.l1_loss(compiled(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.zeros(())


STEPS = [zero_at_the_end, fill_with_zeros, never_zero, two_passes]


@pytest.mark.parametrize(
    ("kind", "step", "backend"),
    [
        *(("central2", step, "eager") for step in STEPS[:2]),
        *(pytest.param("central2", step, "eager", marks=pytest.mark.slow) for step in STEPS[2:]),
        *(
            pytest.param(kind, step, backend, marks=pytest.mark.soak)
            for kind, backend in (
                ("mirrored2", "eager"),
                ("central2", "inductor"),
                ("mirrored2", "inductor"),
            )
            for step in STEPS
        ),
    ],
)
def test_compiled_code_joins_each_run(kind, step, backend, make_strategy):
    """Compiled code asks no module for its parameters, so the run has to begin with all of them."""
    strategy = make_strategy(kind)
    with strategy.scope():
        model, optimizer = build()
    compiled = torch.compile(model, backend=backend)
    plain, plain_optimizer = build()
    parts = [sg.PerReplica(list(each.chunk(2))) for each in (X, Y)]
    for _ in range(4):
        norm = strategy.run(lambda x, y: step(model, compiled, optimizer, x, y), args=parts)
        wanted = step(plain, plain, plain_optimizer, X, Y)
        for each in strategy.local_results(norm):
            torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-6)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["mirrored2", pytest.param("central2", marks=pytest.mark.slow)])
def test_changes_between_runs_reach_compiled_code(kind, make_strategy):
    """Gradients and requires_grad that the program changes outside ``run`` count in the next run."""
    strategy = make_strategy(kind)
    parts = [sg.PerReplica(list(each.chunk(2))) for each in (X, Y)]

    def gradients_of(model, run, *, compile_it):
        compiled = torch.compile(model, backend="eager") if compile_it else model
        seen = []
        for i in range(4):
            run(lambda x, y: F.mse_loss(compiled(x), y).backward())
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            if i == 0:
                model[0].weight.grad.mul_(3.0)
            elif i == 1:
                model.zero_grad()
        return seen

    with strategy.scope():
        model, _ = build()
    got = gradients_of(model, lambda step: strategy.run(step, args=parts), compile_it=True)
    wanted = gradients_of(build()[0], lambda step: step(X, Y), compile_it=False)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
