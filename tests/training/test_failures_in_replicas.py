"""What goes wrong in a replica: parameters stay, messages explain, the strategy goes on (issue 2, section 3)."""

import copy
import os
import sys
import threading
import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from warm_start import run_program

import stratagem as sg
from stratagem.errors import ReplicaTimeout

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(2))


def cut(strategy, *tensors):
    size = strategy.num_replicas_in_sync
    return tuple(sg.PerReplica(list(torch.tensor_split(each, size))) for each in tensors)


def make(strategy):
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Boom(Exception):
    """Something of the user's."""


@pytest.mark.parametrize(
    "where", ["before forward", "before backward", "before step", "after step"]
)
def test_a_failing_replica_leaves_the_parameters_alone(where, several):
    """Its type, traceback and number arrive; others unwind; the next run trains as if nothing was."""
    model, optimizer = make(several)
    model.eval()  # BatchNorm's statistics of fewer rows are not the matter here
    reference = copy.deepcopy(model)
    last = several.num_replicas_in_sync - 1

    def fail(place):
        if place == where and int(sg.get_replica_context().replica_id_in_sync_group) == last:
            raise Boom(place)

    def step(x, y, armed):
        if armed:
            fail("before forward")
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if armed:
            fail("before backward")
        loss.backward()
        if armed:
            fail("before step")
        optimizer.step()
        if armed:
            fail("after step")

    with pytest.raises(Boom, match=where) as caught:
        several.run(step, args=(*cut(several, X, Y), True))
    assert any(frame.name == "fail" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert any(f"Replica {last} of" in note for note in caught.value.__notes__)
    if where != "after step":
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(a, b)
        plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            several.run(step, args=(*cut(several, X, Y), False))
            plain_optimizer.zero_grad()
            F.mse_loss(reference(X), Y).backward()
            plain_optimizer.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_model_made_outside_scope_is_explained_not_trained(several):
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    with pytest.raises(sg.errors.ForeignParameterError) as caught:
        several.run(step, args=cut(several, X, Y))
    assert "inside `with strategy.scope():`" in str(caught.value)
    assert "(2, 4)" in str(caught.value)
    assert torch.equal(model.weight, before)


def test_a_bare_parameter_is_refused_with_the_remedy(several):
    """It belongs to no module, so nobody could give each replica its own view of it."""
    with several.scope():
        model = nn.Linear(4, 2)
        bare = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), bare], lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x) * bare, y).backward()
        optimizer.step()

    with pytest.raises(sg.errors.ForeignParameterError, match=r"make it an nn\.Parameter"):
        several.run(step, args=cut(several, X, Y))
    assert torch.equal(bare, torch.ones(2))


def test_a_model_of_another_strategy_is_refused(several):
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
        with other.scope():
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            F.mse_loss(model(x), y).backward()
            optimizer.step()

        with pytest.raises(sg.errors.ForeignParameterError, match="MirroredStrategy"):
            several.run(step, args=cut(several, X, Y))


def test_a_write_inside_a_replica_is_noticed(several):
    """A write would be applied once per replica to the one parameter behind them; replicas do not agree on it."""
    model, _ = make(several)

    def by_hand(x, y):
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p *= x.sum()

    with pytest.raises(sg.errors.ReplicaError, match=r"written in place inside replica \d"):
        several.run(by_hand, args=cut(several, X, Y))


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.data.mul_(0.9),
        lambda p: p.data.clamp_(-0.01, 0.01),
        lambda p: p.data[0].zero_(),
        lambda p: p.data.view(-1)[:1].add_(1.0),
        lambda p: p.data.copy_(torch.zeros_like(p)),
        lambda p: setattr(p, "data", p.data * 0.9),
    ],
    ids=["mul_", "clamp_", "row", "view", "copy_", "assigned"],
)
@pytest.mark.parametrize("late", [False, True], ids=["before step", "after step"])
def test_a_write_through_data_inside_a_replica_counts_once(write, late, several):
    """The old way to write a parameter by hand: averages, clipping, initialising."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with several.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if late:
            optimizer.step()
        for p in model.parameters():
            write(p)
        if not late:
            optimizer.step()

    for _ in range(2):
        several.run(lambda x, y: step(model, optimizer, x, y), args=cut(several, X, Y))
        step(plain, alone, X, Y)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_reading_through_data_is_as_always(several):
    """In a replica, outside, and in compiled code; outside a run it may be written, too."""
    model, optimizer = make(several)

    def step(x, y):
        norm = sum(p.data.norm() for p in model.parameters())
        assert not any(p.data.requires_grad for p in model.parameters())
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        return norm

    norms = several.local_results(several.run(step, args=cut(several, X, Y)))
    assert len(set(map(float, norms))) == 1
    weight = model[0].weight
    weight.data.fill_(2.0)
    weight.data = weight.data * 2
    assert weight.detach().eq(4.0).all()
    seen = several.run(lambda: model[0].weight.data.sum())
    assert all(float(each) == 4.0 * weight.numel() for each in several.local_results(seen))


def test_batchnorm_on_a_replica_with_one_row_says_what_to_do(several):
    """Torch's own error (a lone row has no variance), with the rows, the least batch and the ways out."""
    model, optimizer = make(several)
    size = several.num_replicas_in_sync

    def step(x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    rows = 2 * size - 1
    batch = next(iter(several.distribute_dataset([(X[:rows], Y[:rows])])))
    with pytest.raises(ValueError, match="more than 1 value per channel when training") as caught:
        several.run(step, args=batch)
    notes = "\n".join(caught.value.__notes__)
    assert f"<Replica {size - 1} of {size} " in notes
    assert f"which got 1 of {rows} rows" in notes
    assert f"at least {2 * size} rows" in notes
    assert "drop_remainder" in notes
    several.run(step, args=cut(several, torch.cat([X, X])[: 2 * size], Y.repeat(2, 1)[: 2 * size]))


def test_replicas_that_make_different_calls_raise_an_error(two):
    model, optimizer = make(two)

    def uneven(x, y):
        loss = F.mse_loss(model(x), y)
        if sg.get_replica_context().replica_id_in_sync_group == 0:
            loss.backward()
        optimizer.step()

    with pytest.raises(sg.errors.ReplicaMismatch, match=r"the end of backward\(\)"):
        two.run(uneven, args=cut(two, X, Y))


def test_a_replica_without_rows_may_leave_early_or_compute_nan(several):
    """One row on several replicas: those without rows contribute nothing, whatever they do."""
    for leaves_early in (True, False):
        model, optimizer = make(several)
        model.eval()
        reference = copy.deepcopy(model)
        plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

        def step(x, y, leaves_early=leaves_early, model=model, optimizer=optimizer):
            if leaves_early and len(x) == 0:
                return
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()  # NaN for zero rows
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

        for _ in range(2):
            several.run(step, args=cut(several, X[:1], Y[:1]))
            plain_optimizer.zero_grad()
            F.mse_loss(reference(X[:1]), Y[:1]).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            plain_optimizer.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_equivalence_check_explains_a_sum_loss(two):
    """Section 6: step, parameter, difference, and the likely reason."""

    def summed(model, optimizer, batch):
        x, y = batch
        optimizer.zero_grad()
        F.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()

    with pytest.raises(AssertionError) as caught:
        sg.testing.assert_equivalent(
            lambda: nn.Linear(4, 2),
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            summed,
            [(X, Y)],
            two,
        )
    message = str(caught.value)
    assert "at step 0" in message
    assert "'weight' differs by up to" in message
    assert "reduction='sum'" in message


def test_the_equivalence_check_explains_batchnorm_and_summed_replicas(make_strategy):
    def step(model, optimizer, batch):
        x, y = batch
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    def check(model_fn, strategy):
        with pytest.raises(AssertionError) as caught:
            sg.testing.assert_equivalent(
                model_fn,
                lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
                step,
                [(X, Y)],
                strategy,
            )
        return str(caught.value)

    normed = lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    assert "statistics of each replica's own rows" in check(normed, make_strategy("central2"))
    summing = make_strategy("central2", gradient_aggregation="sum")
    assert "2 times plain training's" in check(lambda: nn.Linear(4, 2), summing)


@pytest.mark.parametrize("wakes", ["in backward", "in the model"])
def test_a_replica_left_behind_has_no_part_in_later_runs(wakes, monkeypatch):
    """It was given up after the limit, wakes in the middle of the next run, and goes on computing."""
    two = sg.CentralStorageStrategy(["cpu:0", "cpu:1"], parallel_replicas=True)
    with two.scope():
        model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    wake, woken = threading.Event(), threading.Event()
    together = threading.Barrier(2)

    def stuck():
        context = sg.get_replica_context()
        rows = torch.full((2, 3), 100.0)
        before = model[0](rows).sum()
        if int(context.replica_id_in_sync_group) == 0:
            context.all_reduce("sum", torch.ones(1))
        wake.wait(60)
        try:
            loss = before if wakes == "in backward" else model(rows).sum()
            loss.backward()
        finally:
            woken.set()

    def step():
        model.zero_grad()
        loss = model[0](torch.ones(2, 3)).mean()
        model[1](torch.ones(2, 1))
        together.wait(60)
        if int(sg.get_replica_context().replica_id_in_sync_group) == 1:
            wake.set()
            assert woken.wait(60)
        together.wait(60)
        loss.backward()
        return model[0].weight.grad.clone()

    monkeypatch.setenv("STRATAGEM_REPLICA_TIMEOUT_S", "0.3")
    with pytest.raises(ReplicaTimeout):
        two.run(stuck)
    monkeypatch.setenv("STRATAGEM_REPLICA_TIMEOUT_S", "60")
    gradients = two.run(step)
    assert [each.tolist() for each in gradients.values] == [[[1.0, 1.0, 1.0]]] * 2
    assert model[0].weight.grad.tolist() == [[1.0, 1.0, 1.0]]
    assert model[1].num_batches_tracked.item() == 1
    two.close()


LEAVES_ONE_BEHIND = """
import torch
import stratagem as sg

def stuck():
    context = sg.get_replica_context()
    if int(context.replica_id_in_sync_group) == 0:
        context.all_reduce("sum", torch.ones(1))
    numbers = torch.randn(2_000_000)
    while True:
        try:
            numbers.sort()
        except Exception:
            pass

strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
try:
    strategy.run(stuck)
except sg.errors.ReplicaTimeout:
    print("left behind")
"""


@pytest.mark.process
def test_a_process_ends_well_while_a_replica_left_behind_computes():
    """torch's C++ would be unwound by the end of the interpreter, and the process abort."""
    ended = run_program(
        [sys.executable, "-c", LEAVES_ONE_BEHIND],
        env={**os.environ, "STRATAGEM_REPLICA_TIMEOUT_S": "0.2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "left behind\n"), ended.stderr
    assert "terminate called" not in ended.stderr


def test_the_equivalence_check_explains_complex_parameters(two):
    """Also where they part: differences of complex numbers have a size."""

    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j, 0.5j, 1 + 0j]))

        def forward(self, x):
            return (x * self.factor).abs().square().sum(1)

    def step(reduction):
        def train(model, optimizer, batch):
            optimizer.zero_grad()
            getattr(model(batch), reduction)().backward()
            optimizer.step()

        return train

    def check(reduction):
        return sg.testing.assert_equivalent(
            Turn, lambda m: torch.optim.SGD(m.parameters(), lr=0.01), step(reduction), [X], two
        )

    assert check("mean").largest_difference < 1e-5
    with pytest.raises(AssertionError, match=r"'factor' differs by up to .*j.*reduction='sum'"):
        check("sum")
