"""Workers of a coordinator: create its engine, wait for them at the start, follow the resolver later.

The links' threads connect, and go on trying after the start. This module decides how long the coordinator
waits for them. A worker that does not answer may be starting. A worker that refused will refuse again, and
an invalid address stays invalid: the coordinator does not wait for those.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple, final

import torch

from stratagem import metrics
from stratagem._cluster.contract import ClusterStrategy
from stratagem._cluster.coordinator.engine import Engine
from stratagem._cluster.coordinator.worker_link import LinkSettings, WorkerAddresses, WorkerLink
from stratagem._cluster.launch.launcher import check_open_files
from stratagem._wire.cluster_key import cluster_key
from stratagem._wire.connecting import check_destination
from stratagem.config import ClusterOptions
from stratagem.errors import ParameterServerLost, UnavailableError

_log = logging.getLogger("stratagem.coordinator")

LOG_AFTER_S: Final = 2.0
"""When to log which workers are late: a person at a terminal begins to wonder; most workers are up."""

_SETTING: Final = "STRATAGEM_CONNECT_TIMEOUT_S"


def make_engine(strategy: ClusterStrategy, options: ClusterOptions) -> Engine:
    """Return the engine of a strategy's coordinator, with a link to every worker of its resolver."""
    resolver, views = strategy.cluster_resolver, strategy._cluster_views()
    spec = resolver.cluster_spec()
    tasks = spec.task_indices("worker")
    check_open_files(len(tasks))
    check_addresses((task, spec.task_address("worker", task)) for task in tasks)
    key = cluster_key(resolver.cluster_key_text())
    addresses = WorkerAddresses(resolver.cluster_spec, options.restart_pause_s)

    def setup() -> object:
        engine.recoveries.refuse_if_active()
        return views.worker_setup()

    settings = LinkSettings(
        options=options,
        setup=setup,
        addresses=addresses,
        key=key,
        seed=torch.initial_seed() if views.job is None else views.job.connection.seed,
    )
    engine = Engine(views, options, functools.partial(WorkerLink, settings=settings), tasks)
    engine.check_membership = WorkerMembership(engine, addresses.workers).check
    engine.sender.keep_secret(key.text())
    views.servers.recover_with(engine.recoveries.await_recovery)
    return engine


def check_addresses(addresses: Iterable[tuple[int, str]]) -> None:
    """Raise if the address of a worker can never be connected to.

    Raises:
        ValueError: an invalid address, with its task.
    """
    for task, address in addresses:
        try:
            check_destination(address)
        except ValueError as error:
            raise ValueError(
                f"the address of /job:worker/task:{task} is invalid: {error}."
            ) from error


def await_workers(engine: Engine) -> None:
    """Wait until every worker has answered; go on without some of them, but not without any.

    Raises:
        UnavailableError: no worker is up; it names each worker, its address and the reason.
        ParameterServerLost: no worker reaches one of the servers.
    """
    limit_s = engine.options.connect_timeout_s
    began = time.monotonic()
    late = limit_s > LOG_AFTER_S and not _wait(engine, LOG_AFTER_S)
    if late:
        why = engine.why_down()
        _log.warning("waiting for workers: %s, up to %g s (%s)", why, limit_s, _SETTING)
    _wait(engine, began + limit_s - time.monotonic())
    with engine.lock:
        error = engine.result_condition.error
        up, wanted = engine.queue.workers_up(), len(engine.links)
    if error is not None:
        raise error
    if up == 0:
        raise _no_worker(engine)
    if up < wanted:
        _log.warning(
            "%d of %d workers answer, going on without the rest: %s", up, wanted, engine.why_down()
        )
    elif late:
        _log.warning("all workers answer after %.1f s", time.monotonic() - began)


def _wait(engine: Engine, timeout_s: float) -> bool:
    """Return whether every worker is up or has refused within the time."""

    def all_answered() -> bool:
        refused = sum(link.taken or link.refused for link in engine.links.values())
        up = engine.queue.workers_up()
        return engine.result_condition.error is not None or up + refused >= len(engine.links)

    with engine.changed:
        return engine.changed.wait_for(all_answered, timeout=timeout_s)


def _no_worker(engine: Engine) -> UnavailableError:
    links, why = list(engine.links.values()), engine.why_down()
    lost = [one.last_error for one in links if isinstance(one.last_error, ParameterServerLost)]
    if len(lost) == len(links):
        return lost[0]
    task = links[0].task if len(links) == 1 else "/job:worker"
    if any(link.taken for link in links):
        return UnavailableError(
            f"no worker is free ({why}). A worker serves one coordinator at a time: wait until the "
            "other one is closed, or start more workers.",
            task=task,
        )
    if all(link.refused for link in links):
        return UnavailableError(
            f"every worker refused: {why}. Waiting does not help: correct the workers' addresses in "
            "the cluster specification, or the arguments the workers were started with.",
            task=task,
        )
    return UnavailableError(
        f"no worker answered within {engine.options.connect_timeout_s:g} s: {why}. Start the "
        f"workers, or correct their addresses in the cluster specification; {_SETTING} sets how long "
        "to wait.",
        task=task,
    )


class MembershipChange(NamedTuple):
    """Task indices to add, and numbers of workers to drain."""

    joined: list[int]
    left: list[int]


def membership_change(
    listed: Collection[int], known: Mapping[int, int], draining: Collection[int]
) -> MembershipChange:
    """Compare the resolver's workers with those of the coordinator.

    A resolver that lists no worker at all is taken to be at fault: nothing changes. A task that is listed
    again while its worker is draining joins after the worker was released.

    Args:
        listed: task indices that the resolver returns.
        known: task indices of the coordinator's workers, by worker number.
        draining: numbers of workers that are being drained.

    Example:
        >>> membership_change([0, 2], {10: 0, 11: 1}, draining=[])
        MembershipChange(joined=[2], left=[11])
    """
    if not listed:
        return MembershipChange([], [])
    indices = set(known.values())
    joined = sorted(task for task in listed if task not in indices)
    left = [n for n, task in known.items() if task not in listed and n not in draining]
    return MembershipChange(joined, left)


@final
class WorkerMembership:
    """Workers of one engine, kept equal to those of the resolver.

    Args:
        engine: adds and drains the workers.
        listed: asks the resolver for the task indices of the workers.
    """

    def __init__(self, engine: Engine, listed: Callable[[], Collection[int]]) -> None:
        self._engine = engine
        self._listed = listed
        self._last_error = ""

    def check(self) -> None:
        """Ask the resolver once, and follow it. Called by a watch thread; may wait for the resolver."""
        try:
            listed = self._listed()
        except Exception as error:  # noqa: BLE001 - resolvers are users' classes
            if str(error) != self._last_error:
                self._last_error = str(error)
                _log.warning("the cluster resolver failed, the workers stay as they are: %s", error)
            return
        self._last_error = ""
        engine = self._engine
        with engine.lock:
            known = {number: link.task_index for number, link in engine.links.items()}
            draining = [number for number in known if engine.queue.is_draining(number)]
        change = membership_change(listed, known, draining)
        for task in change.joined:
            _log.info("/job:worker/task:%d is new in the cluster", task)
            metrics.event("worker_joined", worker=f"/job:worker/task:{task}")
            engine.add_worker(task)
        for number in change.left:
            task = known[number]
            _log.info("/job:worker/task:%d leaves the cluster when it has finished", task)
            metrics.event("worker_left", worker=f"/job:worker/task:{task}")
            engine.drain_worker(number)
