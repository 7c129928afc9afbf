"""Sources of samples of a cluster: the scheduling program, or the tasks themselves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, final

from typing_extensions import override

from stratagem import metrics
from stratagem._cluster.coordinator.coordinator import ClusterCoordinator
from stratagem._cluster.coordinator.engine import Engine
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._monitor.samples import ClusterSample, TaskSample
from stratagem._owner import Owner
from stratagem._usage import process_usage
from stratagem._wire import messages
from stratagem._wire.channel import Channel
from stratagem._wire.cluster_key import cluster_key
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.round_trip import answer_limit_s
from stratagem._wire.tls import TlsFiles
from stratagem.errors import AuthenticationError, ProtocolError

_SERVER_LIMIT_S: Final = 1.0  # a server answers in a millisecond, also while a long step runs
_AT_ONCE: Final = 16  # tasks that are asked at the same time


@final
class ProgramSource(Owner):
    """Samples of the cluster that this program schedules on.

    Workers report with their heartbeats, so that only servers are asked. A strategy without a cluster has
    only the metrics of this process.

    Args:
        subject: a coordinator or a strategy. A coordinator that has not connected yet is not started.
    """

    def __init__(self, subject: object) -> None:
        self._coordinator = subject if isinstance(subject, ClusterCoordinator) else None
        self._strategy: Any = subject if self._coordinator is None else self._coordinator.strategy
        self._servers: TaskProbes | None = None
        self._last_servers: tuple[TaskSample, ...] = ()

    def sample(self) -> ClusterSample:
        """Return the state of the cluster now; of a closed one, the last state."""
        engine = self._engine()
        queued = in_flight = None
        workers: tuple[TaskSample, ...] = ()
        if engine is not None:
            with engine.lock:
                queued, in_flight = (None, None) if engine.closed else engine.queue.counts
                workers = tuple(
                    TaskSample(
                        name=f"worker {link.task_index}",
                        state=_state(engine, number),
                        identity=str(link.incarnation),
                        restarts=max(0, link.incarnation - 1),
                        numbers=link.metrics.counters,
                        metrics=link.metrics,
                    )
                    for number, link in engine.links.items()
                )
            if not (engine.closed and self._last_servers):
                self._last_servers = tuple(
                    one for one in self._ask_servers() if one.answers or not engine.closed
                )
        return ClusterSample(
            time_s=time.time(),
            workers=workers,
            servers=self._last_servers,
            program=_own_metrics(),
            queued=queued,
            in_flight=in_flight,
        )

    def _engine(self) -> Engine | None:
        coordinator = self._coordinator
        if coordinator is None:
            found = getattr(self._strategy, "_cluster_coordinator", None)
            coordinator = found if isinstance(found, ClusterCoordinator) else None
        return None if coordinator is None else coordinator._running

    def _ask_servers(self) -> list[TaskSample]:
        if self._servers is None:
            resolver = self._strategy.cluster_resolver
            key = cluster_key(resolver.cluster_key_text())
            self._servers = TaskProbes(resolver.cluster_spec, ("ps",), key, _SERVER_LIMIT_S)
        return self._servers.ask()

    @override
    def close(self) -> None:
        """Close the connections to the servers. May be called again."""
        if self._servers is not None:
            self._servers.close()


@final
class ClusterSource(Owner):
    """Samples of a cluster that another program uses: every task is asked.

    Args:
        spec: the addresses of the tasks, or a function that returns them, called for every sample. Tasks that it
            no longer returns stay in the samples and do not answer.
        key_text: the cluster's key, by default that of the environment.
        tls: files for encrypted connections, by default those of the environment.
    """

    def __init__(
        self,
        spec: ClusterSpec | Callable[[], ClusterSpec],
        key_text: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        find = (lambda: spec) if isinstance(spec, ClusterSpec) else spec
        key = cluster_key(key_text, tls)
        self._tasks = TaskProbes(find, ("worker", "ps"), key, answer_limit_s())

    def sample(self) -> ClusterSample:
        """Return the state of the cluster now."""
        found = self._tasks.ask()
        workers = tuple(one for one in found if one.name.startswith("worker "))
        servers = tuple(one for one in found if one.name.startswith("ps "))
        return ClusterSample(time_s=time.time(), workers=workers, servers=servers)

    @override
    def close(self) -> None:
        """Close the connections to the servers. May be called again."""
        self._tasks.close()


SampleSource = ProgramSource | ClusterSource


def _state(engine: Engine, number: int) -> str:
    if engine.closed:  # the last reports may have come after the last sample
        return "idle"
    return "running" if engine.queue.is_up(number) else "lost"


def _own_metrics() -> metrics.Snapshot:
    """Return the metrics of this process, with its processor time and memory."""
    usage = process_usage()
    memory = usage.pop("process.memory_bytes", None)
    seen = metrics.snapshot()
    gauges = dict(seen.gauges) | ({} if memory is None else {"process.memory_bytes": memory})
    return replace(seen, counters={**seen.counters, **usage}, gauges=gauges)


@final
class TaskProbes(Owner):
    """Asks the tasks of a cluster for their figures, again and again.

    Args:
        find_spec: returns the addresses of the tasks; called for every question.
        jobs: whose tasks are asked.
        key: of the cluster.
        limit_s: of one question; longer if the measured round trip demands it.
    """

    def __init__(
        self,
        find_spec: Callable[[], ClusterSpec],
        jobs: Sequence[str],
        key: ClusterKey,
        limit_s: float,
    ) -> None:
        self._find_spec = find_spec
        self._jobs = jobs
        self._key = key
        self._limit_s = limit_s
        self._addresses: dict[tuple[str, int], str] = {}
        self._channels: dict[tuple[str, int], Channel] = {}  # of servers
        self._lives: dict[
            str, tuple[str, int]
        ] = {}  # of servers: process, and number of processes before it

    def ask(self) -> list[TaskSample]:
        """Return a report of each task, in order of job and index."""
        with contextlib.suppress(Exception):  # of resolvers, which are users' classes
            spec = self._find_spec()
            for job in self._jobs:
                for index in spec.task_indices(job) if job in spec.jobs else ():
                    self._addresses[job, index] = spec.task_address(job, index)
        tasks = sorted(self._addresses)
        if len(tasks) < 2:
            return [self._ask(task) for task in tasks]
        with ThreadPoolExecutor(min(len(tasks), _AT_ONCE), "stratagem-monitor-ask") as threads:
            return list(threads.map(self._ask, tasks))

    def _ask(self, task: tuple[str, int]) -> TaskSample:
        name = f"{task[0]} {task[1]}"
        life, restarts = self._lives.get(name, ("", 0))
        channel = self._channels.pop(task, None)
        try:
            channel = channel or self._connect(task)
            limit_s = channel.round_trip.limit_s(self._limit_s)
            stats = channel.request(messages.AskStats(), timeout_s=limit_s).message
            assert isinstance(stats, messages.Stats)
        except Exception as error:  # noqa: BLE001 - the task may be anything
            if channel is not None:
                channel.close()
            return TaskSample(name=name, state=_failure(error), restarts=restarts)
        facts = stats.facts
        if task[0] == "ps":
            self._channels[task] = channel
            new = str(facts.get("life", ""))
            restarts += life not in ("", new)
            self._lives[name] = (new, restarts)
            numbers = {
                key: float(value) for key, value in facts.items() if isinstance(value, int | float)
            }
            return TaskSample(
                name=name, state="running", identity=new, restarts=restarts, numbers=numbers
            )
        channel.close()
        incarnation = int(facts.get("incarnation", 0))
        seen = stats.metrics or metrics.Snapshot()
        return TaskSample(
            name=name,
            state=str(facts.get("state", "running")),
            identity=f"{facts.get('pid', '')}-{incarnation}",
            restarts=max(0, incarnation - 1),
            numbers=seen.counters,
            metrics=seen,
        )

    def _connect(self, task: tuple[str, int]) -> Channel:
        channel = connect(self._addresses[task], key=self._key, timeout_s=self._limit_s)
        if task[0] == "ps":  # a parameter server expects a first message
            try:
                limit_s = channel.round_trip.limit_s(self._limit_s)
                channel.request(messages.Hello(purpose="control"), timeout_s=limit_s)
            except BaseException:
                channel.close()
                raise
        return channel

    @override
    def close(self) -> None:
        """Close the connections. May be called again."""
        while self._channels:
            self._channels.popitem()[1].close()


def _failure(error: Exception) -> str:
    """Return the state of a task that did not answer: ``refused`` by another release, or by TLS on one side only."""
    if isinstance(error, AuthenticationError):
        return "wrong key"
    return "refused" if isinstance(error, ProtocolError) else "no answer"
