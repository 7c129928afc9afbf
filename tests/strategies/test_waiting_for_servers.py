"""PSS-3: the constructor waits for parameter servers, and says for whom; it does not wait for the impossible."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from addresses import NO_ADDRESSES
from waiting import wait_until
from warm_start import Program

import stratagem as sg
from stratagem._ps.client import connect_all
from stratagem.errors import ParameterServerLost, ProtocolError, UnavailableError

WAIT = "STRATAGEM_SERVER_WAIT_S"


def make(*servers: str) -> sg.ParameterServerStrategy:
    spec = sg.ClusterSpec({"ps": list(servers), "worker": ["127.0.0.1:9"]})
    return sg.ParameterServerStrategy(sg.cluster_resolver.SimpleClusterResolver(spec))


def test_servers_may_come_later(
    nobody: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits learns once for whom, where and why, and then that they have come."""
    monkeypatch.setattr(connect_all, "LOG_AFTER_S", 0.05)
    made: list[sg.ParameterServerStrategy] = []
    with sg.Server({"ps": ["127.0.0.1:0"]}) as there:
        # The cluster has no chief: none is needed, the coordinator is it and listens nowhere.
        thread = threading.Thread(target=lambda: made.append(make(nobody[0], there.address)))
        thread.start()
        wait_until(lambda: "waiting for" in caplog.text)
        assert thread.is_alive(), "it must wait for the server"
        told = [one.getMessage() for one in caplog.records if "waiting" in one.getMessage()]
        assert told == [
            f"waiting for /job:ps/task:0 at {nobody[0]!r}: connection refused, up to 60 s ({WAIT})"
        ]
        with sg.Server({"ps": [nobody[0]]}):
            thread.join(120.0)
            (strategy,) = made
            with strategy, strategy.scope():
                assert sg.Variable(1.0).device == "/job:ps/replica:0/task:0/device:CPU:0"
    assert caplog.text.count("waiting for") == 1
    assert "all parameter servers answer after" in caplog.text


def test_servers_that_never_come_are_all_named(
    nobody: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their addresses, the last reason and the setting; the one that is there hears the end."""
    monkeypatch.setenv(WAIT, "4")
    with sg.Server({"ps": ["127.0.0.1:0"]}) as there, caplog.at_level("INFO", "stratagem.ps"):
        with pytest.raises(ParameterServerLost, match=f"^2 of 3 .* within 4 s: .*{WAIT}") as lost:
            make(there.address, *nobody)
        for task, address in zip((1, 2), nobody, strict=True):
            assert f"/job:ps/task:{task} at {address!r}: connection refused" in str(lost.value)
        assert there.address not in str(lost.value)
        assert lost.value.task == "/job:ps/task:1"
        wait_until(lambda: "its coordinator closed it" in caplog.text)
    # A process that could not become the chief is none.
    assert sg.Variable(1.0).device.startswith("/job:localhost/")


def test_one_server_that_never_comes(nobody: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAIT, "0.1")
    with pytest.raises(UnavailableError, match=re.escape(f"/job:ps/task:0 at {nobody[0]!r}")):
        make(nobody[0])


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_an_invalid_address_is_refused_at_once(address: str) -> None:
    """A ValueError (13.3), naming the task; nobody waits for the server before it in the list."""
    with pytest.raises(
        ValueError, match=re.escape(f"address of /job:ps/task:1 is wrong: {address!r}")
    ):
        make("127.0.0.1:9", address)


def test_a_name_may_become_known_later(
    nobody: list[str],
    names: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PSS-3 behind a headless service: names appear with their pods, and are waited for as servers are."""
    monkeypatch.setattr(connect_all, "LOG_AFTER_S", 0.05)
    made: list[sg.ParameterServerStrategy] = []
    thread = threading.Thread(target=lambda: made.append(make("ps-0.training.invalid:2222")))
    thread.start()
    wait_until(lambda: "waiting for" in caplog.text)
    assert thread.is_alive(), "it must wait for the name"
    assert caplog.text.count("waiting for") == 1
    assert "'ps-0.training.invalid:2222': its host name is not known" in caplog.text
    with sg.Server({"ps": [nobody[0]]}):
        names["ps-0.training.invalid"] = nobody[0]
        thread.join(120.0)
        (strategy,) = made
        strategy.close()
    assert "all parameter servers answer after" in caplog.text


def test_a_name_that_is_never_resolved(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end it is said that it was the name."""
    monkeypatch.setenv(WAIT, "0.3")
    with pytest.raises(
        ParameterServerLost, match=r"task:0 at .*its host name is not known.*publishNotReadyAddr"
    ) as lost:
        make("nowhere.invalid:2222")
    assert lost.value.task == "/job:ps/task:0"


def test_a_worker_at_a_server_s_address_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two lines of a cluster specification mixed up: it says who it is, and nobody waits."""
    monkeypatch.setenv(WAIT, "600")
    with (
        sg.Server({"worker": ["127.0.0.1:0"]}) as worker,
        pytest.raises(ProtocolError, match=r"this is /job:worker/task:0, a worker") as raised,
    ):
        make(worker.address)
    assert f"/job:ps/task:0 at {worker.address!r}" in str(raised.value)


PROGRAM = """
import sys
import stratagem as sg
spec = sg.ClusterSpec({"ps": sys.argv[1:], "worker": ["127.0.0.1:9"]})
sg.ParameterServerStrategy(sg.cluster_resolver.SimpleClusterResolver(spec))
"""


@pytest.mark.process
def test_ctrl_c_ends_the_wait(nobody: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """As any Python program: KeyboardInterrupt, nothing left running, no session left behind.

    A program that sets up no logging sees who is waited for on standard error.
    """
    with sg.Server({"ps": ["127.0.0.1:0"]}) as there, caplog.at_level("INFO", "stratagem.ps"):
        with Program(
            [sys.executable, "-c", PROGRAM, there.address, nobody[0]],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), WAIT: "600"},
            stderr=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stderr is not None
            assert f"waiting for /job:ps/task:1 at {nobody[0]!r}" in program.stderr.readline()
            program.send_signal(signal.SIGINT)
            assert program.wait(120.0) == -signal.SIGINT
            assert program.stderr.read().rstrip().endswith("KeyboardInterrupt")
        wait_until(lambda: "its coordinator closed it" in caplog.text)
