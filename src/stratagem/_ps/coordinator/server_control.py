"""Check, fence and restore the parameter servers of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stratagem import config
from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables
from stratagem._ps.coordinator.server_backups import NoBackup
from stratagem._ps.coordinator.server_restore import lost_error, restore_server
from stratagem._ps.recovery_point import ServerRecovery
from stratagem.config import ClusterOptions
from stratagem.errors import ParameterServerLost


class ServerControl:
    """Control over the servers of a strategy, for the coordinator (contract 7)."""

    def __init__(self, variables: CoordinatorVariables) -> None:
        self._variables = variables

    def fence(self, worker_index: int, incarnation: int) -> None:
        """Make every server refuse writes of this incarnation and older ones."""
        if not self._variables.closed:  # else there is nothing left to write to
            self._variables.client.fence(f"/job:worker/task:{worker_index}", incarnation)

    def check_servers(self, options: ClusterOptions) -> None:
        """Check every server once; raise ParameterServerLost if one is lost."""
        self._variables.client.check_servers(options)

    def reaches(self, task: str) -> bool:
        """Return whether the server has answered the last check. Never waits."""
        return bool(self._variables.client.answers_checks(task))

    def server_index(self, task: str) -> int | None:
        """Return the number of a server that can be restored from a checkpoint; None if it cannot."""
        tasks, variables = self._variables.client.tasks, self._variables
        can = variables.client.replacement.point is not None or variables.backups is not None
        return tasks.index(task) if can and not variables.closed and task in tasks else None

    def is_outdated(self, error: ParameterServerLost) -> bool:
        """Return whether an error is about a process whose variables another one has already."""
        tasks, replacement = self._variables.client.tasks, self._variables.client.replacement
        known = replacement.life_of(tasks.index(error.task)) if error.task in tasks else ""
        return error.identity not in ("", known)

    def promote_backup(self, server: int) -> tuple[ServerRecovery | None, bool, str]:
        """Let the backup of a lost server take over.

        Returns:
            A report, or None without a backup; whether clients notice the loss by themselves; why there is none.
        """
        backups = self._variables.backups
        if backups is None:
            return None, False, ""
        try:
            return *backups.promote(self._variables, server), ""
        except NoBackup as error:
            return None, False, str(error)

    def lack_backups(self) -> bool:
        """Return whether a server that should have a backup has none. Never waits."""
        backups, variables = self._variables.backups, self._variables
        if backups is None or variables.closed:
            return False
        return not backups.are_complete or bool(backups.left_alone(variables))

    def repair_backups(self) -> None:
        """Let servers go on whose backup was lost, and give them a new one as far as possible."""
        backups = self._variables.backups
        if backups is None or self._variables.closed:
            return
        backups.release(self._variables)
        job = self._variables.job
        for process in backups.repair(self._variables):
            if job is not None:
                job.server_restored(process, is_older=False)

    def restore_server(
        self,
        server: int,
        *,
        lost_at: float,
        stopped: Callable[[], bool],
        progress: Callable[[], None],
        why: str = "",
    ) -> ServerRecovery:
        """Wait until a lost server has been started again, and restore it from the last checkpoint."""
        if self._variables.client.replacement.point is None:
            names = self._variables.client.replacement.names_on(server)
            raise lost_error(self._variables.client.tasks[server], why, names)
        job = self._variables.job
        if job is not None:
            job.server_lost(server)
        restored = restore_server(
            self._variables,
            server,
            lost_at=lost_at,
            wait_s=config.server_wait_s(),
            stopped=stopped,
            progress=progress,
        )
        if job is not None:
            job.server_restored(server, is_older=restored.step >= 0)
        return restored

    def recover_with(self, recovery: Callable[[Exception], bool] | None) -> None:
        """Let requests of this process to a lost server wait for its recovery."""
        self._variables.client.replacement.recover_with(recovery)

    def finish_closures(self, closures: Sequence[int]) -> None:
        """Let servers refuse late writes of these closures, which are finished. Never waits."""
        if not self._variables.closed:
            self._variables.client.finish_closures(closures)
