"""Models and optimizers that come and go under one parameter-server strategy."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem._wire import messages


@pytest.fixture
def coordinator(either_way: sg.ClusterCoordinator) -> sg.ClusterCoordinator:
    return either_way


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def build(coordinator: sg.ClusterCoordinator, kind: Any) -> tuple[nn.Module, Any]:
    with coordinator.strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return model, kind(model.parameters(), lr=0.1)


def train(coordinator: sg.ClusterCoordinator, model: Any, optimizer: Any) -> None:
    coordinator.schedule(step, args=(model, optimizer, torch.randn(4, 2)))
    coordinator.join(timeout_s=60)


def test_models_and_optimizers_may_be_forgotten(coordinator: sg.ClusterCoordinator) -> None:
    first, first_optimizer = build(coordinator, torch.optim.SGD)
    train(coordinator, first, first_optimizer)
    second, second_optimizer = build(coordinator, torch.optim.Adam)
    train(coordinator, second, second_optimizer)
    del first, first_optimizer
    gc.collect()

    # The third must not get the number of one that is still there, and the worker, which still has
    # the first model's buffers, must not ask the servers for them.
    third, third_optimizer = build(coordinator, torch.optim.SGD)
    train(coordinator, third, third_optimizer)
    train(coordinator, second, second_optimizer)

    state = second_optimizer.state_dict()["state"]
    assert {float(one["step"]) for one in state.values()} == {2.0}
    assert int(second[1].num_batches_tracked) == 2


def test_a_model_that_leads_back_to_itself_may_be_forgotten(
    coordinator: sg.ClusterCoordinator,
) -> None:
    """By a hook, an attribute, an object: comparing them later must not keep them."""
    before = on_server(coordinator)
    model, optimizer = build(coordinator, torch.optim.SGD)
    model.register_forward_hook(lambda module, args, result, whole=model: None)
    model[0].whole, model[0].table = [model], {"whole": model, "more": Owner(model)}
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs, whole=model: None)
    train(coordinator, model, optimizer)
    model[0].later = Owner(model)
    model.register_forward_pre_hook(lambda module, args, whole=model: None)
    train(coordinator, model, optimizer)
    assert on_server(coordinator) > before
    reference = weakref.ref(model)
    del model, optimizer
    assert settled(coordinator) == before
    assert reference() is None
    tracker = coordinator.strategy._cluster_views()._tracker
    assert repr(tracker) == "<ChangeTracker of 0 objects, 0 read each time>"


class Owner:
    """Something that has a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def write_all(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(100.0)
        model[1].running_mean.fill_(100.0)
    raise ArithmeticError("after writing")


def values(model: nn.Module) -> list[Tensor]:
    model.eval()
    return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]


def test_writes_in_place_of_a_failed_function_are_undone(
    coordinator: sg.ClusterCoordinator,
) -> None:
    model, optimizer = build(coordinator, torch.optim.SGD)
    train(coordinator, model, optimizer)
    coordinator.schedule(write_all, args=(model,))
    with pytest.raises(ArithmeticError):
        coordinator.join(timeout_s=60)
    train(coordinator, model, optimizer)

    seen = coordinator.schedule(values, args=(model,)).get(timeout_s=60)
    here = [one.detach() for one in (*model.parameters(), *model.buffers())]
    for ours, theirs in zip(here, seen, strict=True):
        assert torch.equal(ours, theirs)
    assert all(float(one.detach().abs().max()) < 50 for one in model.parameters())
    assert float(model[1].running_mean.abs().max()) < 50


def slow_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    model(torch.randn(256, 2))  # some work, so that closures still wait when the model is forgotten
    step(model, optimizer, x)
    return 1.0


def test_a_model_forgotten_while_closures_wait_with_it_is_freed_only_after_them(
    coordinator: sg.ClusterCoordinator,
) -> None:
    results = []
    for _ in range(3):
        model, optimizer = build(coordinator, torch.optim.SGD)
        for _ in range(40):
            args = (model, optimizer, torch.randn(4, 2))
            results.append(coordinator.schedule(slow_step, args=args))
        del model, optimizer, args
        gc.collect()
    coordinator.join(timeout_s=60)
    assert coordinator.fetch(results) == [1.0] * 120


def test_closing_a_session_the_servers_have_ended_does_not_raise(
    coordinator: sg.ClusterCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = build(coordinator, torch.optim.SGD)
    train(coordinator, model, optimizer)
    strategy = coordinator.strategy
    client = strategy._variables.client
    client.ask(0, messages.CloseSession(session=strategy._session))  # as when its lease runs out
    coordinator.close()
    assert strategy._variables.closed
    if not client._shares_reads[0]:
        assert "not fetched" in caplog.text


def on_server(coordinator: sg.ClusterCoordinator) -> int:
    """How many variables the only server holds."""
    return len(coordinator.strategy._variables.client.versions(0))


def settled(coordinator: sg.ClusterCoordinator) -> int:
    """How many, after the next closure; scheduling is when the forgotten are freed."""
    gc.collect()
    coordinator.schedule(float)
    coordinator.join(timeout_s=60)
    return on_server(coordinator)


def test_forgotten_variables_are_freed_as_models_are(coordinator: sg.ClusterCoordinator) -> None:
    """Plain, sharded and per-worker ones; those that stay keep their values."""
    with coordinator.strategy.scope():
        stays = sg.Variable(torch.arange(3.0))
        before = on_server(coordinator)
        gone: list[Any] = [
            sg.Variable(torch.zeros(1 << 16)),
            sg.Variable(1.0),
            sg.Variable(0, per_worker_variable=True),
        ]
    used = coordinator.schedule(lambda: float(gone[0].read_value().sum()) + float(gone[1]))
    assert used.fetch(timeout_s=60) == 1.0
    value = gone[0].read_value()
    assert on_server(coordinator) == before + 3
    del used, gone[:]
    assert settled(coordinator) == before
    assert float(value.sum()) == 0.0  # what was read stays valid
    assert coordinator.schedule(lambda: stays.read_value().tolist()).fetch() == [0.0, 1.0, 2.0]
    # Without a single closure in between, too: a loop on the coordinator must not fill the servers.
    with coordinator.strategy.scope():
        for _ in range(5):
            sg.Variable(torch.zeros(8))
            gc.collect()
    assert on_server(coordinator) <= before + 1


def test_captured_objects_are_freed_after_the_function(
    coordinator: sg.ClusterCoordinator,
) -> None:
    """Captured by a function, alone or beside a list: held while it waits, free when it is done."""
    empty = settled(coordinator)
    results = []

    def schedule_and_forget(captures_list: bool) -> None:
        model, optimizer = build(coordinator, torch.optim.SGD)
        with coordinator.strategy.scope():
            counter = sg.Variable(0.0)
        extras = [1.0]  # a list can change unseen: such a function is packed at every schedule

        def plain() -> float:
            slow_step(model, optimizer, torch.randn(4, 2))
            return float(counter.assign_add(1.0))

        def with_list() -> float:
            return plain() * extras[0]

        function = with_list if captures_list else plain
        results.extend(coordinator.schedule(function) for _ in range(20))

    for captures_list in (False, True, False, True):
        schedule_and_forget(captures_list)
        gc.collect()
    coordinator.join(timeout_s=60)
    assert sorted(coordinator.fetch(results)) == sorted([float(n) for n in range(1, 21)] * 4)
    assert settled(coordinator) == empty
