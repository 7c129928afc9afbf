"""Networks that are slow, lose packets or are cut for a while: training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from relay import Relay
from torch import nn
from waiting import wait_until

import stratagem as sg
from stratagem import LocalCluster
from stratagem._wire import messages
from stratagem._wire.cluster_key import cluster_key
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import MAGIC
from stratagem.cluster_resolver import SimpleClusterResolver
from stratagem.config import ClusterOptions
from stratagem.errors import ParameterServerLost, WorkerLost

pytestmark = pytest.mark.timeout(600)


class Network:
    """A cluster whose tasks are reached through relays."""

    def __init__(self, stack: ExitStack, **relays: float) -> None:
        cluster = stack.enter_context(LocalCluster(workers=2, ps=2))
        self.relays: dict[str, list[Relay]] = {
            job: [
                stack.enter_context(Relay(cluster.cluster_spec.task_address(job, index), **relays))
                for index in range(2)
            ]
            for job in ("worker", "ps")
        }
        spec = sg.ClusterSpec(
            {job: [relay.address for relay in relays] for job, relays in self.relays.items()}
        )
        key = cluster.resolver.cluster_key_text()
        self.resolver = SimpleClusterResolver(spec, cluster_key=key)

    def __iter__(self) -> Iterator[Relay]:
        return (relay for relays in self.relays.values() for relay in relays)


class Training:
    """Counts steps in a variable on each server, and trains a small model."""

    def __init__(self, network: Network, stack: ExitStack, **options: float) -> None:
        strategy = stack.enter_context(sg.ParameterServerStrategy(network.resolver))
        with strategy.scope():
            self.counts = [sg.Variable(0.0), sg.Variable(0.0)]
            self.model = model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = self.counts

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            for count in counts:
                count.assign_add(1.0)

        self._step = step
        self.coordinator = stack.enter_context(
            sg.ClusterCoordinator(strategy, options=ClusterOptions(**options))  # type: ignore[arg-type]
        )
        self.steps = 0

    def run(self, steps: int) -> None:
        """Schedule steps."""
        self.steps += steps
        for _ in range(steps):
            self.coordinator.schedule(self._step)

    def check(self) -> None:
        """Every step counts once, on each server."""
        self.coordinator.join(timeout_s=300)
        assert [float(count) for count in self.counts] == [self.steps, self.steps]
        assert self.coordinator.errors == []


@pytest.mark.parametrize(
    ("delay_s", "loss", "steps"),
    [
        pytest.param(0.05, 0.0, 3, marks=pytest.mark.slow, id="100 ms"),
        pytest.param(0.15, 0.0, 6, marks=pytest.mark.soak, id="300 ms"),
        pytest.param(0.15, 0.2, 6, marks=pytest.mark.soak, id="300 ms, 20 % loss"),
    ],
)
def test_training_with_long_round_trips(delay_s: float, loss: float, steps: int) -> None:
    """With the default limits the run is slow, nothing is lost, and the numbers are those of one device."""
    with ExitStack() as stack:
        network = Network(stack, delay_s=delay_s, loss=loss)
        training = Training(network, stack)
        expected = nn.Linear(4, 1)
        expected.load_state_dict(training.model.state_dict())
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            expected(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            training.run(1)
            training.coordinator.join(timeout_s=300)
        training.check()
        torch.testing.assert_close(dict(training.model.state_dict()), dict(expected.state_dict()))


@pytest.mark.soak
def test_training_with_round_trips_of_more_than_a_second() -> None:
    """No limit is shorter than a few measured round trips; a worker is not lost while it connects to the servers."""
    with ExitStack() as stack:
        training = Training(Network(stack, delay_s=0.6), stack)
        training.run(6)
        training.check()
        assert [worker.incarnation for worker in training.coordinator.workers] == [1, 1]


SHORT = {"heartbeat_s": 0.2, "heartbeat_limit_s": 2.0}


@pytest.mark.parametrize("place", ["server", "coordinator"])
@pytest.mark.parametrize(
    ("cut_s", "limits"),
    [
        pytest.param(5.0, SHORT, marks=pytest.mark.slow, id="longer than the limit"),
        pytest.param(10.0, {}, marks=pytest.mark.soak, id="10 s with default limits"),
    ],
)
def test_a_cut_longer_than_the_heartbeat_limit_is_waited_out(
    cut_s: float, limits: dict[str, float], place: str
) -> None:
    """The servers still have every variable: the run goes on when the network is back."""
    with ExitStack() as stack:
        network = Network(stack)
        training = Training(network, stack, **limits)
        training.run(20)
        training.check()
        if place == "server":
            network.relays["ps"][0].cut()
        else:
            for relay in network.relays["worker"]:
                relay.cut()
            for relay in network.relays["ps"]:
                relay.cut("/job:chief/task:0", "control")
        training.run(20)
        with pytest.raises(sg.errors.DeadlineExceeded):
            training.coordinator.join(timeout_s=cut_s)
        for relay in network:
            relay.heal()
        training.check()


@pytest.mark.slow
def test_a_cut_that_lasts_too_long_is_a_lost_server() -> None:
    """After `partition_limit_s`."""
    with ExitStack() as stack:
        network = Network(stack)
        limits = {"heartbeat_s": 0.2, "heartbeat_limit_s": 2.0, "partition_limit_s": 8.0}
        training = Training(network, stack, **limits)
        training.run(4)
        training.check()
        network.relays["ps"][1].cut()
        training.run(4)
        with pytest.raises(ParameterServerLost, match="/job:ps/task:1"):
            training.coordinator.join(timeout_s=300)
        network.relays["ps"][1].heal()


@pytest.mark.slow
def test_one_workers_bad_path_to_one_server_is_that_workers_failure() -> None:
    """The worker is set aside and named, the run goes on, and the worker returns with its path."""
    with ExitStack() as stack:
        stack.enter_context(setting("STRATAGEM_WIRE_TIMEOUT_S", "8"))
        network = Network(stack)
        training = Training(network, stack, heartbeat_s=0.2, restart_pause_s=0.1)
        coordinator = training.coordinator
        training.run(20)
        training.check()
        network.relays["ps"][0].cut("/job:worker/task:1")
        wait_until(lambda: _steps_until_set_aside(training, 1))
        assert isinstance(coordinator.workers[1].last_error, WorkerLost | ParameterServerLost)
        assert "/job:ps/task:0" in str(coordinator.workers[1].last_error)
        assert coordinator.workers[0].incarnation == 1
        training.run(20)
        training.check()
        network.relays["ps"][0].heal()
        wait_until(lambda: coordinator.workers[1].connected)
        training.run(20)
        training.check()


def _steps_until_set_aside(training: Training, worker: int) -> bool:
    training.run(2)
    training.coordinator.join(timeout_s=300)
    return not training.coordinator.workers[worker].connected


@pytest.mark.slow
def test_a_bad_path_at_the_start_is_that_workers_failure() -> None:
    """The coordinator goes on with the others; the worker joins when its path is there."""
    with ExitStack() as stack:
        network = Network(stack)
        network.relays["ps"][1].cut("/job:worker/task:0")
        training = Training(network, stack, heartbeat_s=0.2, connect_timeout_s=20.0)
        coordinator = training.coordinator
        assert [worker.connected for worker in coordinator.workers] == [False, True]
        training.run(10)
        training.check()
        network.relays["ps"][1].heal()
        wait_until(lambda: coordinator.workers[0].connected)
        training.run(10)
        training.check()


@pytest.mark.slow
def test_a_server_that_no_worker_reaches_is_lost() -> None:
    """Though the coordinator reaches it: a majority decides, after `partition_limit_s`."""
    with ExitStack() as stack:
        stack.enter_context(setting("STRATAGEM_WIRE_TIMEOUT_S", "8"))
        network = Network(stack)
        training = Training(network, stack, heartbeat_s=0.2, partition_limit_s=8.0)
        training.run(4)
        training.check()
        network.relays["ps"][1].cut("/job:worker/")
        with pytest.raises(ParameterServerLost, match="/job:ps/task:1"):
            training.run(4)
            training.coordinator.join(timeout_s=300)


@contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    """Set an environment variable, also for processes started meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


@pytest.mark.slow
def test_a_busy_worker_answers_a_second_coordinator_over_a_slow_path() -> None:
    """Its first message takes a round trip: the worker waits for it and says that it is busy."""
    with ExitStack() as stack:
        network = Network(stack, delay_s=0.05)
        Training(network, stack)
        address = network.relays["worker"][0].address
        key = cluster_key(network.resolver.cluster_key_text())
        with connect(address, key=key, timeout_s=60) as channel:
            reply = channel.request(messages.AskStats(), timeout_s=60).message
        assert isinstance(reply, messages.Stats)
        assert reply.facts["state"] == "running"


@pytest.mark.process
def test_a_silent_peer_does_not_delay_others() -> None:
    """An idle worker answers one peer while another, whose first message is late, keeps its connection."""
    with LocalCluster(workers=1, ps=1) as cluster:
        address = cluster.cluster_spec.task_address("worker", 0)
        key = cluster_key(cluster.resolver.cluster_key_text())
        with connect(address, key=key, timeout_s=60) as silent:
            with connect(address, key=key, timeout_s=60) as channel:
                reply = channel.request(messages.AskStats(), timeout_s=60).message
            assert isinstance(reply, messages.Stats)
            late = silent.request(messages.AskStats(), timeout_s=60).message
            assert isinstance(late, messages.Stats)


@pytest.mark.process
def test_a_handshake_is_waited_for_longer_than_the_heartbeat_limit() -> None:
    """A packet of the handshake that is lost several times arrives after seconds: the limit is `partition_limit_s`."""
    with ExitStack() as stack:
        stack.enter_context(setting("STRATAGEM_HEARTBEAT_LIMIT_S", "1"))
        cluster = stack.enter_context(LocalCluster(workers=1, ps=1))
        relay = stack.enter_context(Relay(cluster.cluster_spec.task_address("worker", 0)))
        key = cluster_key(cluster.resolver.cluster_key_text())
        relay.cut(MAGIC.decode())  # the worker accepts the connection, then receives nothing
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(connect, relay.address, key=key, timeout_s=60)
            with pytest.raises(TimeoutError):
                connecting.result(timeout=2.0)
            relay.heal()
            with connecting.result(timeout=60) as channel:
                reply = channel.request(messages.AskStats(), timeout_s=60).message
        assert isinstance(reply, messages.Stats)
