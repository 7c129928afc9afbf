"""Aggregated gradients share memory until somebody writes them; nobody can tell (issue 2, sections 3 and 8)."""

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg

ROWS = torch.tensor([[1.0], [3.0], [8.0]])


@pytest.fixture(params=[2, 3])
def strategy(request):
    with sg.CentralStorageStrategy([f"cpu:{i}" for i in range(request.param)]) as made:
        yield made


def one_weight(strategy):
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.fill_(0.0)
    return model, optimizer


def cut(strategy, rows=ROWS):
    return sg.PerReplica(list(torch.tensor_split(rows, strategy.num_replicas_in_sync)))


def me():
    return int(sg.get_replica_context().replica_id_in_sync_group)


def test_a_replica_that_writes_its_gradient_changes_no_other_replicas(strategy):
    """Each replica scales by another number, in place, and sees its own result only."""
    model, optimizer = one_weight(strategy)

    def step(x):
        optimizer.zero_grad()
        model(x).mean().backward()
        before = model.weight.grad.item()
        model.weight.grad.mul_(me() + 1)
        sg.get_replica_context().all_reduce("sum", torch.ones(()))  # all have written
        return before, model.weight.grad.item()

    before, after = strategy.run(step, args=(cut(strategy),))
    assert before == 4.0
    assert after.values == tuple(4.0 * (i + 1) for i in range(strategy.num_replicas_in_sync))


def test_accumulating_after_aggregation_gives_each_replica_its_own(strategy):
    """A second pass adds to memory that was shared by then."""
    model, optimizer = one_weight(strategy)

    def step(x):
        optimizer.zero_grad()
        model(x).mean().backward()
        model(x).mean().backward()
        seen = model.weight.grad.item()
        optimizer.step()
        return seen

    assert strategy.run(step, args=(cut(strategy),)) == 8.0
    assert model.weight.item() == -8.0


class FromNumpy(torch.autograd.Function):
    """Multiplies; its gradient lies in a NumPy array's memory."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, torch.from_numpy(np.array((grad.T @ x).numpy()))


def test_gradients_in_memory_that_is_not_torchs_are_copied(strategy):
    """Such memory cannot be shared until written; the numbers are the same."""
    model, optimizer = one_weight(strategy)

    def step(x):
        optimizer.zero_grad()
        FromNumpy.apply(x, model.weight).mean().backward()
        model.weight.grad.mul_(0.5)
        optimizer.step()
        return model.weight.grad.item()

    assert strategy.run(step, args=(cut(strategy),)) == 2.0
    assert model.weight.item() == -2.0


def test_gradients_of_an_earlier_step_do_not_change(strategy):
    """Somebody kept them: later steps write elsewhere."""
    model, optimizer = one_weight(strategy)
    kept = []

    def step(x):
        optimizer.zero_grad()
        model(x).mean().backward()
        if me() == 0:
            kept.append(model.weight.grad)
        optimizer.step()

    for factor in (1.0, 2.0, 3.0):
        strategy.run(step, args=(cut(strategy, ROWS * factor),))
    assert [each.item() for each in kept] == [4.0, 8.0, 12.0]


def test_zero_grad_in_a_replica_is_the_optimizers_own_where_it_has_one(strategy):
    """And torch's, with its annotation, while somebody profiles."""

    class Counting(torch.optim.SGD):
        zeroed = 0

        def zero_grad(self, set_to_none=True):
            Counting.zeroed += 1
            super().zero_grad(set_to_none)

    with strategy.scope():
        model = nn.Linear(1, 1)
        own, plain = (kind(model.parameters(), lr=0.1) for kind in (Counting, torch.optim.SGD))

    def step(x):
        model(x).mean().backward()
        own.zero_grad()
        cleared = model.weight.grad is None
        model(x).mean().backward()
        plain.zero_grad(set_to_none=False)
        zeros = model.weight.grad.item() == 0.0
        model(x).mean().backward()
        plain.zero_grad()
        return cleared, zeros, model.weight.grad is None

    assert strategy.run(step, args=(cut(strategy),)) == (True, True, True)
    assert Counting.zeroed == strategy.num_replicas_in_sync
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=every_thread
    ) as profile:
        strategy.run(step, args=(cut(strategy),))
    assert any(event.key == "Optimizer.zero_grad#SGD.zero_grad" for event in profile.key_averages())


class Sum(nn.Module):
    """Two parameters whose gradients autograd hands on as one piece of memory."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(3))
        self.q = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return ((self.p.unsqueeze(0) + self.q.unsqueeze(0)) * x).sum()


def test_gradients_that_are_one_piece_of_memory_are_combined_once_each(strategy):
    """Else the second parameter would get a mean of means."""
    with strategy.scope():
        model = Sum()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = torch.tensor([[1.0, 2.0, 3.0], [3.0, 5.0, 7.0], [8.0, 8.0, 8.0]])

    def step(x):
        optimizer.zero_grad()
        (model(x) / len(x)).backward()
        optimizer.step()

    strategy.run(step, args=(cut(strategy, rows),))
    expected = -rows.mean(0)
    torch.testing.assert_close(model.p.detach(), expected)
    torch.testing.assert_close(model.q.detach(), expected)


def test_a_gradient_the_caller_gave_stays_the_callers(strategy):
    """``p.view(-1).backward(g)`` makes `g` itself the gradient."""
    with strategy.scope():
        model = Sum()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = [torch.full((3,), float(i + 1)) for i in range(strategy.num_replicas_in_sync)]

    def step():
        optimizer.zero_grad()
        model.p.view(-1).backward(given[me()])
        optimizer.step()

    strategy.run(step)
    assert [g.tolist() for g in given] == [[i + 1.0] * 3 for i in range(len(given))]
    torch.testing.assert_close(model.p.detach(), -torch.stack(given).mean(0))
