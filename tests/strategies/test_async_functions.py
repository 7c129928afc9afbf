"""Functions declared with ``async def`` are refused: their coroutines would be awaited by nobody, and nothing computed."""

from __future__ import annotations

import asyncio
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import stratagem as sg

WORDS = r"asynchronous \(async def\).*plain function.*asyncio\.run"


async def step(x: int = 1) -> int:
    return x


async def steps() -> Any:
    yield 1


class Model:
    async def __call__(self) -> int:
        return 1

    async def step(self) -> int:
        return 1


ASYNC = {
    "function": step,
    "generator": steps,
    "partial": functools.partial(functools.partial(step), 2),
    "method": Model().step,
    "object": Model(),
}


@pytest.fixture(params=["default", "one device", "two replicas"])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "default":
        yield sg.get_strategy()
        return
    devices = ["cpu:0"] if request.param == "one device" else ["cpu:0", "cpu:1"]
    with sg.MirroredStrategy(devices) as made:
        yield made


@pytest.fixture(scope="module")
def coordinator() -> Iterator[sg.ClusterCoordinator]:
    with (
        sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster,
        sg.ParameterServerStrategy(cluster.resolver) as strategy,
        sg.ClusterCoordinator(strategy) as made,
    ):
        yield made


@pytest.mark.parametrize("fn", ASYNC.values(), ids=ASYNC.keys())
def test_run_refuses_asynchronous_functions(strategy: Any, fn: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=rf"run\(\) of .*{WORDS}"):
        strategy.run(fn)
    assert strategy.run(lambda: asyncio.run(step(3))) == 3


def test_run_notices_coroutines_of_plain_functions(strategy: Any) -> None:
    """And closes them: Python has nothing to warn of afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match=WORDS):
            strategy.run(lambda: step(3))
        gc.collect()


@pytest.mark.parametrize("fn", ASYNC.values(), ids=ASYNC.keys())
def test_the_coordinator_refuses_asynchronous_functions(
    coordinator: sg.ClusterCoordinator, fn: Callable[..., Any]
) -> None:
    """At the call that was given it, not when a worker has run it."""
    with pytest.raises(TypeError, match=rf"schedule\(\) of .*{WORDS}"):
        coordinator.schedule(fn)
    with pytest.raises(TypeError, match=rf"create_per_worker_resource\(\) of .*{WORDS}"):
        coordinator.create_per_worker_resource(fn)
    with pytest.raises(TypeError, match=rf"create_per_worker_dataset\(\) of .*{WORDS}"):
        coordinator.create_per_worker_dataset(fn)
    assert coordinator.schedule(lambda: asyncio.run(step(3))).fetch(timeout_s=120) == 3
