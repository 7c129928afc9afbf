"""State and groups of an optimizer in a scheduled function: refused, with the remedy (issue 20)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.errors import MisuseError


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    """One worker and two parameter servers, as threads of this process."""
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as made:
        yield made


def read(optimizer: Any, model: nn.Module) -> Any:
    return optimizer.state[model[0].weight]["exp_avg"]  # type: ignore[index]


def get(optimizer: Any, model: nn.Module) -> Any:
    return optimizer.state.get(model[0].weight)  # type: ignore[index]


def ask(optimizer: Any, model: nn.Module) -> bool:
    return model[0].weight in optimizer.state  # type: ignore[index]


def loop(optimizer: Any, model: nn.Module) -> list[Any]:
    return [state["step"] for state in optimizer.state.values()]


def count(optimizer: Any, model: nn.Module) -> int:
    return len(optimizer.state)


def write(optimizer: Any, model: nn.Module) -> None:
    optimizer.state[model[0].weight] = {}  # type: ignore[index]


def save(optimizer: Any, model: nn.Module) -> Any:
    return optimizer.state_dict()


def load(optimizer: Any, model: nn.Module) -> None:
    optimizer.load_state_dict({"state": {}, "param_groups": []})


def add(optimizer: Any, model: nn.Module) -> None:
    optimizer.add_param_group({"params": model[1].parameters()})  # type: ignore[index]


USES = [
    *((use, "state") for use in (read, get, ask, loop, count, write)),
    (save, r"state_dict\(\)"),
    (load, r"load_state_dict\(\)"),
    (add, r"add_param_group\(\)"),
]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, torch.optim.Adam(model[0].parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("use", "name"), USES)
def test_a_function_may_not_use_what_the_worker_does_not_have(
    cluster: sg.LocalCluster, use: Callable[[Any, nn.Module], Any], name: str
) -> None:
    strategy = sg.ParameterServerStrategy(cluster.resolver)
    coordinator = sg.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = make()

    def step(x: Tensor) -> None:
        train(model, optimizer, x)
        use(optimizer, model)

    coordinator.schedule(step, args=(torch.ones(2, 3),))
    with pytest.raises(MisuseError, match=rf"Adam\.{name} was used in a scheduled function.*join"):
        coordinator.join()
    strategy.close()


def test_the_coordinator_has_the_state_and_may_add_groups(cluster: sg.LocalCluster) -> None:
    strategy = sg.ParameterServerStrategy(cluster.resolver)
    coordinator = sg.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = make()
    plain, reference = make()
    x = torch.ones(2, 3)
    for number in range(4):
        coordinator.schedule(lambda x: train(model, optimizer, x), args=(x,))
        coordinator.join()
        train(plain, reference, x)
        if number == 1:
            add(optimizer, model)
            add(reference, plain)
        mine, wanted = optimizer.state_dict(), reference.state_dict()
        torch.testing.assert_close(mine["state"], wanted["state"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-6)
    strategy.close()
