"""Follow the resolver during training: connect to new workers, drain removed ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple, final

from stratagem import metrics

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine

_log = logging.getLogger("stratagem.coordinator")


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
