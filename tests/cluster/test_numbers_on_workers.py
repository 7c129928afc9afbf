"""A warning about numbers that a scheduled function changes and that stay on the worker (issue 20)."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg

GLOBAL = {"calls": 0}
steps = 0


class Holder:
    """An object with counters and other numbers."""

    def __init__(self) -> None:
        self.steps = 0
        self.tau = 1.0
        self.total = 0.0
        self.limit = 3.0
        self.counts = {"n": 0, "limit": 5}
        self.listed = [0, 1]
        self.space = types.SimpleNamespace(calls=0)
        self.mean = torch.zeros(2)
        self.shadow = [torch.zeros(2)]
        self.by_name = {"w": torch.zeros(2)}
        self.hidden = torch.zeros(2)
        self.constant = torch.ones(2)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[sg.ClusterCoordinator]:
    """One worker and one parameter server, as threads of this process."""
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        yield sg.ClusterCoordinator(strategy)
        strategy.close()


def in_dict(holder: Any) -> None:
    holder.counts["n"] += 1


def in_list(holder: Any) -> None:
    holder.listed[1] += 1


def in_namespace(holder: Any) -> None:
    holder.space.calls += 1


def temperature(holder: Any) -> None:
    holder.tau *= 0.5


def total(holder: Any) -> None:
    holder.total += holder.limit


def in_global(holder: Any) -> None:
    GLOBAL["calls"] += 1


def by_helper(holder: Any) -> None:
    in_dict(holder)


def running_mean(holder: Any) -> None:
    holder.mean.mul_(0.9).add_(holder.constant, alpha=0.1)


def moving_average(holder: Any) -> None:
    for average in holder.shadow:
        average.sub_(0.1 * (average - 1))


def average_by_name(holder: Any) -> None:
    for name, value in (("w", 1.0),):
        holder.by_name[name] = 0.9 * holder.by_name[name] + 0.1 * value


def recurrent_state(holder: Any) -> None:
    holder.hidden = torch.tanh(holder.hidden + holder.constant)


CHANGES = [
    (running_mean, "the tensor in the step → Holder.mean"),
    (moving_average, "Holder.shadow"),
    (average_by_name, "Holder.by_name"),
    (recurrent_state, "Holder.hidden"),
    (in_dict, "Holder.counts['n']"),
    (in_list, "Holder.listed[1]"),
    (temperature, "Holder.tau"),
    (total, "Holder.total"),
    (in_global, "'GLOBAL'['calls']"),
    (by_helper, "Holder.counts['n']"),
]


def warnings_of(
    coordinator: sg.ClusterCoordinator, caplog: Any, function: Callable[[], Any]
) -> list[str]:
    """Schedule a function three times; return the warnings about it."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="stratagem"):
        for _ in range(3):
            coordinator.schedule(function)
            coordinator.join()
    found = [one.getMessage() for one in caplog.records]
    return [one for one in found if "stay on the worker" in one or "trains its own copies" in one]


@pytest.mark.parametrize(("change", "place"), CHANGES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_number_that_stays_on_the_worker_is_named_once(
    coordinator: sg.ClusterCoordinator, caplog: Any, change: Callable[[Any], None], place: str
) -> None:
    (found,) = warnings_of(coordinator, caplog, functools.partial(change, Holder()))
    assert place in found
    assert "limit" not in found
    assert "constant" not in found


def test_counters_that_move_everywhere_are_not_named(
    coordinator: sg.ClusterCoordinator, caplog: Any
) -> None:
    holder, inner = Holder(), 0

    def step() -> float:
        global steps
        nonlocal inner
        steps += 1
        inner += 1
        holder.steps += 1
        return holder.tau * holder.counts["n"] + len(holder.listed)

    assert warnings_of(coordinator, caplog, step) == []
    assert (steps, inner, holder.steps) == (3, 3, 3)


def count_items(local: dict[str, int], name: str) -> int:
    local[name] = local.get(name, 0) + 1
    return local[name]


def test_containers_that_no_code_changes_are_not_named(
    coordinator: sg.ClusterCoordinator, caplog: Any
) -> None:
    """A helper counts in a dict of the function itself; the vocabulary is only read."""
    vocabulary = {"a": 1, "b": 2}

    def step() -> int:
        own: dict[str, int] = {}
        return vocabulary["a"] + count_items(own, "a")

    assert warnings_of(coordinator, caplog, step) == []


class Cropped(nn.Module):
    """A method cuts a tensor that has the name of a truth value in the settings (nanoGPT's `bias`)."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(bias=False)
        self.register_buffer("bias", torch.ones(3))

    def crop(self, size: int) -> None:
        self.bias = self.bias[:size]

    def forward(self) -> Any:
        return self.bias.sum() + self.config.bias


def test_a_number_with_the_name_of_a_tensor_that_is_cut_is_not_named(
    coordinator: sg.ClusterCoordinator, caplog: Any
) -> None:
    with coordinator.strategy.scope():
        model = Cropped()

    def step() -> float:
        return float(model())

    assert warnings_of(coordinator, caplog, step) == []


def count(holder: Any) -> None:
    holder.steps += 1


def test_counters_of_a_partial_function_move_on_the_coordinator(
    coordinator: sg.ClusterCoordinator, caplog: Any
) -> None:
    holder = Holder()
    assert warnings_of(coordinator, caplog, functools.partial(count, holder)) == []
    assert warnings_of(coordinator, caplog, functools.partial(in_namespace, holder)) == []
    assert (holder.steps, holder.space.calls) == (3, 3)


def test_tensors_that_are_read_or_sent_are_not_named(
    coordinator: sg.ClusterCoordinator, caplog: Any
) -> None:
    """Constants, a list of parameters, and a tensor that every call makes again."""
    with coordinator.strategy.scope():
        model = nn.Linear(2, 1)
    weights, listed, noise = torch.ones(2), list(model.parameters()), torch.zeros(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        noise.normal_()
        x = weights.clone()
        x.mul_(2).add_(noise)
        optimizer.zero_grad()
        (model(x).sum() + sum(one.square().sum() for one in listed)).backward()
        optimizer.step()
        return x

    assert warnings_of(coordinator, caplog, step) == []


def test_training_is_not_named(coordinator: sg.ClusterCoordinator, caplog: Any) -> None:
    with coordinator.strategy.scope():
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(torch.ones(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
        scheduler.step()

    assert warnings_of(coordinator, caplog, step) == []


def test_tensors_that_a_function_trains_by_hand_are_named_once(
    coordinator: sg.ClusterCoordinator, caplog: Any
) -> None:
    """The worker trains its copies; the tensors of the coordinator stay as they were."""
    model = nn.Module()
    model.weight, model.scale = torch.ones(3, requires_grad=True), torch.ones(3)
    biases = [torch.ones(3, requires_grad=True)]
    fixed = torch.ones(3, requires_grad=True)

    def step() -> None:
        (model.weight * model.scale + biases[0]).sum().backward()
        with torch.no_grad():
            for trained in (model.weight, biases[0]):
                trained -= 0.1 * trained.grad

    def read() -> float:
        return float((fixed.detach() * 2).sum())

    (found,) = warnings_of(coordinator, caplog, step)
    assert "Module.weight" in found
    assert "variable 'biases'" in found
    assert "scale" not in found
    assert torch.equal(model.weight, torch.ones(3))
    assert warnings_of(coordinator, caplog, read) == []
