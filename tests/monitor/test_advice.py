"""Every advice appears when a real cluster has its cause."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem._monitor.advice import Advice, advise
from stratagem._monitor.cluster_view import ClusterView
from stratagem._monitor.monitor import Monitor
from stratagem._monitor.sample_sources import ClusterSource, ProgramSource
from stratagem.errors import DeadlineExceeded

LIMIT_S = 200.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    """Two workers and a server that exchange rows by sockets, as between hosts."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STRATAGEM_SHARED_MEMORY", "0")
        with sg.LocalCluster(workers=2, ps=1) as cluster:
            yield cluster


@pytest.fixture
def strategy(cluster: sg.LocalCluster) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        yield strategy


def found(view: ClusterView, kind: str) -> Advice | None:
    return next((one for one in advise(view) if one.kind == kind), None)


def advice_of(
    strategy: sg.ParameterServerStrategy, kind: str, load: Callable[[], object], text: str = ""
) -> Advice:
    """Repeat a load until the advice appears with the text, and return the advice."""
    coordinator = sg.ClusterCoordinator(strategy)
    with Monitor(ProgramSource(coordinator), every_s=0.3).start() as monitor:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            load()
            view = monitor.view
            one = found(view, kind)
            if one is not None and text in str(one):
                return one
    raise DeadlineExceeded(
        f"no advice {kind!r} with {text!r}: {view.phases}, {[str(a) for a in advise(view)]}"
    )


@pytest.mark.process
def test_workers_that_wait_for_input(strategy) -> None:
    """A dataset that delivers slowly."""
    coordinator = sg.ClusterCoordinator(strategy)

    def slow() -> Iterator[int]:
        for number in itertools.count():
            time.sleep(0.02)
            yield number

    iterators = iter(
        coordinator.create_per_worker_dataset(lambda: sg.data.Dataset.from_generator(slow))
    )

    def load() -> None:
        for _ in range(20):
            coordinator.schedule(lambda it: next(it) and None, args=(iterators,))
        coordinator.join(timeout_s=LIMIT_S)

    text = str(advice_of(strategy, "input", load))
    assert text.startswith("workers wait for input ")
    assert "prefetch" in text


@pytest.mark.slow
def test_a_server_that_is_busy_and_workers_that_wait_for_it(strategy) -> None:
    """Adam updates every row of a table for each lookup of one row."""
    with strategy.scope():
        table = nn.Embedding(60_000, 32)
        optimizer = torch.optim.Adam(table.parameters())

    def step() -> None:
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        optimizer.step()

    coordinator = sg.ClusterCoordinator(strategy)

    def load() -> None:
        for _ in range(10):
            coordinator.schedule(step)
        coordinator.join(timeout_s=LIMIT_S)

    assert "server 0 is busy " in str(advice_of(strategy, "server busy", load))
    assert "rows in use" in str(advice_of(strategy, "writing", load))


@pytest.mark.process
def test_a_saturated_coordinator(strategy) -> None:
    """Empty steps: the program can only schedule."""
    coordinator = sg.ClusterCoordinator(strategy)

    def empty() -> None:
        return None

    def load() -> None:
        for _ in range(2000):
            coordinator.schedule(empty)

    text = str(advice_of(strategy, "coordinator saturated", load))
    assert text.endswith("schedule several steps per closure")


@pytest.mark.process
def test_workers_without_work(strategy) -> None:
    """A program that waits for each result before it schedules the next step."""
    coordinator = sg.ClusterCoordinator(strategy)

    def load() -> None:
        coordinator.schedule(lambda: None).fetch()
        time.sleep(0.05)

    # Before the first sample with steps, the advice is that the program schedules nothing.
    assert advice_of(strategy, "no work", load, "schedule further ahead")


@pytest.mark.process
def test_a_straggler_is_marked_and_named(strategy) -> None:
    """Worker 1 needs ten times as long for a step."""
    coordinator = sg.ClusterCoordinator(strategy)

    def step() -> None:
        time.sleep(0.2 if sg.get_current_worker_index() == 1 else 0.02)

    def load() -> None:
        for _ in range(20):
            coordinator.schedule(step)
        while not coordinator.done():
            time.sleep(0.05)

    text = str(advice_of(strategy, "straggler", load, "worker 1 makes "))
    assert "computing" in text
    # Sleeping is computing as far as the worker knows.
    assert "add workers" in str(advice_of(strategy, "computing", load))


@pytest.mark.process
def test_a_hot_table_that_is_read_all_the_time(strategy) -> None:
    """Steps that only look rows up, nearly all of them in one table."""
    with strategy.scope():
        hot, cold = nn.Embedding(50_000, 64), nn.Embedding(100, 4)

    def step() -> None:
        with torch.no_grad():
            hot(torch.arange(20_000))
            cold(torch.tensor([1, 1, 2]))

    coordinator = sg.ClusterCoordinator(strategy)

    def load() -> None:
        for _ in range(6):
            coordinator.schedule(step)
        coordinator.join(timeout_s=LIMIT_S)

    text = str(advice_of(strategy, "reading", load, "of the rows from the table "))
    assert "one shard per server" in text


@pytest.mark.process
def test_results_that_take_longer_than_the_steps(strategy) -> None:
    """Workers pack results after the step; this result takes much longer to pack than to compute."""
    coordinator = sg.ClusterCoordinator(strategy)

    class TakesLongToPack:
        def __reduce__(self) -> Any:
            time.sleep(0.05)
            return int, ()

    def load() -> None:
        for _ in range(10):
            coordinator.schedule(TakesLongToPack)
        coordinator.join(timeout_s=LIMIT_S)

    assert "return smaller results" in str(advice_of(strategy, "overhead", load))


@pytest.mark.process
def test_tasks_that_share_a_processor(cluster) -> None:
    """Both workers compute, on the same processor."""
    processor = min(os.sched_getaffinity(0))
    everywhere = os.sched_getaffinity(0)

    def compute(allowed: set[int]) -> None:
        os.sched_setaffinity(0, allowed)
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass

    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        coordinator = sg.ClusterCoordinator(strategy)
        pinned = coordinator.create_per_worker_resource(compute, args=({processor},))

        def load() -> None:
            for _ in range(4):
                coordinator.schedule(lambda _: compute({processor}), args=(pinned,))
            coordinator.join(timeout_s=LIMIT_S)

        try:
            assert "fewer tasks" in str(advice_of(strategy, "processors", load))
        finally:
            freed = coordinator.create_per_worker_resource(compute, args=(everywhere,))
            coordinator.schedule(lambda it: it, args=(freed,)).fetch()


def test_a_server_whose_memory_is_nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of 15 MB under a limit of 16 MB."""
    monkeypatch.setenv("STRATAGEM_SERVER_MEMORY_BYTES", str(16 << 20))
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                variable = sg.Variable(torch.zeros(15 << 18))

            def load() -> None:
                assert variable.shape == (15 << 18,)
                time.sleep(0.05)

            assert "STRATAGEM_SERVER_MEMORY_BYTES" in str(
                advice_of(strategy, "server memory", load)
            )


def test_values_that_are_not_finite() -> None:
    """A loss of NaN, logged by the program."""
    with sg.OneDeviceStrategy("cpu:0") as strategy:
        sg.metrics.log("test_advice.loss", float("nan"))
        with Monitor(ProgramSource(strategy)).start() as monitor:
            one = found(monitor.view, "not finite")
    assert one is not None
    assert "test_advice.loss was NaN or infinite" in str(one)


def test_tasks_that_do_not_answer() -> None:
    """A cluster that has ended."""
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        spec, key = cluster.cluster_spec, cluster.resolver.cluster_key_text()
        with Monitor(ClusterSource(spec, key)) as monitor:
            assert monitor.look().health == "healthy"
    with Monitor(ClusterSource(spec, key)) as monitor:
        view = monitor.look()
    kinds = [one.kind for one in advise(view)]
    assert "worker lost" in kinds
    assert "server lost" in kinds
    assert view.health == "worker 0, ps 0 do not answer"
