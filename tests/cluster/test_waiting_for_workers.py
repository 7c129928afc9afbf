"""A coordinator that starts waits for workers, and says for whom; it does not wait for what waiting cannot mend."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from addresses import NO_ADDRESSES
from waiting import wait_until

import stratagem as sg
from stratagem._cluster.coordinator import startup
from stratagem.cluster_resolver import SimpleClusterResolver
from stratagem.config import ClusterOptions
from stratagem.errors import ParameterServerLost, UnavailableError

LONG_S = 600.0
"""Ten times the limit of a test: what passes did not wait."""


class On:
    """Something a coordinator can be made on: workers at these addresses."""

    def __init__(self, *workers: str) -> None:
        self.resolver = SimpleClusterResolver(sg.ClusterSpec({"worker": list(workers)}))


@contextmanager
def starting(connect: Callable[..., Any], on: On, **options: Any) -> Iterator[list[Any]]:
    """Makes a coordinator in a thread; the list holds it, or what was raised, at the end."""
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(connect(on, **options))
        except Exception as error:  # judged by the test
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        yield made
    finally:
        thread.join(120.0)


def test_workers_may_come_later(
    nobody: list[str],
    connect: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits learns once for whom, where and why, and then that all have come."""
    monkeypatch.setattr(startup, "LOG_AFTER_S", 1.5)
    with sg.Server({"worker": ["127.0.0.1:0"]}) as there:
        with starting(connect, On(there.address, nobody[0])) as made:
            wait_until(lambda: "waiting for workers" in caplog.text)
            assert not made, "it must wait for the worker"
            told = [one.getMessage() for one in caplog.records if "waiting" in one.getMessage()]
            why = f"/job:worker/task:1 at {nobody[0]!r}: connection refused"
            assert told == [f"waiting for workers: {why}, up to 30 s (STRATAGEM_CONNECT_TIMEOUT_S)"]
            late = sg.Server({"worker": {1: nobody[0]}})
        with late:
            assert [worker.connected for worker in made[0].workers] == [True, True]
            made[0].close()
    assert "all workers answer after" in caplog.text


def test_a_worker_s_name_may_become_known_later(
    names: dict[str, str],
    connect: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a headless service, names appear when their pods are ready."""
    monkeypatch.setattr(startup, "LOG_AFTER_S", 1.5)
    with sg.Server({"worker": ["127.0.0.1:0"]}) as worker:
        with starting(connect, On("worker-0.training.invalid:2222")) as made:
            wait_until(lambda: "waiting for workers" in caplog.text)
            assert "'worker-0.training.invalid:2222': its host name is not known" in caplog.text
            names["worker-0.training.invalid"] = worker.address
        assert made[0].schedule(lambda: 7).fetch(timeout_s=120) == 7
        made[0].close()


def test_workers_that_never_come_are_all_named(
    nobody: list[str], connect: Callable[..., Any]
) -> None:
    """With their addresses, the last reason, what to do and the setting."""
    with pytest.raises(
        UnavailableError, match=r"^no worker answered within 3 s: .*STRATAGEM_CONNECT_TIMEOUT_S"
    ) as raised:
        connect(On(*nobody), connect_timeout_s=3.0)
    for task, address in enumerate(nobody):
        assert f"/job:worker/task:{task} at {address!r}: connection refused" in str(raised.value)


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_an_invalid_address_is_refused_at_once(connect: Callable[..., Any], address: str) -> None:
    """A ValueError (13.3), naming the task."""
    with pytest.raises(
        ValueError, match=re.escape(f"address of /job:worker/task:1 is invalid: {address!r}")
    ):
        connect(On("127.0.0.1:9", address), connect_timeout_s=LONG_S)


@contextmanager
def somebody_else(answer: bytes) -> Iterator[str]:
    """A server of another kind: whoever comes gets the same answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(48)
                    peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(120.0)


def test_another_process_at_the_address_is_detected_at_once(connect: Callable[..., Any]) -> None:
    """A web server, say: no worker will ever answer there."""
    with (
        somebody_else(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address,
        pytest.raises(UnavailableError, match=r"every worker refused.*does not speak") as raised,
    ):
        connect(On(address), connect_timeout_s=LONG_S)
    assert f"/job:worker/task:0 at {address!r}" in str(raised.value)
    assert raised.value.task == "/job:worker/task:0"


def test_a_parameter_server_at_the_address_is_noticed_at_once(connect: Callable[..., Any]) -> None:
    """Two lines of a cluster specification mixed up."""
    with (
        sg.Server({"ps": ["127.0.0.1:0"]}) as server,
        pytest.raises(
            UnavailableError, match=r"every worker refused.*this is /job:ps/task:0"
        ) as raised,
    ):
        connect(On(server.address), connect_timeout_s=LONG_S)
    assert f"/job:worker/task:0 at {server.address!r}" in str(raised.value)


def test_it_goes_on_at_once_without_one_that_refuses(
    connect: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The others are enough; the one that refuses is named."""
    with (
        sg.Server({"worker": ["127.0.0.1:0"]}) as good,
        sg.Server({"worker": {7: "127.0.0.1:0"}}) as other,
    ):
        coordinator = connect(On(good.address, other.address), connect_timeout_s=LONG_S)
        assert coordinator.schedule(lambda: 7).fetch(timeout_s=120) == 7
        coordinator.close()
    (told,) = [one.getMessage() for one in caplog.records if "going on" in one.getMessage()]
    assert "1 of 2 workers answer" in told
    assert f"/job:worker/task:1 at {other.address!r}: this is /job:worker/task:7" in told
    assert good.address not in told


def test_a_server_that_is_lost_before_the_workers_come_is_the_error() -> None:
    """Workers find out; nobody waits for them to find out something else."""
    with sg.Server({"worker": ["127.0.0.1:0"]}) as worker:
        with sg.Server({"ps": ["127.0.0.1:0"]}) as server:
            spec = sg.ClusterSpec({"ps": [server.address], "worker": [worker.address]})
            strategy = sg.ParameterServerStrategy(SimpleClusterResolver(spec))
        with strategy, pytest.raises(ParameterServerLost, match="/job:ps/task:0"):
            sg.ClusterCoordinator(strategy, options=ClusterOptions(connect_timeout_s=LONG_S))
