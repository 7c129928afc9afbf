"""Writes a scheduled function does not wait for: what others, and the function itself, see of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from waiting import Gate, pass_gate, wait_until

import stratagem as sg

pytestmark = pytest.mark.process


@pytest.fixture
def cluster() -> Iterator[sg.LocalCluster]:
    with sg.LocalCluster(workers=1, ps=2) as made:
        yield made


@pytest.fixture
def strategy(cluster: sg.LocalCluster) -> Iterator[sg.ParameterServerStrategy]:
    made = sg.ParameterServerStrategy(cluster.resolver)
    yield made
    made.close()


def test_a_write_returns_the_value_after_it(strategy: Any) -> None:
    """VAR-12: even if somebody looks only after the next write."""
    with strategy.scope():
        v = sg.Variable(torch.zeros(2))

    def step() -> tuple[Any, ...]:
        first = v.assign_add(torch.ones(2))
        second = v.assign_sub(torch.full((2,), 3.0))
        third = v.assign(torch.full((2,), 7.0))
        fourth = v.scatter_add(torch.sparse_coo_tensor([[1]], torch.ones(1), (2,)))
        return first, second, third, fourth, v.read_value() + 1

    with sg.ClusterCoordinator(strategy) as coordinator:
        found = [one.tolist() for one in coordinator.schedule(step).fetch(timeout_s=120)]
    assert found == [[1.0, 1.0], [-2.0, -2.0], [7.0, 7.0], [7.0, 8.0], [8.0, 9.0]]


def test_finished_means_written(strategy: Any) -> None:
    """Whoever has seen a result sees what its function wrote."""
    with strategy.scope():
        v = sg.Variable(0.0)
        w = sg.Variable(torch.zeros(1000, 1000))  # too large to be held back

    def step() -> None:
        v.assign_add(1.0)
        w.assign_add(torch.ones(1000, 1000))

    with sg.ClusterCoordinator(strategy) as coordinator:
        for count in range(1, 40):
            coordinator.schedule(step).fetch(timeout_s=120)
            assert float(v) == count
        assert float(w.read_value()[0, 0]) == 39


def test_results_do_not_wait_for_a_closure_that_takes_long(strategy: Any, gate: Gate) -> None:
    """A quick function's results travel together, but not at the price of a hang."""
    with strategy.scope():
        v = sg.Variable(0.0)

    def step(path: str) -> float:
        v.assign_add(1.0)
        if not path:
            return 0.0
        pass_gate(path)
        return float(v)

    with sg.ClusterCoordinator(strategy) as coordinator:
        for _ in range(50):  # the function is known to be quick by now
            coordinator.schedule(step, args=("",))
        coordinator.join(timeout_s=120)
        quick = [coordinator.schedule(step, args=("",)) for _ in range(5)]
        long = coordinator.schedule(step, args=(gate.path,))
        assert [one.fetch(timeout_s=120) for one in quick] == [0.0] * 5
        wait_until(lambda: float(v) >= 56)
        assert float(v) == 56  # what the long one wrote is not held back either
        gate.open()
        assert long.fetch(timeout_s=120) == 56


def test_a_write_that_fails_late_is_the_error_of_its_own_closure(
    strategy: Any, cluster: sg.LocalCluster
) -> None:
    """The server goes between the write and its acknowledgement."""
    with strategy.scope():
        v = sg.Variable(0.0)

    def step() -> None:
        v.assign_add(1.0)

    with sg.ClusterCoordinator(strategy) as coordinator:
        for _ in range(20):
            coordinator.schedule(step)
        coordinator.join(timeout_s=120)
        index = int(v.device.split("task:")[1].split("/")[0])
        cluster.kill_ps(index)
        with pytest.raises(sg.errors.ParameterServerLost):
            for _ in range(20):
                coordinator.schedule(step)
            coordinator.join(timeout_s=120)


def test_a_write_is_on_its_way_even_if_its_function_never_ends(strategy: Any, gate: Gate) -> None:
    """Nothing else is held back, so nobody but the line thread can send it."""
    with strategy.scope():
        v = sg.Variable(0.0)

    def step(path: str) -> None:
        v.assign_add(1.0)
        if path:
            pass_gate(path)

    with sg.ClusterCoordinator(strategy) as coordinator:
        for _ in range(20):
            coordinator.schedule(step, args=("",))
        coordinator.join(timeout_s=120)
        long = coordinator.schedule(step, args=(gate.path,))
        wait_until(lambda: float(v) >= 21)
        assert float(v) == 21
        gate.open()
        long.fetch(timeout_s=120)


def test_arguments_that_only_look_the_same_are_not_the_same(strategy: Any) -> None:
    with sg.ClusterCoordinator(strategy) as coordinator:
        found = [coordinator.schedule(str, args=(x,)) for x in (0.0, -0.0, 0, False, 0.0)]
        assert coordinator.fetch(found) == ["0.0", "-0.0", "0", "False", "0.0"]


def test_a_captured_tensor_that_became_none_is_none_from_then_on(strategy: Any) -> None:
    with sg.ClusterCoordinator(strategy) as coordinator:
        x: Any = torch.ones(2)

        def look() -> str:
            return repr(x)

        assert coordinator.schedule(look).fetch(timeout_s=120) == "tensor([1., 1.])"
        x = None
        assert coordinator.schedule(look).fetch(timeout_s=120) == "None"
