"""A cluster on five hosts: every task in a network of its own, with and without TLS, with delay, loss and a partition that heals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from network_hosts import CAN_MAKE_HOSTS, NetworkHosts
from relay import __file__ as relay_file
from waiting import wait_until

from stratagem._commands.certificates import make_certificates

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not CAN_MAKE_HOSTS, reason="needs root and iproute2's command ip"),
]

LIMIT_S = 250.0
# The kernel may lack netem, so tasks are reached through a relay on their own host.
DELAY_S, LOSS = 0.01, 0.02
TASKS = {"ps": ["ps0", "ps1"], "worker": ["worker0", "worker1"]}

# Exact sums: every closure counts once, on both servers, whatever the network does.
PROGRAM = """
import sys, time, torch
import stratagem as sg

with sg.auto_strategy() as strategy:
    with strategy.scope():
        one, two = sg.Variable(torch.zeros(1000)), sg.Variable(torch.zeros(1000))
        table = torch.nn.Embedding(100, 8)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    with torch.no_grad():
        table.weight.zero_()
    coordinator = sg.ClusterCoordinator(strategy)

    def step():
        one.assign_add(torch.ones(1000))
        two.assign_add(torch.ones(1000))
        optimizer.zero_grad()
        (-table(torch.arange(100)).sum()).backward()
        optimizer.step()

    for _ in range(50):
        coordinator.schedule(step)
    coordinator.join()
    print("half", flush=True)
    sys.stdin.readline()
    finished = []
    for _ in range(50):
        coordinator.schedule(step).add_done_callback(finished.append)
    count, since = -1, time.monotonic()
    while time.monotonic() - since < 6:  # every closure needs both servers
        if len(finished) != count:
            count, since = len(finished), time.monotonic()
        time.sleep(0.1)
    assert count < 50
    print("stuck", flush=True)
    coordinator.join()
    sums = tuple(float(sg.convert_to_tensor(v).sum()) for v in (one, two, table.weight))
    assert sums == (100_000.0, 100_000.0, 80_000.0), sums
    assert len(coordinator.workers) == 2
    print("exact", flush=True)
"""


WITH_BACKUPS = """
import sys, torch
import stratagem as sg

resolver = sg.cluster_resolver.TFConfigClusterResolver()
with sg.ParameterServerStrategy(resolver, backups=1) as strategy:
    with strategy.scope():
        one, two = sg.Variable(torch.zeros(1000)), sg.Variable(torch.zeros(1000))
        table = torch.nn.Embedding(100, 8)
        optimizer = torch.optim.Adagrad(table.parameters(), lr=1.0, eps=1e-10)
    coordinator = sg.ClusterCoordinator(strategy)

    def step():
        one.assign_add(torch.ones(1000))
        two.assign_add(torch.ones(1000))
        optimizer.zero_grad()
        table(torch.arange(100)).sum().backward()
        optimizer.step()

    for turn in range(3):
        for _ in range(50):
            coordinator.schedule(step)
        print(f"scheduled {turn}", flush=True)
        coordinator.join()
        sums = [float(sg.convert_to_tensor(v).sum()) for v in (one, two)]
        sums.append(float(optimizer.state_dict()["state"][0]["sum"].sum()))
        expected = 50 * (turn + 1)
        assert sums == [1000.0 * expected, 1000.0 * expected, 800.0 * expected], sums
        print(f"exact {turn}", flush=True)
        sys.stdin.readline()  # a server was killed and has started again
    assert all(one.backup for one in coordinator.recoveries) and len(coordinator.recoveries) >= 2
    print("all exact", flush=True)
"""


class FiveHosts:
    """Servers, workers and a coordinator, each on a host of its own."""

    def __init__(
        self, stack: ExitStack, directory: Path, *, encrypted: bool, delayed: bool = False
    ) -> None:
        self._stack = stack
        self._delayed = delayed
        self.relays: list[subprocess.Popen[str]] = []
        self._environment = {
            **os.environ,
            "STRATAGEM_CLUSTER_KEY": "a key for five hosts of a test",
            "STRATAGEM_SERVER_WAIT_S": "200",
            "STRATAGEM_CONNECT_TIMEOUT_S": "200",
            "STRATAGEM_PARTITION_LIMIT_S": "120",
            "STRATAGEM_SESSION_LEASE_S": "240",
            "OMP_NUM_THREADS": "1",
        }
        if encrypted:
            make_certificates(directory, ["task"], days=1)
            self._environment["STRATAGEM_TLS_CERT"] = str(directory / "task.pem")
            self._environment["STRATAGEM_TLS_KEY"] = str(directory / "task-key.pem")
            self._environment["STRATAGEM_TLS_CA"] = str(directory / "ca.pem")
        names = ["chief", *(name for hosts in TASKS.values() for name in hosts)]
        self.hosts = stack.enter_context(NetworkHosts(names))
        self.cluster = {
            job: [f"{self.hosts.addresses[name]}:2222" for name in tasks]
            for job, tasks in TASKS.items()
        }
        self.tasks = {
            name: self.serve(job, index)
            for job, tasks in TASKS.items()
            for index, name in enumerate(tasks)
        }

    def _start(self, name: str, *command: str, **more: str) -> subprocess.Popen[str]:
        process = self.hosts.start(
            name,
            [sys.executable, *command],
            env={**self._environment, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._stack.callback(end, process)
        return process

    def serve(self, job: str, index: int) -> subprocess.Popen[str]:
        """Start a worker or a parameter server."""
        name, cluster = TASKS[job][index], self.cluster
        if self._delayed:
            address, behind = cluster[job][index], f"{self.hosts.addresses[name]}:2223"
            relay = (relay_file, address, behind, str(DELAY_S), str(LOSS))
            self.relays.append(self._start(name, *relay))
            own = [behind if task == address else task for task in cluster[job]]
            cluster = {**cluster, job: own}
        return self._start(
            name,
            *("-m", "stratagem", "server", "--job", job, "--index", str(index)),
            *("--cluster", json.dumps(cluster)),
        )

    def run(self, program: str) -> subprocess.Popen[str]:
        """Start the coordinator."""
        return self._start("chief", "-c", program, TF_CONFIG=json.dumps({"cluster": self.cluster}))


@pytest.mark.parametrize("encrypted", [True, False], ids=["TLS", "plain"])
def test_five_hosts_train_through_delay_loss_and_a_partition(
    tmp_path: Path, encrypted: bool
) -> None:
    """Packets are late or lost, and a server's host is cut off for some seconds: the run waits, and every step counts once."""
    with ExitStack() as stack:
        five = FiveHosts(stack, tmp_path, encrypted=encrypted, delayed=True)
        chief = five.run(PROGRAM)
        assert chief.stdin is not None
        lines = Lines(chief)
        wait_until(lambda: "half" in lines.read(), LIMIT_S, tell=lines.read)
        five.hosts.cut("ps1")
        try:
            chief.stdin.write("\n")
            chief.stdin.flush()
            wait_until(lambda: "stuck" in lines.read(), LIMIT_S, tell=lines.read)
        finally:
            five.hosts.heal("ps1")
        wait_until(lambda: "exact" in lines.read(), LIMIT_S, tell=lines.read)
        assert chief.wait(LIMIT_S) == 0, lines.read()
        told = [relay.communicate(timeout=60)[0].split() for relay in five.relays]
        assert [words[0] for words in told] == ["lost"] * 4
        assert sum(int(words[1]) for words in told) > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("encrypted", [True, False], ids=["TLS", "plain"])
def test_backups_on_another_host(tmp_path: Path, encrypted: bool) -> None:
    """A server is killed, started again by hand, and gets the backup of the other one, which is killed next."""
    with ExitStack() as stack:
        five = FiveHosts(stack, tmp_path, encrypted=encrypted)
        chief = five.run(WITH_BACKUPS)
        assert chief.stdin is not None
        lines = Lines(chief)
        for turn, index in enumerate((1, 0)):
            wait_until(lambda: f"scheduled {turn}" in lines.read(), LIMIT_S, tell=lines.read)
            name = f"ps{index}"
            five.tasks[name].kill()
            five.tasks[name].wait(LIMIT_S)
            five.tasks[name] = five.serve("ps", index)
            wait_until(lambda: f"exact {turn}" in lines.read(), LIMIT_S, tell=lines.read)
            again = f"have a backup again, on /job:ps/task:{index}"
            wait_until(lambda: lines.read().count(again) == 2, LIMIT_S, tell=lines.read)
            chief.stdin.write("\n")
            chief.stdin.flush()
        wait_until(lambda: "exact 2" in lines.read(), LIMIT_S, tell=lines.read)
        chief.stdin.write("\n")
        chief.stdin.flush()
        wait_until(lambda: "all exact" in lines.read(), LIMIT_S, tell=lines.read)
        assert chief.wait(LIMIT_S) == 0, lines.read()


class Lines:
    """Output of a process, read without waiting."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        os.set_blocking(self._descriptor, False)
        self._text = ""

    def read(self) -> str:
        try:
            while data := os.read(self._descriptor, 1 << 16):
                self._text += data.decode()
        except BlockingIOError:
            pass
        return self._text


def end(process: subprocess.Popen[str]) -> None:
    """End a process, and close its pipes."""
    process.kill()
    if process.stdout is not None and not process.stdout.closed:
        process.communicate(timeout=60)
