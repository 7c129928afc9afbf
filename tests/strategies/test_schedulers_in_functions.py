"""Schedulers, gradient scalers and learning-rate rules inside scheduled functions (issue 20, point 8)."""

from __future__ import annotations

import copy
import os
import signal
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs

import stratagem as sg
from stratagem.errors import MisuseError

pytestmark = pytest.mark.process

STEPS = 12
GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [
    (torch.randn(8, 3, generator=GENERATOR), torch.randn(8, 1, generator=GENERATOR))
    for _ in range(STEPS)
]

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda n: min(1.0, (n + 1) / 5)),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=4), lrs.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_step(model: nn.Module, optimizer: Any, after: Callable[[torch.Tensor], object]) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        after(loss)
        return loss.item(), rate

    return step


def make_program(name: str) -> Callable[[], tuple[Any, Any, Any, Any]]:
    """Return a function that makes model, optimizer, scheduler and step."""

    def make() -> tuple[Any, Any, Any, Any]:
        model = make_model()
        optimizer = make_optimizer(model)
        scheduler = SCHEDULERS[name](optimizer)
        takes_loss = name == "ReduceLROnPlateau"

        def after(loss: torch.Tensor) -> None:
            scheduler.step(*([loss.detach()] if takes_loss else []))

        return model, optimizer, scheduler, make_step(model, optimizer, after)

    return make


@pytest.fixture(scope="module")
def pair() -> Iterator[sg.LocalCluster]:
    """Two workers and a server, in processes of their own."""
    with sg.LocalCluster(workers=2, ps=1, restart=True) as made:
        yield made


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_worker_gives_the_numbers_of_plain_pytorch(
    name: str, alone: sg.ClusterCoordinator
) -> None:
    make = make_program(name)
    with alone.strategy.scope():
        model, optimizer, scheduler, step = make()
    # All at once: later closures are on their way while earlier ones run.
    found = alone.fetch([alone.schedule(step, args=batch) for batch in BATCHES])
    alone.join(timeout_s=60)
    plain_model, plain_optimizer, plain, plain_step = make()
    wanted = [plain_step(*batch) for batch in BATCHES]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=1e-6)
    assert [rate for _, rate in found] == [rate for _, rate in wanted]
    assert settings_of(optimizer) == settings_of(plain_optimizer)
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict())
    mine, theirs = scheduler.state_dict(), plain.state_dict()
    if name == "ReduceLROnPlateau":
        assert mine.pop("best") == pytest.approx(theirs.pop("best"), rel=1e-6)
    assert mine == theirs


def test_a_scheduler_continues_from_its_saved_state(
    alone: sg.ClusterCoordinator, tmp_path: Any
) -> None:
    """Half of the steps, a checkpoint, and the other half with new objects."""
    make = make_program("OneCycleLR")
    for part, half in enumerate((BATCHES[:6], BATCHES[6:])):
        with alone.strategy.scope():
            model, optimizer, scheduler, step = make()
        saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        checkpoint = sg.Checkpoint(**saved)
        if part == 1:
            checkpoint.restore(tmp_path / "0")
            assert scheduler.last_epoch == 6
        for batch in half:
            alone.schedule(step, args=batch)
        alone.join(timeout_s=60)
        checkpoint.save(tmp_path / str(part))
    plain_model, plain_optimizer, plain, plain_step = make()
    for batch in BATCHES:
        plain_step(*batch)
    assert scheduler.state_dict() == plain.state_dict()
    assert settings_of(optimizer) == settings_of(plain_optimizer)
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict())


def test_a_scheduler_stepped_in_functions_and_on_the_coordinator(
    alone: sg.ClusterCoordinator,
) -> None:
    """Functions scheduled after a step or a load on the coordinator continue from it."""
    with alone.strategy.scope():
        _, optimizer, scheduler, step = make_program("ExponentialLR")()
    start = copy.deepcopy(scheduler.state_dict())

    def rate() -> float:
        return float(alone.schedule(step, args=BATCHES[0]).get(timeout_s=60)[1])

    assert [rate(), rate()] == [0.1, 0.1 * 0.9]
    scheduler.step()
    assert rate() == pytest.approx(0.1 * 0.9**3)
    scheduler.load_state_dict(start)
    optimizer.param_groups[0]["lr"] = 0.1
    assert [rate(), rate()] == pytest.approx([0.1, 0.1 * 0.9])
    assert scheduler.last_epoch == 2


def test_a_failed_function_does_not_advance(alone: sg.ClusterCoordinator) -> None:
    with alone.strategy.scope():
        model = make_model()
        optimizer = make_optimizer(model)
        scheduler = lrs.ExponentialLR(optimizer, 0.5)

    def step(fail: bool) -> float:
        scheduler.step()
        optimizer.param_groups[0]["momentum"] = 0.5
        if fail:
            raise ArithmeticError("as asked")
        return float(optimizer.param_groups[0]["lr"])

    assert alone.schedule(step, args=(False,)).get(timeout_s=60) == 0.05
    with pytest.raises(ArithmeticError):
        alone.schedule(step, args=(True,)).get(timeout_s=60)
    assert alone.schedule(step, args=(False,)).get(timeout_s=60) == 0.025
    alone.join(timeout_s=60)
    assert scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("interval", [1, 3])
def test_a_gradient_scaler_gives_the_numbers_of_plain_pytorch(
    interval: int, alone: sg.ClusterCoordinator
) -> None:
    """Some batches overflow: the step is skipped, and the scale is reduced."""

    def make() -> Any:
        model = make_model()
        optimizer = make_optimizer(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=interval)

        def step(x: torch.Tensor, y: torch.Tensor, factor: float) -> float:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * factor
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return scaler.get_scale()

        return model, scaler, step

    factors = [float("inf") if n in (2, 3, 8) else 1.0 for n in range(STEPS)]
    with alone.strategy.scope():
        model, scaler, step = make()
    calls = [(*batch, factor) for batch, factor in zip(BATCHES, factors, strict=True)]
    scales = alone.fetch([alone.schedule(step, args=call) for call in calls])
    alone.join(timeout_s=60)
    plain_model, plain, plain_step = make()
    assert scales == [plain_step(*call) for call in calls]
    assert scaler.state_dict() == plain.state_dict()
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict())


def test_a_gradient_scaler_follows_functions_of_a_program_in_double_precision(
    alone: sg.ClusterCoordinator,
) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with alone.strategy.scope():
            model = make_model()
            optimizer = make_optimizer(model)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y.double())).backward()
            scaler.step(optimizer)
            scaler.update()
            return scaler.get_scale()

        calls = [(x.double(), y) for x, y in BATCHES[:4]]
        scales = alone.fetch([alone.schedule(step, args=call) for call in calls])
        alone.join(timeout_s=60)
        assert scales == [64.0, 128.0, 128.0, 256.0]
        assert scaler.get_scale() == 256.0
    finally:
        torch.set_default_dtype(before)


def test_rates_set_by_hand_are_the_coordinators(alone: sg.ClusterCoordinator) -> None:
    """Warm-up from a step number, and decay of the rate itself."""
    with alone.strategy.scope():
        model = make_model()
        optimizer = make_optimizer(model)

    def warm_up(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (number + 1) / 5)

    def decay() -> float:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        return float(optimizer.param_groups[0]["lr"])

    for number in range(3):
        alone.schedule(warm_up, args=(number,))
    alone.join(timeout_s=60)
    assert optimizer.param_groups[0]["lr"] == 0.1 * min(1.0, 3 / 5)
    rates = alone.fetch([alone.schedule(decay) for _ in range(4)])
    alone.join(timeout_s=60)
    rate = 0.1 * min(1.0, 3 / 5)
    assert rates == [rate * 0.5**n for n in range(1, 5)]
    assert optimizer.param_groups[0]["lr"] == rates[-1]


def test_two_workers_advance_once_per_closure_also_if_one_is_killed(pair: sg.LocalCluster) -> None:
    """The count on the coordinator is exact, and no worker is far behind."""
    strategy = sg.ParameterServerStrategy(pair.resolver)
    with strategy.scope():
        model = make_model()
        optimizer = make_optimizer(model)
        scheduler = lrs.LambdaLR(optimizer, lambda n: 1.0 / (n + 1))
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10)

    def step(x: torch.Tensor, y: torch.Tensor, die: int) -> tuple[int, int, int]:
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if die == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid(), scheduler.last_epoch, sg.get_current_worker_index()

    with sg.ClusterCoordinator(strategy) as coordinator:
        seen: set[int] = set()
        count = 0
        pid = 0
        while len(seen) < 2 or count < 200:
            count += 20
            values = [coordinator.schedule(step, args=(*BATCHES[0], 0)) for _ in range(20)]
            for pid, _, _ in coordinator.fetch(values):
                seen.add(pid)
        coordinator.join(timeout_s=60)
        assert scheduler.last_epoch == count
        values = [coordinator.schedule(step, args=(*BATCHES[0], pid)) for _ in range(40)]
        coordinator.join(timeout_s=120)
        found = coordinator.fetch(values)
        assert pid not in [one[0] for one in found]
        count += 40
        assert scheduler.last_epoch == count
        assert optimizer.param_groups[0]["lr"] == 0.1 / (count + 1)
        assert scaler.get_scale() == 2.0 ** (count // 10)
        # Workers knew of each other's closures, but for those on their way.
        assert max(last for _, last, _ in found) > count - 40
        # The next closure continues from the state here, on any worker.
        assert coordinator.schedule(step, args=(*BATCHES[0], 0)).get(timeout_s=60)[1] == count + 1


def test_a_rate_computed_from_itself_on_two_workers_is_refused(pair: sg.LocalCluster) -> None:
    """Neither change contains the other one: no order of the two gives the result of both."""
    strategy = sg.ParameterServerStrategy(pair.resolver)
    with strategy.scope():
        model = make_model()
        optimizer = make_optimizer(model)

    def decay() -> None:
        optimizer.param_groups[0]["lr"] *= 0.999

    with sg.ClusterCoordinator(strategy) as coordinator:
        with pytest.raises(MisuseError, match=r"'lr' of SGD .*from a count"):
            for _ in range(1000):
                for _ in range(20):
                    coordinator.schedule(decay)
                coordinator.join(timeout_s=60)


def test_a_scheduler_that_has_ended_stops_the_run(pair: sg.LocalCluster) -> None:
    """torch's own error, also if only the coordinator has counted all steps."""
    strategy = sg.ParameterServerStrategy(pair.resolver)
    with strategy.scope():
        model = make_model()
        optimizer = make_optimizer(model)
        scheduler = lrs.OneCycleLR(optimizer, 0.1, total_steps=10)

    def step() -> None:
        scheduler.step()

    with sg.ClusterCoordinator(strategy) as coordinator:
        with pytest.raises(ValueError, match="Tried to step"):
            for _ in range(40):
                coordinator.schedule(step)
            coordinator.join(timeout_s=60)
        assert scheduler.last_epoch <= 10


# ------------------------------------------------------------------ counters


class ScheduledOptim:
    """A learning-rate rule with a counter, as in attention-is-all-you-need."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.n_steps = 0

    def step_and_update_lr(self) -> None:
        self.n_steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = 0.1 * min(self.n_steps**-0.5, self.n_steps * 4**-1.5)
        self._optimizer.step()


calls = 0


def test_counters_of_objects_globals_and_closures_move_once_per_closure(
    alone: sg.ClusterCoordinator,
) -> None:
    """The coordinator has them after join(), and a value set there is the next one to be counted on."""
    global calls
    calls, inner = 0, 0

    def make() -> tuple[Any, Any, Any]:
        model = make_model()
        rule = ScheduledOptim(make_optimizer(model))

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, int, int]:
            global calls
            nonlocal inner
            calls += 1
            inner = inner + 2
            model.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            rule.step_and_update_lr()
            return loss.item(), calls, inner

        return model, rule, step

    with alone.strategy.scope():
        model, rule, step = make()
    found = alone.fetch([alone.schedule(step, args=batch) for batch in BATCHES])
    alone.join(timeout_s=60)
    assert (rule.n_steps, calls, inner) == (STEPS, STEPS, 2 * STEPS)
    assert [one[1:] for one in found] == [(n, 2 * n) for n in range(1, STEPS + 1)]
    plain_model, plain_rule, plain_step = make()
    wanted = [plain_step(*batch) for batch in BATCHES]
    assert [one[0] for one in found] == pytest.approx([one[0] for one in wanted], rel=1e-6)
    torch.testing.assert_close(model.state_dict(), plain_model.state_dict())
    assert rule._optimizer.param_groups[0]["lr"] == plain_rule._optimizer.param_groups[0]["lr"]
    rule.n_steps = 100  # as a restore does
    packed = sg.metrics.snapshot().counters
    alone.schedule(step, args=BATCHES[0]).get(timeout_s=60)
    alone.join(timeout_s=60)
    assert rule.n_steps == 101
    again = sg.metrics.snapshot().counters
    name = "coordinator.functions_packed_again"
    assert again.get(name) == packed.get(name)  # a counter is no reason to send the function again


class State:
    """What a trainer counts with; it has no methods."""

    def __init__(self) -> None:
        self.step = 0
        self.limit = 3


class Trainer:
    def __init__(self) -> None:
        self.state = State()

    def train_step(self) -> None:
        self.state.step += 1


def count_in(state: Any) -> None:
    state.step += 1


def test_counters_move_wherever_the_code_is_that_counts(alone: sg.ClusterCoordinator) -> None:
    """In a function or method that the step calls, which is found after the object with the counter."""
    held, space, trainer = State(), types.SimpleNamespace(step=5), Trainer()

    def step() -> tuple[int, int, int]:
        before = held.step, space.step, trainer.state.step
        for state in (held, space):
            count_in(state)
        trainer.train_step()
        return before

    found = alone.fetch([alone.schedule(step) for _ in range(3)])
    assert found == [(n, 5 + n, n) for n in range(3)]
    alone.join(timeout_s=60)
    assert (held.step, space.step, trainer.state.step, held.limit) == (3, 8, 3, 3)
    alone.fetch([alone.schedule(trainer.train_step) for _ in range(2)])
    alone.join(timeout_s=60)
    assert trainer.state.step == 5


def test_counters_of_two_workers_add_up_and_failed_functions_do_not_count(
    pair: sg.LocalCluster,
) -> None:
    strategy = sg.ParameterServerStrategy(pair.resolver)
    with strategy.scope():
        rule = ScheduledOptim(make_optimizer(make_model()))

    def step(fail: bool) -> int:
        rule.step_and_update_lr()
        if fail:
            raise ArithmeticError("as asked")
        return sg.get_current_worker_index()

    with sg.ClusterCoordinator(strategy) as coordinator:
        done: set[int] = set()
        count = 0
        while len(done) < 2:
            done |= set(
                coordinator.fetch([coordinator.schedule(step, (False,)) for _ in range(20)])
            )
            count += 20
        coordinator.join(timeout_s=60)
        assert rule.n_steps == count
        with pytest.raises(ArithmeticError):
            coordinator.schedule(step, (True,))
            coordinator.join(timeout_s=60)
        coordinator.schedule(step, (False,))
        coordinator.join(timeout_s=60)
        assert rule.n_steps == count + 1
        assert rule._optimizer.param_groups[0]["lr"] == 0.1 * min(
            rule.n_steps**-0.5, rule.n_steps * 4**-1.5
        )


def test_replicas_inside_a_worker_advance_once(cluster: sg.LocalCluster) -> None:
    """Two replicas run the same code; scheduler, scaler and rate move as on one device."""
    strategy = sg.ParameterServerStrategy(cluster.resolver, worker_devices=["cpu:0", "cpu:1"])
    with strategy.scope():
        model = make_model()
        optimizer = make_optimizer(model)
        scheduler = lrs.ExponentialLR(optimizer, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def replica(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        halves = [sg.PerReplica([*each.chunk(2)]) for each in (x, y)]
        strategy.run(replica, args=halves)

    with sg.ClusterCoordinator(strategy) as coordinator:
        for batch in BATCHES[:4]:
            coordinator.schedule(step, args=batch)
        coordinator.join(timeout_s=60)
        assert scheduler.last_epoch == 4
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
        assert scaler.get_scale() == 16.0


def test_functions_that_share_a_closure_variable_share_its_counter(
    alone: sg.ClusterCoordinator,
) -> None:
    count = 0

    def bump(times: int) -> None:
        nonlocal count
        count += 1
        if times > 1:
            bump(times - 1)

    def step() -> int:
        bump(2)
        return count

    assert alone.fetch([alone.schedule(step) for _ in range(3)]) == [2, 4, 6]
    alone.join(timeout_s=60)
    assert count == 6
