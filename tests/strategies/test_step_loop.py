"""`strategy.run_steps`: the same loop under every strategy, with the same numbers."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem._strategies.step_loop import run_on_workers

ROWS = torch.linspace(-1, 1, 22).reshape(11, 2)
BATCHES = [(ROWS[i : i + 4], ROWS[i : i + 4].sum(1, keepdim=True)) for i in range(0, 11, 4)]


def train(strategy: sg.Strategy, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a small model; return the losses and the final weights."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> dict[str, Any]:
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "rows": len(x), "name": "step"}

    results = list(strategy.run_steps(step, BATCHES, **options))
    assert {result["name"] for result in results} <= {"step"}
    return [float(result["loss"]) for result in results], {
        name: value.clone() for name, value in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one device."""
    with sg.OneDeviceStrategy("cpu:0") as strategy:
        return train(strategy)


@pytest.fixture
def served() -> Iterator[sg.ParameterServerStrategy]:
    """One worker in this process, so that the order of updates is the order of batches."""
    with (
        sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        yield strategy


@pytest.mark.parametrize("kind", [sg.CentralStorageStrategy, sg.MirroredStrategy])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_losses_and_weights_are_those_of_one_device(plain: Any, kind: Any, replicas: int) -> None:
    """The last batch is uneven, and with three replicas the mean is weighted by rows."""
    with kind([f"cpu:{i}" for i in range(replicas)]) as strategy:
        losses, weights = train(strategy)
    assert losses == pytest.approx(plain[0])
    for name, value in weights.items():
        torch.testing.assert_close(value, plain[1][name])


def test_one_worker_trains_as_one_device(plain: Any, served: Any) -> None:
    """The results come in batch order."""
    losses, weights = train(served)
    assert losses == pytest.approx(plain[0])
    for name, value in weights.items():
        torch.testing.assert_close(value, plain[1][name])


def test_a_worker_with_two_replicas_trains_as_one_device(plain: Any) -> None:
    """The worker divides its batch among its replicas."""
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        made = sg.ParameterServerStrategy(cluster.resolver, worker_devices=["cpu:0", "cpu:1"])
        with made as strategy:
            losses, _ = train(strategy)
    assert losses == pytest.approx(plain[0])


def test_steps_limits_an_endless_dataset(served: Any) -> None:
    """No batch beyond the limit is run, on one machine and on workers."""
    endless = sg.data.Dataset.from_tensor_slices(ROWS).repeat().batch(4)
    with sg.OneDeviceStrategy("cpu:0") as alone:
        assert len(list(alone.run_steps(len, endless, steps=7))) == 7
    with served.scope():
        count = sg.Variable(0.0)

    def step(batch: Any) -> None:
        count.assign_add(1.0)

    assert list(served.run_steps(step, endless, steps=7)) == [None] * 7
    assert float(count) == 7


class Rule:
    """A rate that depends on the number of steps, as in attention-is-all-you-need."""

    def __init__(self) -> None:
        self.steps = 0

    def rate(self) -> float:
        self.steps += 1
        return 1.0 / self.steps


@pytest.mark.parametrize("workers", [1, 2])
def test_counters_of_a_step_move_once_per_batch_on_the_coordinator(workers: int) -> None:
    """Also those of decorated steps; two workers count together, and the next loop goes on from there."""
    rule, trainer, calls = Rule(), Rule(), 0
    state = types.SimpleNamespace(steps=0, config=types.SimpleNamespace(seen=0))
    config = state.config

    @torch.no_grad()
    def step(batch: Any) -> float:
        nonlocal calls
        calls += 1
        trainer.steps += 1
        state.steps += 1
        config.seen += 1
        return rule.rate()

    def other(batch: Any) -> float:
        return rule.rate()

    batches = [torch.ones(1)] * 6
    with (
        sg.LocalCluster(workers=workers, ps=1, in_process=True) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        first = list(strategy.run_steps(step, batches))
        assert (rule.steps, trainer.steps, calls, state.steps, config.seen) == (6,) * 5
        second = list(strategy.run_steps(other, batches))
    assert rule.steps == 12
    if workers == 1:
        assert first + second == pytest.approx([1 / n for n in range(1, 13)])


def test_a_loop_that_is_left_early_has_no_update_under_way(served: Any) -> None:
    """`break` waits for the batches that were scheduled ahead."""
    with served.scope():
        count = sg.Variable(0.0)

    def step(batch: Any) -> None:
        count.assign_add(1.0)

    loop = served.run_steps(step, [torch.ones(1)] * 1000)
    next(loop)
    loop.close()
    done = float(count)
    assert 1 <= done < 1000
    assert sg.ClusterCoordinator(served).done()
    assert float(count) == done


def test_an_error_in_a_step_reaches_the_loop_and_the_strategy_goes_on(served: Any) -> None:
    """The error has its own type and is raised once."""

    def step(batch: Any) -> int:
        if len(batch) == 3:
            raise ValueError("three rows")
        return len(batch)

    with pytest.raises(ValueError, match="three rows"):
        list(served.run_steps(step, [torch.ones(1), torch.ones(3), torch.ones(2)]))
    assert list(served.run_steps(step, [torch.ones(2)])) == [2]
    assert f"{step.__qualname__} ({__file__}" in sg.ClusterCoordinator(served).errors[-1].function


def test_the_loop_raises_the_error_for_which_a_batch_was_cancelled() -> None:
    """A later batch has failed on another worker: its error counts, not the cancellation of this one."""

    class Stopped:
        """A coordinator whose queue was stopped by an error; it raises the error once."""

        workers = (0,)
        failed: Exception | None = ValueError("of a later batch")

        def schedule(self, fn: Any, args: Any) -> Stopped:
            return self

        def get(self) -> Any:
            raise sg.errors.ClosureCancelled("run_batch was cancelled")

        def join(self) -> None:
            if (error := self.failed) is not None:
                self.failed = None
                raise error

    coordinator = Stopped()
    with pytest.raises(ValueError, match="of a later batch"):
        list(run_on_workers(coordinator, len, [torch.ones(1)], None))
    with pytest.raises(sg.errors.ClosureCancelled):  # the program cancelled it
        list(run_on_workers(coordinator, len, [torch.ones(1)], None))


def test_results_that_are_not_numbers_come_per_replica() -> None:
    """Vectors and texts cannot be averaged over rows."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        (result,) = strategy.run_steps(lambda batch: (batch * 2, len(batch)), [torch.ones(3)])
    doubled, rows = result
    assert [part.tolist() for part in doubled.values] == [[2, 2], [2]]
    assert rows == pytest.approx((2 * 2 + 1 * 1) / 3)


@pytest.mark.parametrize(
    ("step", "steps", "kind"),
    [(None, None, TypeError), (len, -1, ValueError), (len, 1.5, ValueError)],
)
def test_bad_arguments_are_refused_at_the_call(step: Any, steps: Any, kind: Any) -> None:
    """Not at the first iteration."""
    with pytest.raises(kind):
        sg.OneDeviceStrategy("cpu:0").run_steps(step, [], steps=steps)


def test_a_loop_that_never_begins_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """`run_steps` is a generator: without a loop around it, nothing trains."""
    strategy = sg.OneDeviceStrategy("cpu:0")
    for _ in strategy.run_steps(len, [[1], [2]]):
        break
    assert list(strategy.run_steps(len, [[1], [2]])) == [1, 1]
    assert caplog.messages == []
    strategy.run_steps(len, [[1], [2]])
    assert len(caplog.messages) == 1
    assert "no step has run" in caplog.messages[0]
