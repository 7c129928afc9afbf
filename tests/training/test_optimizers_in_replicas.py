"""Changes of an optimizer inside a step on replicas: settings change once per step, groups are refused (issue 20)."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import stratagem as sg
from stratagem.errors import MisuseError, ReplicaError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(2))


class Program:
    """A model of two layers; the optimizer has the last one."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model[2].parameters(), lr=0.5, momentum=0.9)

    def train(self, x, y):
        self.model.zero_grad()
        F.mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def add_first_layer(self):
        self.optimizer.add_param_group({"params": self.model[0].parameters(), "lr": 0.1})


def run(strategy, step):
    """Run a step, or call it if there is no strategy."""
    if strategy is None:
        return step(X, Y)
    halves = [sg.PerReplica(list(torch.tensor_split(each, 2))) for each in (X, Y)]
    return strategy.run(step, args=tuple(halves))


def assert_same(strategy, make_step):
    """Compare four steps in replicas with those of one device."""
    with strategy.scope():
        mine = Program()
    plain = Program()
    for program, where in ((mine, strategy), (plain, None)):
        step = make_step(program)
        for _ in range(4):
            run(where, step)
    torch.testing.assert_close(
        mine.model.state_dict(), plain.model.state_dict(), rtol=1e-4, atol=1e-6
    )
    for ours, theirs in zip(mine.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert ours["lr"] == pytest.approx(theirs["lr"])


def decaying(program):
    """A learning rate that moves before and after the optimizer's step."""

    def step(x, y):
        for group in program.optimizer.param_groups:
            group["lr"] *= 0.7
        program.train(x, y)
        program.optimizer.param_groups[0]["lr"] += 0.01

    return step


def decaying_with_scheduler(program):
    """A scheduler between two changes by hand: each reads what the other has set."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(program.optimizer, 0.5)

    def step(x, y):
        program.optimizer.param_groups[0]["lr"] *= 1.5
        program.train(x, y)
        scheduler.step()
        program.optimizer.param_groups[0]["lr"] *= 1.25

    return step


@pytest.mark.parametrize("program", [decaying, decaying_with_scheduler])
def test_a_setting_that_moves_in_the_step_moves_once(pair, program):
    assert_same(pair, program)


def test_a_setting_that_differs_between_replicas_is_refused(two):
    with two.scope():
        program = Program()

    def step(x, y):
        program.optimizer.param_groups[0]["lr"] *= 1 + x[0, 0].item()

    with pytest.raises(ReplicaError, match=r"set the optimizer's 'lr' to .*merge_call"):
        run(two, step)


@pytest.mark.parametrize("method", ["add_param_group", "load_state_dict"])
def test_changes_of_the_shared_optimizer_are_refused_before_they_happen(two, method):
    with two.scope():
        program = Program()
    saved = program.optimizer.state_dict()

    def step(x, y):
        if method == "add_param_group":
            program.add_first_layer()
        else:
            program.optimizer.load_state_dict(saved)

    with pytest.raises(MisuseError, match=rf"SGD\.{method}\(\) was called in .*(?s:.*)merge_call"):
        run(two, step)
    assert len(program.optimizer.param_groups) == 1
    program.add_first_layer()
    assert len(program.optimizer.param_groups) == 2


def test_the_remedy_adds_a_group_once(pair):
    def unfreezing(program):
        def step(x, y):
            program.train(x, y)
            if len(program.optimizer.param_groups) == 1:
                if sg.in_cross_replica_context() is False:
                    sg.get_replica_context().merge_call(lambda strategy: program.add_first_layer())
                else:
                    program.add_first_layer()

        return step

    assert_same(pair, unfreezing)


def test_an_optimizer_made_in_the_step_may_get_groups(two):
    with two.scope():
        mine = Program()
    plain = Program()
    run(two, local(mine))
    run(None, local(plain))
    torch.testing.assert_close(
        mine.model.state_dict(), plain.model.state_dict(), rtol=1e-4, atol=1e-6
    )


def local(program):
    """Return a step with an optimizer of its own."""

    def step(x, y):
        layers = program.model
        optimizer = torch.optim.SGD(
            [{"params": layers[0].parameters()}, {"params": [layers[2].weight]}], lr=0.1
        )
        optimizer.add_param_group({"params": [layers[2].bias], "lr": 0.3})
        F.mse_loss(layers(x), y).backward()
        optimizer.step()

    return step


def steps_of(program):
    """Return what an optimizer's class and its hooks see of one step on two replicas."""
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            made = program()
        run(strategy, made.train)
    return made


def test_a_replaced_step_of_the_class_runs_once(monkeypatch):
    """Libraries replace ``SGD.step`` by a wrapper with its attributes; it is called, not what it wraps."""
    torch.optim.SGD(
        [torch.zeros(1)]
    )  # torch wraps the step of a class when its first optimizer is made
    plain, calls = torch.optim.SGD.step, []

    @functools.wraps(plain)
    def counted(self, *args, **kwargs):
        calls.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    made = steps_of(Program)
    assert calls == [made.optimizer]


def test_hooks_of_every_step_run_once():
    """Hooks of one optimizer and of all optimizers see the step on two replicas."""
    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append("every"))
    try:
        steps_of(Program)
    finally:
        handle.remove()

    class Hooked(Program):
        def __init__(self):
            super().__init__()
            self.optimizer.register_step_pre_hook(lambda *_: seen.append("one"))

    steps_of(Hooked)
    assert seen == ["every", "one"]


def test_the_profiler_sees_the_step():
    """The annotation of a step, which is left out otherwise, is there while the profiler runs."""
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=every_thread
    ) as found:
        steps_of(Program)
    assert "Optimizer.step#SGD.step" in {event.key for event in found.key_averages()}
