"""Objects of Lightning Fabric and Hugging Face accelerate in a training step, under every strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning_fabric import Fabric
from torch import nn

import stratagem as sg

STRATEGIES: dict[str, Callable[[], sg.Strategy]] = {
    "one device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "central": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
}


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings in objects that the whole process shares."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def batches() -> list[Any]:
    """Five batches of 7 rows, which do not divide evenly."""
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(7, 4, generator=random), torch.randn(7, 1, generator=random)) for _ in range(5)
    ]


def prepare() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def with_fabric() -> tuple[Any, nn.Module]:
    plain, optimizer, scheduler = prepare()
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(plain, optimizer)

    def step(batch: Any) -> Any:
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return step, plain


def with_accelerate() -> tuple[Any, nn.Module]:
    plain, optimizer, scheduler = prepare()
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(plain, optimizer, scheduler)

    def step(batch: Any) -> Any:
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return step, plain


LIBRARIES = {"fabric": with_fabric, "accelerate": with_accelerate}


def train(library: str, strategy: sg.Strategy | None) -> list[Any]:
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        step, model = LIBRARIES[library]()
    if strategy is None:
        for batch in batches():
            step(batch)
    else:
        list(strategy.run_steps(step, batches()))
    return [parameter.detach().clone() for parameter in model.parameters()]


def compare(library: str, strategy: sg.Strategy) -> None:
    torch.testing.assert_close(train(library, strategy), train(library, None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_their_objects_work_in_a_step(library: str, kind: str) -> None:
    with STRATEGIES[kind]() as strategy:
        compare(library, strategy)


@pytest.mark.process
def test_workers_use_the_optimizer_inside_the_wrapper() -> None:
    """One worker, in a process of its own: equal to plain training."""
    with sg.LocalCluster(workers=1, ps=1) as cluster:
        for library in LIBRARIES:
            with sg.ParameterServerStrategy(cluster.resolver) as strategy:
                compare(library, strategy)


def test_settings_of_a_wrapper_that_workers_would_ignore_are_refused() -> None:
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                _, optimizer, _ = prepare()
                accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
                optimizer = accelerator.prepare(optimizer)
            coordinator = sg.ClusterCoordinator(strategy)
            with pytest.raises(sg.errors.UnsupportedOptimizer, match="accumulation_steps=4"):
                coordinator.schedule(lambda: optimizer.step())
