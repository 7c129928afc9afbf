"""How long a coordinator waits for its workers, and what it says: real engine, fake links."""

from __future__ import annotations

import threading

import pytest
from fake_links import FakeCluster

from stratagem._cluster.coordinator import startup
from stratagem._cluster.coordinator.startup import await_workers, check_addresses
from stratagem.errors import ParameterServerLost, UnavailableError


def test_no_waiting_when_every_worker_is_up() -> None:
    await_workers(FakeCluster(2, connect_timeout_s=1000.0).come_up().engine)


def test_a_worker_that_refused_or_is_taken_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster(3, connect_timeout_s=1000.0)
    cluster.links[0].come_up()
    cluster.links[1].refused = True
    cluster.links[1].last_error = ValueError("another key")
    cluster.links[2].taken = True
    await_workers(cluster.engine)
    assert "1 of 3 workers answer, going on without the rest" in caplog.text
    assert "another key" in caplog.text


def test_late_workers_are_named_and_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "LOG_AFTER_S", 0.01)
    cluster = FakeCluster(2, connect_timeout_s=60.0)
    cluster.links[0].come_up()
    waiting = threading.Thread(target=await_workers, args=(cluster.engine,))
    waiting.start()
    while "waiting for workers: /job:worker/task:1 at 'fake:1'" not in caplog.text:
        assert waiting.is_alive()
    cluster.links[1].come_up()
    waiting.join(30)
    assert "all workers answer after" in caplog.text


@pytest.mark.parametrize(
    ("taken", "refused", "text"),
    [
        (True, False, "no worker is free"),
        (False, True, "every worker refused"),
        (False, False, r"no worker answered within 0\.02 s"),
    ],
)
def test_no_worker_at_all_is_an_error_that_says_why(taken: bool, refused: bool, text: str) -> None:
    cluster = FakeCluster(1, connect_timeout_s=0.02)
    cluster.links[0].taken, cluster.links[0].refused = taken, refused
    cluster.links[0].last_error = ConnectionError("the reason")
    with pytest.raises(UnavailableError, match=rf"(?s){text}.*the reason") as caught:
        await_workers(cluster.engine)
    assert caught.value.task == "/job:worker/task:0"


def test_a_lost_server_ends_the_waiting() -> None:
    cluster = FakeCluster(1, connect_timeout_s=1000.0)
    lost = ParameterServerLost("gone", task="/job:ps/task:0")
    cluster.engine.server_lost(lost)
    with pytest.raises(ParameterServerLost):
        await_workers(cluster.engine)


def test_invalid_addresses_are_refused_with_their_task() -> None:
    check_addresses([(0, "somewhere:1")])
    with pytest.raises(ValueError, match=r"/job:worker/task:7 is invalid: 'somewhere:0'"):
        check_addresses([(0, "somewhere:1"), (7, "somewhere:0")])
