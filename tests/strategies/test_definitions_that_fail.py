"""Objects a worker cannot rebuild: who hears of it, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg


class OnlyHere(nn.Module):
    """A module that refuses to be rebuilt on a worker, as one that needs a file there does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise FileNotFoundError("no vocabulary on this machine")


class Around(nn.Module):
    """A module that has such a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.part = OnlyHere()


@pytest.fixture
def coordinator() -> Iterator[sg.ClusterCoordinator]:
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy) as made:
            yield made


def test_only_closures_that_need_the_object_fail(coordinator: sg.ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        bad = Around()
        good = nn.Linear(2, 1)
        total = sg.Variable(0.0)

    def works(x: torch.Tensor) -> float:
        total.assign_add(1.0)
        return good(x).sum().item()

    def fails() -> None:
        total.assign_add(100.0)
        bad.part.inner(torch.ones(1, 1))

    def fails_by_argument(model: nn.Module) -> None:
        total.assign_add(100.0)

    x = torch.ones(3, 2)
    for attempt in range(3):
        coordinator.schedule(fails)
        with pytest.raises(FileNotFoundError, match="no vocabulary"):
            coordinator.join(timeout_s=60)
        coordinator.schedule(fails_by_argument, args=(bad.part,))
        with pytest.raises(FileNotFoundError, match="no vocabulary"):
            coordinator.join(timeout_s=60)
        expected = good(x).sum().item()
        assert coordinator.schedule(works, args=(x,)).fetch(timeout_s=60) == expected
        assert float(total) == attempt + 1.0
    # A part of the refused module that is fine by itself can be used by itself.
    inner = bad.part.inner
    assert coordinator.schedule(lambda: tuple(inner.weight.shape)).fetch(timeout_s=60) == (1, 1)
