"""Recover lost parameter servers: a thread promotes a backup, or restores the server from a checkpoint.

If a backup takes over, workers continue: their connections find it. Otherwise the sessions of all workers end first, as if
the workers had been lost: their unfinished closures are queued again, and servers refuse their late writes. No worker gets
a new session while the server is restored. The coordinator's own requests to the lost server wait (`await_recovery`).
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, final

from stratagem import config, metrics
from stratagem._ps.recovery_point import ServerRecovery
from stratagem.errors import ParameterServerLost, WorkerLost

if TYPE_CHECKING:
    from stratagem._cluster.coordinator.engine import Engine

_log = logging.getLogger("stratagem.coordinator")

_REPAIR_S: Final = 0.1
"""Between two attempts to give a server a new backup."""


@final
class ServerRecoveries:
    """The recoveries of one engine, one at a time.

    Attributes:
        done: what was restored so far.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._lost: dict[str, float] = {}  # task → since when
        self._failed: dict[str, ParameterServerLost] = {}
        self._ended: set[tuple[int, int]] = set()  # task index and incarnation
        self._thread: threading.Thread | None = None
        self._went_on_at = 0.0  # when a recovery last made progress
        self._closed = False
        self.done: list[ServerRecovery] = []

    def begin(self, error: ParameterServerLost) -> bool:
        """Begin to restore a lost server; return False if that is not possible."""
        with self._changed:
            if self._closed or error.task in self._failed:
                return False
            if error.task in self._lost:
                return True
            if self._engine.views.servers.server_index(error.task) is None:
                return False
            if self._engine.views.servers.is_outdated(error):
                return True  # the server was restored while the error was on its way
            self._lost[error.task] = time.monotonic()
            self._locked_start()
        # Without the error's advice, and no error itself: a kept log record would keep frames, and so memory of servers.
        why = "" if error.__cause__ is None else f" ({error.__cause__})"
        _log.warning(
            "%s was lost%s: its variables are restored from its backup or the newest checkpoint",
            error.task,
            why,
        )
        return True

    def repair_backups(self) -> None:
        """Begin to give servers new backups if some have none. Never waits."""
        if self._engine.views.servers.lack_backups():
            with self._changed:
                if not self._closed:
                    self._locked_start()

    def _locked_start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="stratagem-recovery", daemon=True
            )
            self._thread.start()
        self._changed.notify_all()

    def await_recovery(self, error: Exception) -> bool:
        """Wait until the server of an error has been restored; return False if it will not be.

        Raises:
            ParameterServerLost: the recovery does not get on.
        """
        if not isinstance(error, ParameterServerLost) or not self.begin(error):
            return False
        limit_s = config.server_wait_s() + 5 * config.wire_timeout_s()
        with self._changed:
            began = time.monotonic()
            while not self._closed and error.task in self._lost:
                stalled_s = time.monotonic() - max(began, self._went_on_at)
                if stalled_s > limit_s:
                    raise ParameterServerLost(
                        f"the recovery of {error.task}, which was lost "
                        f"{time.monotonic() - self._lost[error.task]:.0f} s ago, has made no progress for "
                        f"{stalled_s:.0f} s (the limit is STRATAGEM_SERVER_WAIT_S + 5 × STRATAGEM_WIRE_TIMEOUT_S = "
                        f"{limit_s:g} s). The server or the disk of its checkpoint does not answer: repair it, "
                        "and run the script again.",
                        task=error.task,
                        variables=error.variables,
                    )
                self._changed.wait(limit_s - stalled_s + _REPAIR_S)
            return not self._closed and error.task not in self._failed

    def refuse_if_active(self) -> None:
        """Raise while a server is being restored.

        Raises:
            ParameterServerLost: names the server.
        """
        for task in list(self._lost):
            raise ParameterServerLost(f"{task} is being restored", task=task)

    def forgives(self, task: str) -> bool:
        """Return whether a closure that failed because of this server is retried in any case."""
        return task in self._lost

    def ended_session(self, task_index: int, incarnation: int) -> bool:
        """Return whether the coordinator itself ended this session of a worker."""
        return (task_index, incarnation) in self._ended

    def close(self) -> None:
        """Give up what is under way. May be called again."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._engine.options.close_timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                task = next(iter(self._lost), None)
                repairs = task is None and self._engine.views.servers.lack_backups()
                if self._closed or (task is None and not repairs):
                    self._thread = None
                    return
            if task is None:
                self._repair()
                continue
            failure: ParameterServerLost | None = None
            try:
                self._restore(task)
            except ParameterServerLost as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - raised at the user's next call
                _log.exception("restoring %s failed", task)
                failure = ParameterServerLost(f"restoring {task} failed: {error}", task=task)
            with self._changed:
                self._went_on()
                del self._lost[task]
                if failure is not None:
                    self._failed[task] = failure
                self._changed.notify_all()
            if failure is not None and not self._closed:
                self._engine.server_lost(failure)

    def _repair(self) -> None:
        try:
            self._engine.views.servers.repair_backups()
        except Exception:  # noqa: BLE001 - the thread must survive any error, and tries again
            _log.exception("giving parameter servers new backups failed")
        with self._changed:
            if not self._closed and not self._lost:
                self._changed.wait(_REPAIR_S)

    def _restore(self, task: str) -> None:
        views = self._engine.views
        server = views.servers.server_index(task)
        assert server is not None
        promoted, is_noticed, why = views.servers.promote_backup(server)
        if promoted is not None:
            if not is_noticed:  # connections to a process that hangs, or to a lost host, stay open
                self._end_sessions(task)
            self._note(promoted)
            return
        self._end_sessions(task)
        restored = views.servers.restore_server(
            server,
            lost_at=self._lost[task],
            stopped=lambda: self._closed,
            progress=self._went_on,
            why=why,
        )
        # Sessions that were just being opened may have connected to the lost server.
        self._end_sessions(task)
        if self._engine.rounds is not None:
            self._engine.rounds.restart()
        self._note(restored)

    def _went_on(self) -> None:
        self._went_on_at = time.monotonic()

    def _note(self, restored: ServerRecovery) -> None:
        self.done.append(restored)
        metrics.event(
            "server_restored", task=restored.task, step=restored.step, lost_s=restored.lost_s
        )
        metrics.counter("coordinator.servers_restored").add()
        _log.warning("%s", restored)

    def _end_sessions(self, task: str) -> None:
        for link in list(self._engine.links.values()):
            if link.connected:
                self._ended.add((link.task_index, link.incarnation))
                link.give_up(WorkerLost(f"{task} is being restored", task=link.task))
