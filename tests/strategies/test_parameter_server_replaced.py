"""What is put in the place of a module's parameter, buffer, part or hook after its first use arrives.

Workers were told once what a module has; whatever changes of it on the coordinator must not be missed
silently (issue 4).
"""

from __future__ import annotations

import pytest
import torch
from scheduling import run
from torch import Tensor, nn

import stratagem as sg
from stratagem._core.torch_patches import change_notes

pytestmark = pytest.mark.process


def filled(layer: nn.Module, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(one, value) for name, one in layer.state_dict().items()}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_parameters_replaced_after_first_use_are_those_functions_see_and_train(
    coordinator: sg.ClusterCoordinator,
) -> None:
    """``load_state_dict(assign=True)`` and an assigned ``nn.Parameter``, then a new optimizer."""
    strategy = coordinator.strategy
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def apply() -> Tensor:
        return model(torch.ones(1, 2))

    def step() -> None:
        strategy.run(one_step, args=(model, optimizer))

    run(coordinator, step)
    model.load_state_dict(filled(model, 2.0), assign=True)
    assert run(coordinator, apply).item() == 2 * (6 + 6) + 2
    model[1].weight = nn.Parameter(torch.full((1, 2), 3.0))
    assert run(coordinator, apply).item() == 3 * (6 + 6) + 2
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run(coordinator, step)
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    plain.load_state_dict(filled(plain, 2.0))
    nn.init.constant_(plain[1].weight, 3.0)
    one_step(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_removed_and_tied_parameters_reach_workers(
    coordinator: sg.ClusterCoordinator,
) -> None:
    with coordinator.strategy.scope():
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        nn.init.ones_(one.weight)

    def look() -> tuple[bool, bool, Tensor]:
        return other.bias is None, other.weight is one.weight, other(torch.ones(1, 2))

    assert run(coordinator, look)[:2] == (False, False)
    other.bias = None
    other.weight = one.weight
    without_bias, tied, applied = run(coordinator, look)
    assert without_bias
    assert tied
    assert applied.tolist() == [[2.0, 2.0]]


def test_recurrent_modules_use_replaced_weights(coordinator: sg.ClusterCoordinator) -> None:
    """Their weights are in a list as well, which C++ reads."""
    with coordinator.strategy.scope():
        model = nn.GRU(2, 2)

    def apply() -> Tensor:
        return model(torch.ones(1, 1, 2))[0]

    run(coordinator, apply)
    plain = nn.GRU(2, 2)
    model.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(run(coordinator, apply), plain(torch.ones(1, 1, 2))[0])


def test_a_part_replaced_after_first_use_is_the_one_functions_see(
    coordinator: sg.ClusterCoordinator,
) -> None:
    """A new head on an old body, as in transfer learning."""
    with coordinator.strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def width() -> int:
        return model(torch.ones(1, 2)).shape[1]

    assert run(coordinator, width) == 1
    with coordinator.strategy.scope():
        model[1] = nn.Linear(2, 5)
    assert run(coordinator, width) == 5


def test_a_later_worker_sees_replaced_parameters(cluster: sg.LocalCluster) -> None:
    """FLT: its definitions are those of now; the parameter of before is freed on the servers."""
    strategy = sg.ParameterServerStrategy(cluster.resolver)
    with sg.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = nn.Linear(2, 1)

        def apply() -> float:
            return model(torch.ones(1, 2)).item()

        run(coordinator, apply)
        model.load_state_dict(filled(model, 4.0), assign=True)
        assert run(coordinator, apply) == 12.0
        pid = cluster.pid("worker", 0)
        cluster.kill_worker(0)
        cluster.wait_restarted(0, pid)
        assert run(coordinator, apply) == 12.0


def test_parameter_hooks_registered_later_run_until_removed(
    coordinator: sg.ClusterCoordinator,
) -> None:
    strategy = coordinator.strategy
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        strategy.run(one_step, args=(model, optimizer))

    run(coordinator, step)
    assert model.weight.tolist() == [[-1.0, -1.0]]
    double = model.weight.register_hook(lambda gradient: gradient * 2)
    run(coordinator, step)
    assert model.weight.tolist() == [[-3.0, -3.0]]

    def clear(parameter: Tensor) -> None:
        parameter.grad = None

    cleared = model.weight.register_post_accumulate_grad_hook(clear)
    run(coordinator, step)
    assert model.weight.tolist() == [[-3.0, -3.0]]
    cleared.remove()
    double.remove()
    run(coordinator, step)
    assert model.weight.tolist() == [[-4.0, -4.0]]


def test_a_hook_there_from_the_beginning_can_be_removed_later(
    coordinator: sg.ClusterCoordinator,
) -> None:
    strategy = coordinator.strategy
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    double = model.weight.register_hook(lambda gradient: gradient * 2)

    def step() -> None:
        strategy.run(one_step, args=(model, optimizer))

    run(coordinator, step)
    assert model.weight.tolist() == [[-2.0, -2.0]]
    double.remove()
    run(coordinator, step)
    assert model.weight.tolist() == [[-3.0, -3.0]]


def test_a_hook_on_a_table_that_workers_know_is_refused_until_removed(
    coordinator: sg.ClusterCoordinator,
) -> None:
    with coordinator.strategy.scope():
        table = nn.Embedding(8, 2)

    def look() -> int:
        return int(table(torch.tensor([1])).numel())

    assert run(coordinator, look) == 2
    handle = table.weight.register_hook(lambda gradient: gradient)
    for _ in range(2):
        with pytest.raises(ValueError, match="got a gradient hook after its first use"):
            coordinator.schedule(look)
    handle.remove()
    assert run(coordinator, look) == 2


class Remembering(nn.Module):
    """Its buffer has no value until the first call."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", None, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().clone()
        return x * self.weight


def test_a_buffer_without_a_value_that_a_function_fills_is_refused(
    coordinator: sg.ClusterCoordinator,
) -> None:
    """It would stay the worker's own, silently; with a value from the coordinator it is sent."""
    strategy = coordinator.strategy
    with strategy.scope():
        model = Remembering(persistent=True)

    def apply(x: Tensor) -> Tensor:
        return model(x)

    with pytest.raises(ValueError, match="buffer 'seen' of Remembering is None on the coordinator"):
        run(coordinator, apply, torch.ones(2))
    model.seen = torch.zeros(2)

    def on_replicas() -> None:
        strategy.run(model, args=(torch.full((2,), 7.0),))

    run(coordinator, on_replicas)
    assert model.seen.tolist() == [7.0, 7.0]


def test_a_buffer_outside_the_state_dict_may_be_a_workers_own(
    coordinator: sg.ClusterCoordinator,
) -> None:
    with coordinator.strategy.scope():
        model = Remembering(persistent=False)

    def apply() -> Tensor:
        model(torch.full((2,), 5.0))
        return model.seen

    assert run(coordinator, apply).tolist() == [5.0, 5.0]


def test_unchanged_objects_are_not_examined(coordinator: sg.ClusterCoordinator) -> None:
    """So that `schedule` looks at no module (steps, evaluation and reading are not changes)."""
    strategy = coordinator.strategy
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Conv1d(2, 2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        strategy.run(lambda: (model[:2](torch.rand(4, 2)).sum().backward(), optimizer.step())[1])

    run(coordinator, step)
    watch = change_notes.ChangeWatch()
    for number, module in enumerate(model.modules()):
        watch.keys[id(module)] = number
        for kind in ("_parameters", "_buffers", "_modules", "_forward_hooks"):
            watch.keys[id(vars(module)[kind])] = number
    run(coordinator, step)
    model[:2](torch.ones(2, 2))
    model.load_state_dict(model.state_dict())
    run(coordinator, step)
    assert not watch.take()
    model.eval()
    assert set(watch.take()) == {0, 1, 2, 3}
