"""`Server`: one task started by hand; one script for all roles (SRV-1 … SRV-3, page 003)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until
from warm_start import Program

import stratagem as sg
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem.cluster_resolver import SimpleClusterResolver
from stratagem.errors import NotFoundError, UnavailableError

SRC = str(Path(__file__).parents[2] / "src")


class OnServers:
    """Looks like a cluster to the coordinator fixture."""

    def __init__(self, **jobs: list[str]) -> None:
        self.resolver: Any = SimpleClusterResolver(ClusterSpec(jobs))


def test_job_and_index_are_inferred_or_asked_for() -> None:
    """SRV-1."""
    with sg.Server({"ps": ["127.0.0.1:0"]}, start=False) as server:
        assert (server.job_name, server.task_index) == ("ps", 0)
        assert server.server_def["cluster"] == {"ps": ["127.0.0.1:0"]}
        assert "not started" in repr(server)
    two = {"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0", "127.0.0.1:0"]}
    for options, kind in (
        ({}, ValueError),
        ({"job_name": "worker"}, ValueError),
        ({"job_name": "chief"}, ValueError),
        ({"job_name": "worker", "task_index": 7}, ValueError),
        ({"job_name": "ps", "protocol": "pigeon"}, NotFoundError),
        ({"job_name": "ps", "config": 3}, TypeError),
        ({"job_name": "ps", "threads": 0}, ValueError),
    ):
        with pytest.raises(kind):
            sg.Server(two, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        sg.Server(3)  # type: ignore[arg-type]


def test_target_names_protocol_and_port() -> None:
    """SRV-2."""
    with sg.Server.create_local_server() as server:
        assert server.job_name == "localhost"
        assert server.target == f"grpc://{server.address}"
        assert not server.target.endswith(":0")
        assert "serving" in repr(server)
        server.join(timeout_s=0.01)
    assert "closed" in repr(server)
    server.close()


def test_listening_beyond_this_machine_needs_a_key() -> None:
    """Issue 4, section 1: refused with the reason."""
    with pytest.raises(PermissionError, match="STRATAGEM_CLUSTER_KEY"):
        sg.Server({"ps": ["0.0.0.0:0"]})


KEY = "a key for the servers' tests"


@pytest.mark.parametrize(
    ("address", "advertised", "expected"),
    [
        ("10.1.2.3:0", None, r"10\.1\.2\.3:[1-9]\d+"),
        ("10.1.2.3:0", "proxy.example", r"proxy\.example:[1-9]\d+"),
        ("127.0.0.1:0", "proxy.example:99", r"proxy\.example:99"),
        ("0.0.0.0:0", None, rf"{re.escape(os.uname().nodename)}:[1-9]\d+"),
        ("[::1]:0", None, r"\[::1\]:[1-9]\d+"),
    ],
)
def test_the_address_is_one_that_others_can_use(
    address: str, advertised: str | None, expected: str
) -> None:
    """The bound port, on the host others know; never 0.0.0.0."""
    with sg.Server({"ps": [address]}, key=KEY, advertised_address=advertised) as server:
        assert re.fullmatch(expected, server.address)
        assert server.target == f"grpc://{server.address}"


def test_an_advertised_address_is_checked_at_once() -> None:
    with pytest.raises(ValueError, match="is not an address"):
        sg.Server({"ps": ["127.0.0.1:0"]}, advertised_address="somewhere:http")


def test_the_key_is_given_by_argument(connect: Callable[..., Any]) -> None:
    """And the environment of the process need not have it."""
    with sg.Server({"worker": ["127.0.0.1:0"]}, key=KEY) as worker:
        cluster = OnServers(worker=[worker.address])
        with pytest.raises(UnavailableError, match="key"):
            connect(cluster, connect_timeout_s=60.0)
        cluster.resolver = SimpleClusterResolver(
            ClusterSpec({"worker": [worker.address]}), cluster_key=KEY
        )
        assert connect(cluster).schedule(lambda: 1).fetch(timeout_s=120) == 1
    with pytest.raises(ValueError, match="the cluster key has"):
        sg.Server({"worker": ["127.0.0.1:0"]}, key="short")


class MovingResolver(sg.cluster_resolver.ClusterResolver):
    """Knows where the worker is at the moment."""

    address = ""

    def cluster_spec(self) -> ClusterSpec:
        if not self.address:
            raise RuntimeError("the worker has no address now")
        return ClusterSpec({"worker": [self.address]})


def test_a_worker_that_comes_back_at_another_port_rejoins(connect: Callable[..., Any]) -> None:
    """The resolver is asked at every attempt; what the worker kept is built again."""
    cluster = OnServers()
    cluster.resolver = resolver = MovingResolver()
    with sg.Server({"worker": ["127.0.0.1:0"]}) as first:
        resolver.address = first.address
        coordinator = connect(cluster)
        box = coordinator.create_per_worker_resource(list)
        assert coordinator.schedule(len, args=(box,)).fetch(timeout_s=120) == 0
        resolver.address = ""
    value = coordinator.schedule(len, args=(box,))
    with sg.Server({"worker": ["127.0.0.1:0"]}) as second:
        assert second.address != first.address
        resolver.address = second.address
        assert value.fetch(timeout_s=120) == 0
        (worker,) = coordinator.workers
        assert worker.address == second.address
        assert worker.incarnation == 2
        coordinator.close()


def test_servers_serve_one_coordinator_after_another(connect: Callable[..., Any]) -> None:
    """After close() the same tasks serve the next one, and a second one at a time is refused."""
    with (
        sg.Server({"worker": ["127.0.0.1:0"]}) as worker,
        sg.Server({"ps": ["127.0.0.1:0"]}) as ps,
    ):
        cluster = OnServers(worker=[worker.address], ps=[ps.address])
        first = connect(cluster)
        assert first.schedule(os.getpid).fetch(timeout_s=120) == os.getpid()
        with pytest.raises(
            UnavailableError, match=r"no worker is free .*serves another coordinator"
        ):
            connect(cluster, connect_timeout_s=600.0)  # which is not waited for
        first.close()
        second = connect(cluster)
        assert second.schedule(lambda: "again").fetch(timeout_s=120) == "again"


def test_worker_with_another_number_is_not_mistaken(connect: Callable[..., Any]) -> None:
    """A mixed-up cluster specification is an error that says so."""
    spec = {"worker": {1: "127.0.0.1:0"}}
    with sg.Server(spec) as worker, pytest.raises(UnavailableError, match="expects worker 0"):
        connect(OnServers(worker=[worker.address]), connect_timeout_s=60.0)


def test_coordinators_with_the_wrong_key_are_refused(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides prove the key before anything else is read."""
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", "the right key, long enough")
    with sg.Server({"worker": ["127.0.0.1:0"]}) as worker:
        cluster = OnServers(worker=[worker.address])
        connect(cluster).close()
        monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", "another key, long enough")
        with pytest.raises(UnavailableError, match="cluster keys differ"):
            connect(cluster, connect_timeout_s=60.0)
        monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", "the right key, long enough")
        assert connect(cluster).schedule(lambda: 1).fetch(timeout_s=120) == 1


COORDINATOR = """
import sys, threading
import stratagem as sg
sys.path.insert(0, sys.argv[2])
from plain_strategy import PlainStrategy
from stratagem.cluster_resolver import SimpleClusterResolver
spec = sg.ClusterSpec({"worker": [sys.argv[1]]})
strategy = PlainStrategy(SimpleClusterResolver(spec))
coordinator = sg.ClusterCoordinator(strategy)
coordinator.schedule(lambda: None).fetch(timeout_s=120)
print("working", flush=True)
threading.Event().wait(600)
"""


@pytest.mark.process
def test_worker_outlives_a_killed_coordinator(connect: Callable[..., Any]) -> None:
    """Coordinator gone (SIGKILL): the server notices and waits for a new one."""
    with sg.Server({"worker": ["127.0.0.1:0"]}) as worker:
        process = Program(
            [
                sys.executable,
                "-c",
                COORDINATOR,
                worker.address,
                str(Path(__file__).parents[1] / "plugins"),
            ],
            env={**os.environ, "PYTHONPATH": SRC},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "working\n"
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        coordinator = connect(OnServers(worker=[worker.address]))
        assert coordinator.schedule(lambda: "new").fetch(timeout_s=120) == "new"


OWNER = """
import os, sys, threading
import stratagem as sg
from stratagem.cluster_resolver import SimpleClusterResolver
spec = sg.ClusterSpec({"worker": [sys.argv[1]], "ps": [sys.argv[2]]})
strategy = sg.ParameterServerStrategy(SimpleClusterResolver(spec))
with strategy.scope():
    variable = sg.Variable(1.0)
if sys.argv[3] == "forks" and os.fork() == 0:  # as a DataLoader does; the child outlives its parent
    sys.stdin.read()
    os._exit(0)
print("working", flush=True)
threading.Event().wait(600)
"""


@pytest.mark.process
@pytest.mark.parametrize("forks", ["alone", "forks"])
def test_servers_free_what_a_killed_coordinator_left_after_a_time_that_can_be_set(
    caplog: pytest.LogCaptureFixture, forks: str
) -> None:
    """Coordinator gone, parameter servers wait for a new one; a child of it keeps nothing open."""
    with sg.Server({"ps": ["127.0.0.1:0"]}) as ps, caplog.at_level("INFO", "stratagem.ps"):
        process = Program(
            [sys.executable, "-c", OWNER, "127.0.0.1:9", ps.address, forks],
            env={**os.environ, "PYTHONPATH": SRC, "STRATAGEM_SESSION_LEASE_S": "0.25"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "working\n"
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            wait_until(lambda: "its coordinator has been gone for 0.25 s" in caplog.text)
        assert "serving" in repr(ps)


def test_port_in_use_is_an_error_at_once() -> None:
    """And the first server is undisturbed."""
    with sg.Server({"ps": ["127.0.0.1:0"]}) as first:
        with pytest.raises(OSError, match="in use"):
            sg.Server({"ps": [first.address]})
        assert "serving" in repr(first)


def test_join_returns_when_closed() -> None:
    """From another thread."""
    server = sg.Server({"ps": ["127.0.0.1:0"]})
    closer = threading.Timer(0.1, server.close)
    closer.start()
    server.join()
    closer.join()
    assert "closed" in repr(server)


TASK = """
import sys, threading, torch, stratagem as sg
spec = {"worker": ["127.0.0.1:0"] * 64, "ps": ["10.0.0.9:1"]}
with sg.Server(spec, "worker", 3, threads=int(sys.argv[1]) or None) as server:
    server.join(timeout_s=0.01)
    print(open("/proc/self/comm").read().strip(), torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        pytest.param(0, {}, "1", id="share of the cores"),
        pytest.param(3, {}, "3", id="argument", marks=pytest.mark.slow),
        pytest.param(0, {"OMP_NUM_THREADS": "2"}, "2", id="environment", marks=pytest.mark.slow),
    ],
)
@pytest.mark.process
def test_a_task_names_its_process_and_uses_its_share_of_the_cores(
    given: int, environment: dict[str, str], expected: str
) -> None:
    """Issue 17, point 8: many tasks on a host must not use all of its cores each."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    printed = subprocess.run(
        [sys.executable, "-c", TASK, str(given)],
        env={**inherited, "PYTHONPATH": SRC, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert printed.split() == ["sg-worker-3", expected]
