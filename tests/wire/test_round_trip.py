"""Limits grow with the measured round trip of a connection."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from relay import Relay

import stratagem as sg
from stratagem import LocalCluster
from stratagem._monitor.monitor import Monitor
from stratagem._monitor.sample_sources import ClusterSource
from stratagem._wire import messages
from stratagem._wire.cluster_key import cluster_key
from stratagem._wire.connecting import connect
from stratagem._wire.round_trip import RoundTrip
from stratagem.cluster_resolver import SimpleClusterResolver
from stratagem.errors import DeadlineExceeded, ParameterServerLost


def test_a_limit_is_the_configured_one_or_three_round_trips() -> None:
    """A fast network changes no limit; varying round trips count with their deviation."""
    round_trip = RoundTrip()
    assert round_trip.limit_s(4.0) == 4.0
    round_trip.measured(0.01)
    assert round_trip.limit_s(4.0) == 4.0
    round_trip.measured(10.0)  # one pause
    assert 4.0 < round_trip.limit_s(4.0) < 15.0
    for _ in range(60):
        round_trip.measured(0.01)
    assert round_trip.limit_s(0.5) == 0.5
    for _ in range(100):
        round_trip.measured(2.0)
    assert round_trip.limit_s(4.0) == pytest.approx(6.0, abs=0.5)


@pytest.mark.slow
def test_a_peer_that_has_answered_gets_the_time_of_its_round_trip() -> None:
    """A handshake of two round trips of 4 s succeeds with a limit of 6 s; a silent peer still fails."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(workers=1, ps=1))
        address = cluster.cluster_spec.task_address("worker", 0)
        relay = stack.enter_context(Relay(address, delay_s=2.0))
        key = cluster_key(cluster.resolver.cluster_key_text())
        with connect(relay.address, key=key, timeout_s=6.0) as channel:
            assert channel.round_trip.mean_s >= 4.0
            reply = channel.request(messages.AskStats(), timeout_s=60).message
        assert isinstance(reply, messages.Stats)
        relay.cut()
        with pytest.raises(DeadlineExceeded):
            connect(relay.address, key=key, timeout_s=6.0)


@pytest.mark.slow
def test_a_strategy_connects_to_slow_servers_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four round trips of 1.2 s per server: 8 s are enough for two servers, less than one after the other needs."""
    monkeypatch.setenv("STRATAGEM_SERVER_WAIT_S", "8")
    with ExitStack() as stack:
        strategy = sg.ParameterServerStrategy(_slow_servers(stack, delay_s=0.6))
        with strategy, strategy.scope():
            assert float(sg.Variable(3.0)) == 3.0


@pytest.mark.process
def test_a_server_that_does_not_open_the_session_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers the handshake and the first message, then nothing."""
    monkeypatch.setenv("STRATAGEM_SERVER_WAIT_S", "2")
    with ExitStack() as stack:
        resolver = _slow_servers(stack, delay_s=0.0, cut="OpenSession")
        with pytest.raises(ParameterServerLost, match="2 of 2 parameter servers did not answer"):
            sg.ParameterServerStrategy(resolver)


@pytest.mark.soak
def test_top_shows_tasks_behind_slow_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake of two round trips of 1.8 s."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(workers=1, ps=1))
        monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", str(cluster.resolver.cluster_key_text()))
        jobs = {
            job: [
                stack.enter_context(
                    Relay(cluster.cluster_spec.task_address(job, 0), delay_s=0.9)
                ).address
            ]
            for job in ("worker", "ps")
        }
        monitor = stack.enter_context(Monitor(ClusterSource(sg.ClusterSpec(jobs))))
        view = monitor.look()
        assert [worker.state for worker in view.workers] == ["idle"]
        assert [server.state for server in view.servers] == ["running"]


def _slow_servers(stack: ExitStack, *, delay_s: float, cut: str = "") -> SimpleClusterResolver:
    cluster = stack.enter_context(LocalCluster(workers=1, ps=2))
    relays = [
        stack.enter_context(Relay(cluster.cluster_spec.task_address("ps", index), delay_s=delay_s))
        for index in range(2)
    ]
    for relay in relays:
        if cut:
            relay.cut(cut)
    spec = sg.ClusterSpec({"ps": [relay.address for relay in relays], "worker": ["127.0.0.1:9"]})
    return SimpleClusterResolver(spec, cluster_key=cluster.resolver.cluster_key_text())
