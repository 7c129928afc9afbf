"""When a strategy's coordinator comes to be, when it begins to work, and when it ends."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import wait_until
from warm_start import run_program

import stratagem as sg
from stratagem.config import ClusterOptions
from stratagem.errors import UnavailableError

LIMIT_S = 150.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[sg.LocalCluster]:
    with sg.LocalCluster(workers=2, ps=1, in_process=True) as made:
        yield made


@pytest.fixture
def strategy(cluster: sg.LocalCluster) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(cluster.resolver) as made:
        yield made


def coordinator_threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("stratagem-watch")
        or (thread.name.startswith("stratagem-worker") and thread.name.endswith("-link"))
    }


def test_entering_the_scope_makes_the_coordinator(strategy: sg.ParameterServerStrategy) -> None:
    """PSS-5: it is there, the same for everybody, and does not yet keep workers busy."""
    assert strategy._cluster_coordinator is None
    with strategy.scope():
        total = sg.Variable(0.0)
    made = strategy._cluster_coordinator
    assert isinstance(made, sg.ClusterCoordinator)
    assert "not connected" in repr(made)
    assert coordinator_threads() == set()
    with strategy.scope():
        assert strategy._cluster_coordinator is made
    # It works without ever being constructed by the user.
    assert made.schedule(lambda: float(total.assign_add(2.0))).fetch(timeout_s=120) == 2.0
    assert sg.ClusterCoordinator(strategy) is made
    assert made.strategy is strategy


def test_options_count_when_given_before_the_first_work(
    strategy: sg.ParameterServerStrategy,
) -> None:
    """The usual order: scope first, then a coordinator with options of one's own."""
    with strategy.scope():
        sg.Variable(0.0)
    options = ClusterOptions(queue_limit=3)
    coordinator = sg.ClusterCoordinator(strategy, options=options)
    assert coordinator.options is options
    assert sg.ClusterCoordinator(strategy, options=ClusterOptions(queue_limit=3)) is coordinator
    with pytest.raises(ValueError, match=r"queue_limit=3.*queue_limit=5"):
        sg.ClusterCoordinator(strategy, options=ClusterOptions(queue_limit=5))


def test_closing_the_strategy_closes_its_coordinator(cluster: sg.LocalCluster) -> None:
    strategy = sg.ParameterServerStrategy(cluster.resolver)
    coordinator = sg.ClusterCoordinator(strategy)
    with strategy.scope():
        v = sg.Variable(1.0)
    assert coordinator.schedule(lambda: float(v)).fetch(timeout_s=120) == 1.0
    strategy.close()
    with pytest.raises(RuntimeError, match="this coordinator is closed"):
        coordinator.schedule(lambda: 1)
    assert coordinator_threads() == set()
    with sg.ParameterServerStrategy(cluster.resolver) as unused:
        with unused.scope():
            pass
        never_used = unused._cluster_coordinator
    with pytest.raises(RuntimeError, match="this coordinator is closed"):
        never_used.schedule(lambda: 1)
    assert "closed" in repr(never_used)
    with sg.ParameterServerStrategy(cluster.resolver) as without:
        pass
    with pytest.raises(RuntimeError, match="this coordinator is closed"):
        list(without.run_steps(lambda batch: 1, [1]))


def test_no_worker_answered_and_then_some_do(cluster: sg.LocalCluster) -> None:
    """A coordinator that could not begin can be asked for again; variables are still there."""
    with sg.Server({"ps": ["127.0.0.1:0"]}) as server:
        with sg.Server({"worker": ["127.0.0.1:0"]}) as worker:
            address = worker.address
        spec = sg.ClusterSpec({"ps": [server.address], "worker": [address]})
        resolver = sg.cluster_resolver.SimpleClusterResolver(spec)
        with sg.ParameterServerStrategy(resolver) as strategy:
            with strategy.scope():
                v = sg.Variable(5.0)
            options = ClusterOptions(connect_timeout_s=0.2, restart_pause_s=0.05)
            with pytest.raises(UnavailableError, match="no worker answered"):
                sg.ClusterCoordinator(strategy, options=options)
            with sg.Server({"worker": [address]}):
                coordinator = sg.ClusterCoordinator(strategy)
                assert coordinator.schedule(lambda: float(v)).fetch(timeout_s=120) == 5.0
                coordinator.close()


def test_threads_of_a_coordinator_and_their_end(cluster: sg.LocalCluster) -> None:
    """CCO-2: daemon threads, one per worker and those that watch; gone when it is collected."""

    def work() -> tuple[Any, weakref.ref[ClusterOptions]]:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            v = sg.Variable(1.0)
        options = ClusterOptions()  # as its threads know it
        coordinator = sg.ClusterCoordinator(strategy, options=options)
        assert coordinator.schedule(lambda: float(v)).fetch(timeout_s=120) == 1.0
        running = coordinator_threads()
        assert sorted(thread.name for thread in running) == [
            "stratagem-watch-closures",
            "stratagem-watch-heartbeats",
            "stratagem-watch-membership",
            "stratagem-watch-servers",
            "stratagem-worker-0-link",
            "stratagem-worker-1-link",
        ]
        assert all(thread.daemon for thread in running)
        return running, weakref.ref(options)

    running, options = work()
    gc.collect()
    for thread in running:
        thread.join(30.0)
        assert not thread.is_alive(), thread
    gc.collect()
    assert options() is None
    # And the cluster is free for the next one.
    with sg.ParameterServerStrategy(cluster.resolver) as strategy:
        coordinator = sg.ClusterCoordinator(strategy)
        assert coordinator.schedule(lambda: 7).fetch(timeout_s=120) == 7


def test_closing_logs_an_error_that_no_call_has_raised(
    cluster: sg.LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that the program asked for, or one that `get` has raised, is not logged."""

    def fail() -> None:
        raise ValueError("bad data")

    def close_after(ask: Callable[[sg.ClusterCoordinator, sg.RemoteValue], None]) -> None:
        caplog.clear()
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            coordinator = sg.ClusterCoordinator(strategy)
            value = coordinator.schedule(fail)
            wait_until(lambda: bool(coordinator.errors))
            ask(coordinator, value)

    def join(coordinator: sg.ClusterCoordinator, value: sg.RemoteValue) -> None:
        with pytest.raises(ValueError, match="bad data"):
            coordinator.join(timeout_s=LIMIT_S)

    def get(coordinator: sg.ClusterCoordinator, value: sg.RemoteValue) -> None:
        with pytest.raises(ValueError, match="bad data"):
            value.get(timeout_s=LIMIT_S)

    for ask in (join, get):
        close_after(ask)
        assert "bad data" not in caplog.text
    close_after(lambda coordinator, value: None)
    assert "the coordinator closes: no call has raised this error" in caplog.text
    assert "ValueError('bad data')" in caplog.text


NOT_AWAITED = """
import stratagem as sg
cluster = sg.LocalCluster(workers=1, ps=1)
strategy = sg.ParameterServerStrategy(cluster.resolver)
coordinator = sg.ClusterCoordinator(strategy)
with strategy.scope():
    total = sg.Variable(0.0)
coordinator.schedule(lambda: total.assign_add(1.0))
"""
BLOCKED = "coordinator.schedule(lambda: __import__('threading').Event().wait())\n"


@pytest.mark.process
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(BLOCKED, id="forgotten"),
        pytest.param("coordinator.join()", id="join", marks=pytest.mark.slow),
        pytest.param(
            BLOCKED + "raise ValueError('of the user')", id="error", marks=pytest.mark.slow
        ),
    ],
)
def test_a_program_that_ends_without_join_is_told_what_it_loses(ending: str) -> None:
    ended = run_program(
        [sys.executable, "-c", NOT_AWAITED + ending],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    text = "the program ends: not all scheduled functions have finished"
    assert (text in ended.stderr) is (ending == BLOCKED), ended.stderr
    assert ("of the user" in ended.stderr) is ("raise" in ending)
