"""Model of a training job with parameter servers, run by `simulation.py`. Pure.

Coordinator, workers and servers behave as in ``src/stratagem``:

- The coordinator keeps about 20 ms of closures at each worker, between 2 and 64. Each closure costs it processor time.
- A worker runs one closure after another. In a step it computes, then sends one message to every server and waits for all answers. With
  tables and without shared memory, it first asks every server for rows and waits.
- A server handles one message after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.scaling.costs import Step, UnitCosts
from benchmarks.scaling.simulation import Done, Host, Process, Simulation, send

# As in src/stratagem/_cluster/coordinator/queue_state.py.
AHEAD_S: Final = 0.02
MIN_WINDOW: Final = 2
MAX_WINDOW: Final = 64
MESSAGE_BYTES: Final = 300  # of a message without values, headers included
ROUNDS: Final = 4  # steps of every worker before and during the measurement, at least


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Hosts and network of a job.

    Args:
        shared: all processes are on one host; otherwise each has a host of its own.
        cores: of a host; a fraction if other programs use a part of them.
        bytes_per_s: of a host's network, in each direction.
        latency_s: of a message, from the call that sends it to the start of its receiver.
        sockets: values travel in messages, not in shared memory.
    """

    shared: bool
    cores: float
    latency_s: float
    sockets: bool
    bytes_per_s: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Rate of a job, and how busy its parts are (1 is a whole core or link; the busiest process of its role)."""

    steps_per_s: float
    coordinator: float
    worker: float
    server: float
    link: float

    @property
    def bottleneck(self) -> str:
        """Name the part that limits the rate."""
        parts = {
            "coordinator": self.coordinator,
            "servers": self.server,
            "network of the servers": self.link,
            "workers": self.worker,
        }
        name, busy = max(parts.items(), key=lambda part: part[1])
        return name if busy >= 0.9 else "waiting for answers"


class _Worker:
    """A worker's process, its closures, and the step that it runs."""

    def __init__(self, job: Job, process: Process) -> None:
        self.job = job
        self.process = process
        self.waiting = 0
        self.running = False
        self.steps = 0

    def receive(self) -> None:
        """Take a closure; begin if there is none running."""
        self.waiting += 1
        if not self.running:
            self._begin()

    def _begin(self) -> None:
        if self.waiting == 0:
            self.running = False
            return
        self.running = True
        self.waiting -= 1
        self.process.work(self.job.units.closure.worker, lambda: self._step(self.job.per_closure))

    def _step(self, left: int) -> None:
        """Run the remaining steps of a closure, then report it."""
        if left == 0:
            self.job.report(self)
            self._begin()
            return
        job = self.job

        def compute() -> None:
            self.process.work(job.worker_s, push)

        def push() -> None:
            job.ask_servers(self, job.push, end)

        def end() -> None:
            self.steps += 1
            self._step(left - 1)

        if job.read:
            job.ask_servers(self, job.read, compute)
        else:
            compute()


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Message of a worker to one server, and its answer."""

    bytes_up: float
    bytes_down: float
    server_s: float


class Job:
    """A job on some machines.

    Args:
        step: the training step.
        units: costs measured with the same transport.
        workers, servers: how many.
        per_closure: steps of one closure.
    """

    def __init__(
        self,
        step: Step,
        units: UnitCosts,
        machines: Machines,
        *,
        workers: int,
        servers: int,
        per_closure: int = 1,
    ) -> None:
        self.units, self.machines, self.per_closure = units, machines, per_closure
        self.simulation = Simulation()
        self.worker_s = step.worker_s(units, servers)
        loads = step.loads(units, servers)
        self.read: list[_Request] = []
        if step.rows and machines.sockets:
            self.read = [
                _Request(bytes_up=load.read_up, bytes_down=load.read_down, server_s=load.read_s)
                for load in loads
            ]
        # With shared memory, workers read rows themselves and servers find values in memory.
        on_wire = 1.0 if machines.sockets else 0.0
        self.push = [
            _Request(
                bytes_up=load.update_up * on_wire,
                bytes_down=load.update_down * on_wire,
                server_s=load.update_s + (0.0 if self.read else load.read_s),
            )
            for load in loads
        ]
        place = self._places()
        self.coordinator = Process(place())
        self.servers = [Process(place()) for _ in range(servers)]
        self.workers = [_Worker(self, Process(place())) for _ in range(workers)]
        longest_s = max(load.read_s + load.update_s for load in loads)
        window = int(AHEAD_S / (per_closure * (self.worker_s + longest_s)))
        self._window = min(MAX_WINDOW, max(MIN_WINDOW, window))
        # Every worker runs several steps in a period, even if it waits for all others at a server, at the coordinator or for a core.
        coordinator_s = units.closure.coordinator / per_closure
        total_s = self.worker_s + coordinator_s + sum(load.read_s + load.update_s for load in loads)
        slowest_s = workers * max(longest_s, coordinator_s, total_s / machines.cores)
        if not machines.shared:
            slowest_s = max(self.worker_s + longest_s, workers * max(longest_s, coordinator_s))
        self._period_s = max(ROUNDS, per_closure) * (slowest_s + 4 * machines.latency_s)
        # Before the measurement, the coordinator fills the windows of all workers.
        filled_s = workers * self._window * units.closure.coordinator
        self._warm_up_s = self._period_s + 2 * filled_s

    def _places(self) -> Callable[[], Host]:
        machines = self.machines

        def host() -> Host:
            return Host(
                self.simulation,
                cores=machines.cores,
                bytes_per_s=machines.bytes_per_s,
            )

        if machines.shared:
            only = host()
            return lambda: only
        return host

    def ask_servers(self, worker: _Worker, requests: list[_Request], done: Done) -> None:
        """Send a request to each server; call ``done`` when all have answered."""
        missing = len(requests)

        def answered() -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                done()

        for server, request in zip(self.servers, requests, strict=False):
            self._ask(worker.process.host, server, request, answered)

    def _ask(self, here: Host, server: Process, request: _Request, answered: Done) -> None:
        latency_s = self.machines.latency_s

        def handle() -> None:
            server.work(request.server_s, reply)

        def reply() -> None:
            send(server.host, here, request.bytes_down + MESSAGE_BYTES, latency_s, answered)

        send(here, server.host, request.bytes_up + MESSAGE_BYTES, latency_s, handle)

    def report(self, worker: _Worker) -> None:
        """Tell the coordinator that a closure has finished; it sends the next one."""
        here, there = worker.process.host, self.coordinator.host
        send(here, there, MESSAGE_BYTES, self.machines.latency_s, lambda: self.schedule(worker))

    def schedule(self, worker: _Worker) -> None:
        """Let the coordinator send one closure to a worker."""

        def sent() -> None:
            here, there = self.coordinator.host, worker.process.host
            send(here, there, MESSAGE_BYTES, self.machines.latency_s, worker.receive)

        self.coordinator.work(self.units.closure.coordinator, sent)

    def run(self) -> Prediction:
        """Simulate the job until its rate is steady, then for some steps of every worker, and return what happened then."""
        for _ in range(self._window):
            for worker in self.workers:
                self.schedule(worker)
        self.simulation.run(until_s=self._warm_up_s)
        before = self._figures()
        self.simulation.run(until_s=self._warm_up_s + self._period_s)
        used = [after - begin for after, begin in zip(self._figures(), before, strict=True)]
        steps, *busy = (each / self._period_s for each in used)
        servers = len(self.servers)
        return Prediction(
            steps_per_s=steps,
            coordinator=busy[0],
            worker=busy[1],
            server=max(busy[2 : 2 + servers]),
            link=max(busy[2 + servers :]),
        )

    def _figures(self) -> list[float]:
        """Return steps, processor time of coordinator, a worker and every server, and the use of the servers' links."""
        return [
            float(sum(worker.steps for worker in self.workers)),
            self.coordinator.busy_s,
            self.workers[0].process.busy_s,
            *(server.busy_s for server in self.servers),
            *(server.host.sending.busy_s for server in self.servers),
            *(server.host.receiving.busy_s for server in self.servers),
        ]
