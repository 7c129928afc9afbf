"""Sources of samples of a cluster: the scheduling program, or the tasks themselves."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, Protocol, final

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
from stratagem.errors import AuthenticationError, ProtocolError, WireError

_SERVER_LIMIT_S: Final = 1.0  # a server answers in a millisecond, also while a long step runs


class SampleSource(Protocol):
    """Source of samples of one cluster."""

    def sample(self) -> ClusterSample:
        """Return the state of the cluster now."""

    def close(self) -> None:
        """Close all connections."""


@final
class ProgramSource(Owner):
    """Samples of the cluster that this program schedules on.

    Workers report with their heartbeats, so that only servers are asked. A strategy without a cluster has
    only the metrics of this process.

    Args:
        subject: a coordinator or a strategy. A coordinator that has not connected yet is not started.
    """

    def __init__(self, subject: object) -> None:
        self._strategy: Any = (
            subject.strategy if isinstance(subject, ClusterCoordinator) else subject
        )
        self._coordinator = subject if isinstance(subject, ClusterCoordinator) else None
        self._probes: list[Probe] = []
        self._tasks: tuple[tuple[TaskSample, ...], tuple[TaskSample, ...]] = ((), ())
        self._restarts: dict[str, tuple[str, int]] = {}

    def sample(self) -> ClusterSample:
        """Return the state of the cluster now; of a closed one, the last state."""
        engine = self._engine()
        queued = in_flight = None
        if engine is not None and not engine.closed:
            with engine.lock:
                queued, in_flight = engine.queue.counts
            self._tasks = (self._workers(engine), self._servers())
        elif engine is not None:  # the workers' last reports may have come after the last sample
            servers = self._tasks[1] or tuple(one for one in self._servers() if one.answers)
            self._tasks = (self._workers(engine), servers)
        workers, servers = self._tasks
        return ClusterSample(
            time_s=time.time(),
            workers=workers,
            servers=servers,
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

    @staticmethod
    def _workers(engine: Engine) -> tuple[TaskSample, ...]:
        with engine.lock:
            return tuple(
                TaskSample(
                    name=f"worker {link.task_index}",
                    state="idle" if engine.closed else _state(engine, number),
                    identity=str(link.incarnation),
                    restarts=max(0, link.incarnation - 1),
                    numbers=link.metrics.counters,
                    metrics=link.metrics,
                )
                for number, link in engine.links.items()
            )

    def _servers(self) -> tuple[TaskSample, ...]:
        if not self._probes:
            resolver = self._strategy.cluster_resolver
            key = cluster_key(resolver.cluster_key_text())
            self._probes = [
                Probe(
                    functools.partial(_server_address, resolver, index),
                    key=key,
                    is_server=True,
                    limit_s=_SERVER_LIMIT_S,
                )
                for index in resolver.cluster_spec().task_indices("ps")
            ]
        answers = ask_all(self._probes)
        return tuple(
            _server(f"ps {index}", facts, "lost", self._restarts)
            for index, facts in enumerate(answers)
        )

    @override
    def close(self) -> None:
        """Close the connections to the servers. May be called again."""
        for probe in self._probes:
            probe.close()


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
        self._spec = spec
        self._key = cluster_key(key_text, tls)
        self._addresses: dict[tuple[str, int], str] = {}
        self._probes: dict[tuple[str, int], Probe] = {}
        self._restarts: dict[str, tuple[str, int]] = {}

    def sample(self) -> ClusterSample:
        """Return the state of the cluster now."""
        self._find_tasks()
        tasks = sorted(self._probes)
        probes = [self._probes[task] for task in tasks]
        workers, servers = [], []
        for (job, index), probe, facts in zip(tasks, probes, ask_all(probes), strict=True):
            name = f"{job} {index}"
            if job == "worker":
                workers.append(_worker(name, facts, probe.failure))
            else:
                servers.append(_server(name, facts, probe.failure, self._restarts))
        return ClusterSample(time_s=time.time(), workers=tuple(workers), servers=tuple(servers))

    def _find_tasks(self) -> None:
        spec = self._spec if isinstance(self._spec, ClusterSpec) else self._spec()
        for job in ("worker", "ps"):
            for index in spec.task_indices(job) if job in spec.jobs else ():
                task = job, index
                self._addresses[task] = spec.task_address(job, index)
                if task not in self._probes:
                    self._probes[task] = Probe(
                        functools.partial(self._addresses.__getitem__, task),
                        key=self._key,
                        is_server=job == "ps",
                        limit_s=answer_limit_s(),
                    )

    @override
    def close(self) -> None:
        """Close the connections to the servers. May be called again."""
        for probe in self._probes.values():
            probe.close()


def _state(engine: Engine, number: int) -> str:
    return "running" if engine.queue.is_up(number) else "lost"


def _server_address(resolver: Any, index: int) -> str:
    return str(resolver.cluster_spec().task_address("ps", index))


def _own_metrics() -> metrics.Snapshot:
    """Return the metrics of this process, with its processor time and memory."""
    usage = process_usage()
    memory = usage.pop("process.memory_bytes", None)
    seen = metrics.snapshot()
    gauges = dict(seen.gauges) | ({} if memory is None else {"process.memory_bytes": memory})
    return replace(seen, counters={**seen.counters, **usage}, gauges=gauges)


def _worker(name: str, stats: messages.Stats | None, failure: str) -> TaskSample:
    if stats is None:
        return TaskSample(name=name, state=failure)
    seen = stats.metrics or metrics.Snapshot()
    incarnation = int(stats.facts.get("incarnation", 0))
    return TaskSample(
        name=name,
        state=str(stats.facts.get("state", "running")),
        identity=f"{stats.facts.get('pid', '')}-{incarnation}",
        restarts=max(0, incarnation - 1),
        numbers=seen.counters,
        metrics=seen,
    )


def _server(
    name: str, stats: messages.Stats | None, lost: str, restarts: dict[str, tuple[str, int]]
) -> TaskSample:
    """Return the report of a server; `restarts` counts the processes seen at its address."""
    last, count = restarts.get(name, ("", 0))
    if stats is None:
        return TaskSample(name=name, state=lost, restarts=count)
    life = str(stats.facts.get("life", ""))
    if last not in ("", life):
        count += 1
    restarts[name] = (life, count)
    facts = stats.facts.items()
    numbers = {key: float(value) for key, value in facts if isinstance(value, int | float)}
    return TaskSample(name=name, state="running", identity=life, restarts=count, numbers=numbers)


_AT_ONCE: Final = 16  # tasks that are asked at the same time


@final
class Probe(Owner):
    """Asks one task for its figures, again and again.

    Args:
        find_address: returns the task's address; called at every attempt to connect.
        key: of the cluster.
        is_server: whether the task is a parameter server, which expects a first message.
        limit_s: of one question; longer if the measured round trip demands it.
    """

    def __init__(
        self,
        find_address: Callable[[], str],
        *,
        key: ClusterKey | None,
        is_server: bool,
        limit_s: float,
    ) -> None:
        self._find_address = find_address
        self._key = key
        self._is_server = is_server
        self._limit_s = limit_s
        self._channel: Channel | None = None
        self.failure = "no answer"
        """Why the last question failed: ``wrong key``, ``refused`` (another release, or TLS on one side only) or
        ``no answer``."""

    def ask(self) -> messages.Stats | None:
        """Return the figures that the task reports, or None if it does not answer."""
        try:
            channel = self._channel or self._connect()
            limit_s = channel.round_trip.limit_s(self._limit_s)
            reply = channel.request(messages.AskStats(), timeout_s=limit_s).message
        except Exception as error:  # noqa: BLE001 - also those of resolvers, which are users' classes
            self.close()
            self.failure = _failure(error)
            return None
        if not self._is_server:
            self.close()
        return reply if isinstance(reply, messages.Stats) else None

    def _connect(self) -> Channel:
        channel = connect(self._find_address(), key=self._key, timeout_s=self._limit_s)
        if self._is_server:
            try:
                limit_s = channel.round_trip.limit_s(self._limit_s)
                channel.request(messages.Hello(purpose="control"), timeout_s=limit_s)
            except BaseException:
                channel.close()
                raise
        self._channel = channel
        return channel

    @override
    def close(self) -> None:
        """Close the connection; the next question opens another one. May be called again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(WireError):
                channel.close()


def _failure(error: Exception) -> str:
    if isinstance(error, AuthenticationError):
        return "wrong key"
    return "refused" if isinstance(error, ProtocolError) else "no answer"


def ask_all(probes: Sequence[Probe]) -> list[messages.Stats | None]:
    """Return the answers of all tasks, in order."""
    if len(probes) < 2:
        return [probe.ask() for probe in probes]
    with ThreadPoolExecutor(min(len(probes), _AT_ONCE), "stratagem-monitor-ask") as threads:
        return list(threads.map(Probe.ask, probes))
