"""Objects a worker cannot rebuild: who hears of it, and who does not."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_optimizer import Touchy
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


class OwnReduce(nn.Module):
    """A module that pickles as its configuration, as Keras models do."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size = size
        self.layer = nn.Linear(size, 1)

    def __reduce__(self) -> Any:
        return OwnReduce, (self.size,)


class OwnState(nn.Module):
    """A module that leaves its parameters out of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_parameters": {}}


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[sg.ClusterCoordinator]:
    monkeypatch.setenv("STRATAGEM_OPTIMIZER_MODULES", "own_optimizer")
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


@pytest.mark.parametrize("make", [OwnReduce, OwnState])
def test_a_module_that_pickles_without_its_parameters_is_refused(
    coordinator: sg.ClusterCoordinator, make: Callable[[], nn.Module]
) -> None:
    """A worker would train a private copy (issue 12, section 3)."""
    with coordinator.strategy.scope():
        model = make()
        around = nn.Sequential(nn.Linear(2, 2), model)
    for used in (model, around):
        for _ in range(2):
            with pytest.raises(sg.errors.ForeignParameterError, match="without its parameter"):
                coordinator.schedule(lambda used=used: used.training)
    fine = around[0]
    assert coordinator.schedule(lambda: fine.training).fetch(timeout_s=60)


def at_the_second_attempt(coordinator: sg.ClusterCoordinator, fn: Callable[[], object]) -> object:
    """The first may fail as those before it; it asks for what it missed."""
    coordinator.schedule(fn)
    with contextlib.suppress(OSError):
        coordinator.join(timeout_s=60)
    return coordinator.schedule(fn).fetch(timeout_s=60)


def test_closures_that_use_an_object_fail_after_its_update_failed(
    coordinator: sg.ClusterCoordinator, tmp_path: Path
) -> None:
    """Others go on; and it is made up for when the next closure needs it and it works."""
    mark = tmp_path / "refuses"
    with coordinator.strategy.scope():
        first, second = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizer = Touchy(first.parameters(), lr=0.5, refuses=str(mark))
        total = sg.Variable(0.0)

    def rates() -> list[float]:
        return [group["lr"] for group in optimizer.param_groups]

    def add() -> None:
        total.assign_add(1.0)

    assert coordinator.schedule(rates).fetch(timeout_s=60) == [0.5]
    mark.touch()
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.25})
    for attempt in range(3):
        coordinator.schedule(rates)
        with pytest.raises(OSError, match="no group is taken here"):
            coordinator.join(timeout_s=60)
        coordinator.schedule(add)
        coordinator.join(timeout_s=60)
        assert float(total) == attempt + 1.0
    mark.unlink()
    assert at_the_second_attempt(coordinator, rates) == [0.5, 0.25]


SPARE = 64 << 20


def limit_memory(spare: int) -> None:
    """Runs on a worker: from now on it gets little more memory than it has; with 0, all it wants."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare if spare else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@pytest.fixture
def process() -> Iterator[sg.ClusterCoordinator]:
    with sg.LocalCluster(workers=1, ps=1) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy, sg.ClusterCoordinator(strategy) as made:
            yield made


@pytest.mark.process
@pytest.mark.parametrize("what", ["function", "module"])
def test_objects_are_sent_again_after_a_memory_error(
    process: sg.ClusterCoordinator, what: str
) -> None:
    """A function, or a module with large tensors of its own: its closure fails, the next has it."""
    large = torch.ones(SPARE)  # 4 times too much
    with process.strategy.scope():
        model = nn.Linear(1, 1)
    if what == "module":
        model.extra = large  # type: ignore[assignment]  # neither parameter nor buffer: travels along

    def use_function() -> int:
        return int(large.numel())

    def use_module() -> int:
        return int(model.extra.numel())  # type: ignore[operator]

    use: Callable[[], int] = use_function if what == "function" else use_module
    process.schedule(limit_memory, args=(SPARE,))
    process.join(timeout_s=60)
    process.schedule(use)
    with pytest.raises(MemoryError, match="no memory is left"):
        process.join(timeout_s=60)
    process.schedule(limit_memory, args=(0,))
    process.join(timeout_s=60)
    assert process.schedule(use).fetch(timeout_s=60) == SPARE
