"""Rows of the live picture, read from a running local cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping

from stratagem._cluster.coordinator.coordinator import ClusterCoordinator
from stratagem._cluster.launch.local_cluster import LocalCluster
from stratagem._demo.view import ServerRow, WorkerRow
from stratagem._ps.client.server_liveness import ControlConnections
from stratagem._wire.cluster_key import cluster_key
from stratagem.errors import ParameterServerLost

__all__ = ["ClusterObserver"]

# Servers update their figures every half second, so asking more often shows nothing new.
_ASK_EVERY_S = 0.5
_ASK_LIMIT_S = 2.0


class ClusterObserver:
    """Reader of the state that coordinator and servers report about themselves."""

    def __init__(self, cluster: LocalCluster, coordinator: ClusterCoordinator) -> None:
        addresses = cluster.resolver.cluster_spec().job_tasks("ps")
        self._tasks = [f"/job:ps/task:{index}" for index in range(len(addresses))]
        self._control = ControlConnections(
            [(task, str(address)) for task, address in zip(self._tasks, addresses, strict=True)],
            key=cluster_key(cluster.resolver.cluster_key_text()),
        )
        self._coordinator = coordinator
        self._servers: list[ServerRow] = []
        self._asked_at = float("-inf")

    def close(self) -> None:
        """Close the connections to the servers."""
        self._control.close()

    def has_restarted(self, index: int) -> bool:
        """Return whether a worker was lost and is connected again."""
        status = self._coordinator.workers[index]
        return status.connected and status.incarnation > 1

    def workers(self, steps_of: Mapping[int, int]) -> list[WorkerRow]:
        """Return one row per worker."""
        return [
            WorkerRow(
                name=f"worker {status.index}",
                state="running" if status.connected else "lost",
                steps=steps_of.get(status.index, 0),
                restarts=max(0, status.incarnation - 1),
            )
            for status in self._coordinator.workers
        ]

    def servers(self) -> list[ServerRow]:
        """Return one row per parameter server."""
        if time.monotonic() - self._asked_at >= _ASK_EVERY_S:
            self._servers = [self._ask(number) for number in range(len(self._tasks))]
            self._asked_at = time.monotonic()
        return self._servers

    def staleness(self) -> tuple[float | None, float | None]:
        """Return mean and maximum of the updates by others between a worker's read and its write."""
        spread = self._coordinator.worker_metrics.distributions.get("ps.staleness")
        if spread is None or spread.count == 0:
            return None, None
        return spread.mean, spread.maximum

    def _ask(self, number: int) -> ServerRow:
        name = f"ps {number}"
        try:
            facts = self._control.stats(number, timeout_s=_ASK_LIMIT_S)
        except ParameterServerLost:
            return ServerRow(name=name, state="lost", held_bytes=0, updates=0)
        return ServerRow(
            name=name,
            state="running",
            held_bytes=int(str(facts.get("bytes", 0))),
            updates=int(str(facts.get("applied", 0))),
        )
