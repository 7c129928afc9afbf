"""What is read from a variable on a parameter server may be written to without harm."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg

LARGE = 1 << 15


@pytest.fixture
def coordinator(either_way: sg.ClusterCoordinator) -> sg.ClusterCoordinator:
    return either_way


def scribble(one: sg.Variable, neighbour: sg.Variable) -> list[float]:
    """Write into what was read, then look at what the variables are."""
    found = []
    for read in (sg.convert_to_tensor, lambda v: v.read_value(), lambda v: v.value()):
        with torch.no_grad():
            read(one).add_(100.0)
        one.assign_add(torch.ones(one.shape))
        neighbour.assign_add(torch.ones(neighbour.shape))
        found += [float(one.read_value().max()), float(neighbour.read_value().max())]
    return found


@pytest.mark.parametrize("size", [1, LARGE])
@pytest.mark.parametrize("trainable", [True, False])
def test_writing_into_what_was_read_changes_no_variable(
    coordinator: sg.ClusterCoordinator, size: int, trainable: bool
) -> None:
    with coordinator.strategy.scope():
        one = sg.Variable(torch.zeros(size), trainable=trainable)
        neighbour = sg.Variable(torch.zeros(1), trainable=trainable)
    there = coordinator.schedule(scribble, args=(one, neighbour)).get(timeout_s=60)
    assert there == [1, 1, 2, 2, 3, 3]
    assert scribble(one, neighbour) == [4, 4, 5, 5, 6, 6]
    again = coordinator.schedule(
        lambda a, b: (float(a.read_value().max()), float(b.read_value().max())),
        args=(one, neighbour),
    )
    assert again.get(timeout_s=60) == (6, 6)


def cube_gradient(variable: sg.Variable) -> float:
    product = variable * variable
    product = product * variable  # read again: the first product must stay valid
    (gradient,) = torch.autograd.grad(product, [variable.value()])
    return float(gradient)


def test_a_variable_read_twice_has_a_gradient(coordinator: sg.ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        variable = sg.Variable(2.0, trainable=True)
    assert coordinator.schedule(cube_gradient, args=(variable,)).get(timeout_s=60) == 12.0
    assert cube_gradient(variable) == 12.0
