"""`RayCluster`: a cluster whose tasks run on the nodes of a Ray cluster."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from typing_extensions import override

from stratagem._cluster.launch.launcher import EventHandler, TaskOrder, check_open_files
from stratagem._cluster.launch.ray_launcher import RayLauncher
from stratagem._cluster.launch.ray_placement import (
    STRATEGIES,
    RayPlacement,
    Resources,
    import_ray,
)
from stratagem._cluster.launch.supervised_cluster import SupervisedCluster, check_count
from stratagem._cluster.launch.supervisor import TaskSupervisor
from stratagem._wire.handshake import ClusterKey
from stratagem.config import ClusterOptions, cluster_key_text, log_as_environment_says
from stratagem.errors import StartupError

_log = logging.getLogger("stratagem.cluster")

START_TIMEOUT_S: Final = 120.0
"""For the whole start. Two nodes take about 7 s; an autoscaler may need a minute for a new node."""

GROW_S: Final = 1.0
"""How often an elastic cluster looks whether Ray has room for one more worker."""


@final
class RayCluster(SupervisedCluster):
    """Workers and parameter servers on the nodes of a Ray cluster.

    Ray reserves the resources and places the tasks. On every node with tasks, one small agent (a Ray actor) starts
    them as processes. Steps and parameters use Stratagem's own connections, not Ray's.

    If a task ends, the agent replaces it in a fraction of a second. If a node is lost, its tasks start on other nodes
    when Ray has room for them, and the resolver returns the new addresses. All tasks end with this process, even if
    it is killed with SIGKILL.

    This process must be able to connect to the nodes: run it on a node of the Ray cluster, or with ``ray job
    submit``. If Ray is not initialised, the constructor calls ``ray.init()``, and `close` calls ``ray.shutdown()``.

    Args:
        workers: number of workers, or the smallest and the largest number. The cluster starts with the smallest
            number, and adds workers while Ray has room for them.
        ps: number of parameter servers.
        resources_per_worker: resources that Ray reserves for each worker; a CPU by default.
        resources_per_ps: the same for each parameter server.
        placement_strategy: of Ray's placement groups: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD". Workers
            that join later are placed one by one.
        restart: replace tasks that end. A new parameter server has no variables: they are restored from the newest
            checkpoint, if there is a `CheckpointManager`.
        threads: torch threads of each task; by default its number of CPUs.
        checkpoint_directories: directories that this process and all nodes share. Parameter servers write their
            part of checkpoints below these. Without any, their rows pass through this process.
        start_timeout_s: how long the start may take, including the wait for resources.

    Raises:
        StartupError: Ray has too few resources, or a task was not ready in time, or exited while starting.
        ImportError: Ray is not installed.

    Example::

        with sg.RayCluster(workers=(2, 8), ps=2, resources_per_worker={"CPU": 2}) as cluster:
            strategy = sg.ParameterServerStrategy(cluster.resolver)

    Arguments are checked before anything starts:

        >>> import stratagem as sg
        >>> sg.RayCluster(workers=(8, 2))
        Traceback (most recent call last):
        ...
        ValueError: workers=(8, 2): expected the smallest number of workers first, such as (2, 8).
    """

    def __init__(
        self,
        workers: int | tuple[int, int] = 2,
        ps: int = 1,
        *,
        resources_per_worker: Resources | None = None,
        resources_per_ps: Resources | None = None,
        placement_strategy: str = "PACK",
        restart: bool = True,
        threads: int | None = None,
        checkpoint_directories: Sequence[str] = (),
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        least, most = _checked_range(workers)
        check_count("ps", ps)
        if threads is not None:
            check_count("threads", threads)
        self._resources = {
            "worker": _checked_resources("resources_per_worker", resources_per_worker),
            "ps": _checked_resources("resources_per_ps", resources_per_ps),
        }
        if placement_strategy not in STRATEGIES:
            raise ValueError(
                f"placement_strategy={placement_strategy!r}: expected one of {', '.join(STRATEGIES)}."
            )
        check_open_files(most + ps)
        log_as_environment_says()
        self._ray = import_ray()
        self._key = cluster_key_text() or ClusterKey.random().text()
        self._restart = restart
        self._threads = threads
        self._checkpoint_directories = tuple(checkpoint_directories)
        self._start_timeout_s = start_timeout_s
        self._target = most
        self._changing = threading.Lock()  # taken to add and remove workers
        self._next_index = least
        self._closing = threading.Event()
        self._growing: threading.Thread | None = None
        self._owns_ray = not self._ray.is_initialized()
        began = time.monotonic()
        if self._owns_ray:
            self._ray.init()
        self._placement = RayPlacement(self._ray)
        try:
            self._start(least, ps, placement_strategy, began)
        except BaseException:  # Ctrl-C too: nothing else would return the resources
            self._release_ray()
            raise
        if most > least:
            self._growing = threading.Thread(
                target=self._grow, name="stratagem-ray-growth", daemon=True
            )
            self._growing.start()

    def _start(self, workers: int, ps: int, placement_strategy: str, began: float) -> None:
        self._address = self._ray.get_runtime_context().gcs_address
        orders = [
            self._order(job, index)
            for job, count in (("ps", ps), ("worker", workers))
            for index in range(count)
        ]
        sizes = {order.task: self._resources[order.job] for order in orders}
        self._placement.reserve(sizes, placement_strategy, began, self._start_timeout_s)
        deadline = began + self._start_timeout_s
        self._tasks = TaskSupervisor(
            functools.partial(self._make_launcher, deadline - time.monotonic()),
            orders,
            restart=("worker", "ps") if self._restart else (),
            start_timeout_s=deadline - time.monotonic(),
        )

    def _make_launcher(self, start_timeout_s: float, on_event: EventHandler) -> RayLauncher:
        self._launcher = RayLauncher(
            on_event,
            ray=self._ray,
            node_of=self._placement.node_of,
            on_gone=self._placement.free,
            key=self._key,
            start_timeout_s=start_timeout_s,
        )
        return self._launcher

    def _order(self, job: str, index: int) -> TaskOrder:
        limit_s = ClusterOptions.from_environment().heartbeat_limit_s if self._restart else 0.0
        cpus = int(self._resources[job].get("CPU", 1))
        return TaskOrder(
            job=job,
            index=index,
            threads=self._threads or max(1, cpus),
            environment={"RAY_ADDRESS": self._address},  # for `ray.init()` in a worker
            any_optimizer=True,
            checkpoint_directories=self._checkpoint_directories,
            stopped_limit_s=limit_s,
            owner=os.getpid(),
        )

    @override
    def add_worker(self) -> int:
        """Start one more worker and return its index, which no worker had before.

        An elastic cluster may grow by one more.

        Raises:
            StartupError: Ray has no room for it, or it was not ready, within the cluster's `start_timeout_s`.
        """
        with self._changing:
            began = time.monotonic()
            order = self._next_order()
            sizes = {order.task: self._resources["worker"]}
            self._placement.reserve(sizes, "PACK", began, self._start_timeout_s)
            self._add(order, began + self._start_timeout_s)
            self._target += 1
            return order.index

    @override
    def remove_worker(self, index: int | None = None, *, drain: bool = True) -> int:
        """Remove a worker, by default the one with the highest index; return its index without waiting.

        An elastic cluster does not replace the worker. If the worker joined after the start, Ray gets its resources
        back when the process has ended. Otherwise the next worker that is added uses them.

        Args:
            index: the worker.
            drain: let the worker finish its current closure. False: kill it; its closures run on other workers.

        Raises:
            ValueError: there is no such worker, or it is the last one.
        """
        with self._changing:
            removed = super().remove_worker(index, drain=drain)
            self._target -= 1
            self._launcher.release(f"worker:{removed}")
            return removed

    def nodes(self) -> Mapping[str, str]:
        """Return the Ray node of each task that runs, such as ``{"worker:0": "a3f…"}``."""
        return self._launcher.nodes

    @override
    def close(self) -> None:
        """End every task and agent, and return the resources to Ray. May be called again."""
        self._closing.set()
        self._tasks.close()
        if self._growing is not None:
            self._growing.join()
        self._release_ray()

    def _release_ray(self) -> None:
        self._placement.close()
        if self._owns_ray and self._ray.is_initialized():
            self._ray.shutdown()

    def _next_order(self) -> TaskOrder:
        order = self._order("worker", self._next_index)
        self._next_index += 1
        return order

    def _add(self, order: TaskOrder, deadline: float) -> None:
        try:
            self._tasks.add(order, max(0.0, deadline - time.monotonic()))
        except StartupError:
            self._launcher.release(order.task)
            raise

    def _grow(self) -> None:
        """Add workers, one at a time, while there are fewer than wanted and Ray has room."""
        asked: Any = None
        while not self._closing.wait(GROW_S):
            if not self._ray.is_initialized():
                return
            try:
                asked = self._grow_once(asked)
            except Exception as error:  # noqa: BLE001 - of Ray, or of a node that broke: try again
                if not self._closing.is_set():
                    _log.warning("the cluster could not grow by a worker: %s", error)
                asked = None

    def _grow_once(self, asked: Any) -> Any:
        """Ask Ray for a bundle, or start a worker on it; return the request that is still open."""
        with self._changing:
            if len(self._tasks.indices("worker")) >= self._target:
                if asked is not None:
                    self._placement.cancel(asked)
                return None
            if asked is None:
                return self._placement.request([self._resources["worker"]])
            if not self._placement.is_reserved(asked):
                return asked
            order = self._next_order()
            self._placement.assign(order.task, asked, self._resources["worker"])
            self._add(order, time.monotonic() + self._start_timeout_s)
            return None

    @override
    def __repr__(self) -> str:
        return f"<RayCluster [{'closed' if self._closing.is_set() else repr(self._tasks)}]>"


def _checked_range(workers: object) -> tuple[int, int]:
    if not isinstance(workers, tuple):
        check_count("workers", workers)
        return workers, workers  # type: ignore[return-value]  # check_count has checked it
    if len(workers) != 2:
        raise ValueError(f"workers={workers!r}: expected a number, or two such as (2, 8).")
    least, most = workers
    check_count("workers", least)
    check_count("workers", most)
    if most < least:
        raise ValueError(
            f"workers={workers!r}: expected the smallest number of workers first, such as (2, 8)."
        )
    return least, most


def _checked_resources(name: str, given: Any) -> Resources:
    if given is None:
        return {"CPU": 1.0}
    if not isinstance(given, Mapping) or not given:
        raise TypeError(
            f"{name}={given!r}: expected a mapping from resource to amount, such as "
            '{"CPU": 2, "memory": 8e9}.'
        )
    if "GPU" in given:
        raise ValueError(
            f"{name}={dict(given)!r}: tasks on Ray cannot have GPUs; Ray would not tell them which ones."
        )
    for resource, amount in given.items():
        if not isinstance(amount, int | float) or isinstance(amount, bool) or amount <= 0:
            raise ValueError(f"{name}={dict(given)!r}: {resource} must be a number above 0.")
    return dict(given)
