"""Repeat the steps since the last checkpoint after a parameter server was lost (``on_server_loss="rewind"``).

The coordinator restores the lost server as usual. The other servers then have newer variables than that one, so the loop
of the script (`CheckpointManager.steps`) waits for the running closures, restores everything from the newest
checkpoint, and yields its step again. `Rewinds` knows whether that is due. Until then nothing is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

from stratagem import metrics
from stratagem._checkpoint.live_state import live_in
from stratagem._checkpoint.server_group import ServerLostInSave, strategies_of
from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables
from stratagem._ps.recovery_point import RecoveryPoint

_log = logging.getLogger("stratagem.checkpoint")

_ATTEMPTS: Final = 3
"""To restore, if another server is lost meanwhile."""

Points = Sequence[tuple[CoordinatorVariables, RecoveryPoint]]
"""Checkpoints that lost servers are restored from, by the variables of a strategy."""


def drain(objects: Mapping[str, Any]) -> None:
    """Wait until all closures that were scheduled on the servers of these objects are done.

    Raises:
        Exception: the first error of a closure.
    """
    for strategy in strategies_of([value for _, value in live_in(dict(objects))]):
        coordinator = strategy._cluster_coordinator
        engine = None if coordinator is None else coordinator._running
        if engine is not None and not engine.closed:
            coordinator.join()


def servers_are_busy(objects: Mapping[str, Any]) -> bool:
    """Return whether another save or a restore uses the servers of these objects; it then hurries."""
    strategies = strategies_of([value for _, value in live_in(dict(objects))])
    turns = [one._variables.client.replacement.turn for one in strategies]
    return any(turn.is_taken() for turn in turns)


@final
class RecoveryPoints:
    """The checkpoints that lost parameter servers are restored from, and the servers restored so far.

    Args:
        is_active: let lost servers be restored.
    """

    def __init__(self, *, is_active: bool) -> None:
        self._is_active = is_active
        self._points: dict[CoordinatorVariables, RecoveryPoint] = {}
        self._seen = 0

    def set(self, points: Points) -> None:
        """Restore lost servers from these from now on."""
        self._points.update(points)
        if self._is_active:
            for variables, point in points:
                variables.client.replacement.set_point(point)

    def activate(self, *, is_active: bool) -> None:
        """Let lost servers be restored, or not."""
        self._is_active = is_active
        for variables, point in self._points.items():
            variables.client.replacement.set_point(point if is_active else None)

    def repeating(
        self, step: int, stop: int, objects: Mapping[str, Any], restore: Callable[[], int]
    ) -> Iterator[int]:
        """Yield steps up to `stop`, and again those since the newest checkpoint after a loss.

        Args:
            step: the first one.
            stop: number of all steps.
            objects: the objects whose closures are waited for.
            restore: restores the newest checkpoint and returns its step.
        """
        self.activate(is_active=True)
        try:
            while True:
                while step < stop:
                    yield step
                    step = self._rewind(step + 1, objects, restore) if self.is_mixed else step + 1
                drain(objects)
                for variables in self._points:
                    variables.client.await_each_server()  # one may be lost, and not missed yet
                if not self.is_mixed:
                    return
                step = self._rewind(step, objects, restore)
        finally:
            self.activate(is_active=False)

    def _rewind(self, reached: int, objects: Mapping[str, Any], restore: Callable[[], int]) -> int:
        """Restore the newest checkpoint on all servers; return its step."""
        for left in reversed(range(_ATTEMPTS)):
            drain(objects)
            restored = self.restored
            try:
                step = restore()
                break
            except ServerLostInSave as error:
                if not left:
                    raise
                _log.warning("restoring the checkpoint again: %s", error)
        self._seen = restored
        metrics.counter("checkpoint.rewinds").add()
        _log.warning("a server was lost: steps %d to %d are repeated", step, reached - 1)
        return step

    @property
    def restored(self) -> int:
        """Number of servers that were restored and lost something by it."""
        return sum(variables.client.replacement.restored for variables in self._points)

    @property
    def is_mixed(self) -> bool:
        """True if a server has older variables than the others."""
        return self.restored != self._seen
