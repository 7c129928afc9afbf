"""`TaskSupervisor`: the tasks of a cluster with their addresses and states, on any launcher.

It starts the tasks, waits until they are ready, replaces tasks that exit, adds tasks and removes them.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final, final

from typing_extensions import override

from stratagem import metrics
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.launch.launcher import EventHandler, Launcher, TaskEvent, TaskOrder
from stratagem._owner import Owner
from stratagem.errors import ClusterError, StartupError

_log = logging.getLogger("stratagem.cluster")

RETRIES: Final = 20
"""Attempts to replace a task: its old address may be taken for a moment."""

LINES_KEPT: Final = 20
"""Lines of a task's output kept for the error when it fails."""


@final
class TaskSupervisor(Owner):
    """Table of the tasks of one cluster.

    Args:
        make_launcher: makes the launcher, from the function that receives its events.
        orders: the tasks to start.
        restart: jobs whose tasks are replaced when they exit.
        start_timeout_s: how long the start may take.

    Raises:
        StartupError: a task was not ready in time, or exited while starting.
    """

    def __init__(
        self,
        make_launcher: Callable[[EventHandler], Launcher],
        orders: Iterable[TaskOrder],
        *,
        restart: Collection[str] = (),
        start_timeout_s: float,
    ) -> None:
        self._restart = restart
        self._changed = threading.Condition()
        self._states = {order.task: _TaskState(order) for order in orders}
        self._closed = False
        deadline = time.monotonic() + start_timeout_s
        self.launcher = make_launcher(self._on_event)
        try:
            for state in self._states.values():
                self.launcher.spawn(state.order)
            self._await_start(deadline, start_timeout_s)
        except BaseException:  # Ctrl-C too: tasks already started must not stay behind
            self.close()
            raise

    def cluster_spec(self) -> ClusterSpec:
        """Return where the tasks are now. Tasks that are starting for the first time are not listed yet."""
        jobs: dict[str, dict[int, str]] = {}
        with self._changed:
            for state in self._states.values():
                if state.address and not state.removed:
                    jobs.setdefault(state.order.job, {})[state.order.index] = state.address
        return ClusterSpec(jobs)

    def add(self, order: TaskOrder, start_timeout_s: float) -> None:
        """Start one more task and wait until it is ready.

        Raises:
            StartupError: it was not ready in time, or exited while starting.
        """
        state = _TaskState(order)
        with self._changed:
            self._states[order.task] = state
        self.launcher.spawn(order)
        with self._changed:
            self._changed.wait_for(
                lambda: state.ready or state.ended or self._closed, timeout=start_timeout_s
            )
            if state.ready:
                return
            state.removed = True
            if state.ended:
                del self._states[order.task]
        if not state.ended:
            self.launcher.stop(order.task, signal.SIGKILL)
        raise StartupError(
            f"the task could not start (limit {start_timeout_s:g} s): {state!r}{state.last_lines()}"
        )

    def remove(self, task: str) -> str:
        """List the task no more and do not replace it; return its address. The caller ends the task."""
        state = self._state(task)
        with self._changed:
            state.removed = True
            if state.ended and state.order.job not in self._restart:
                del self._states[task]
        return state.address

    def indices(self, job: str) -> list[int]:
        """Return the task indices of a job, without removed tasks."""
        with self._changed:
            states = [state for state in self._states.values() if state.order.job == job]
            return sorted(state.order.index for state in states if not state.removed)

    def free_index(self, job: str) -> int:
        """Return the smallest task index that no task has, not even one that is ending."""
        with self._changed:
            taken = {state.order.index for state in self._states.values() if state.order.job == job}
        return next(index for index in range(len(taken) + 1) if index not in taken)

    def pid(self, task: str) -> int:
        """Return the process number of a task."""
        return self._state(task).pid

    def stop(self, task: str, signal_number: int) -> None:
        """Send a signal to a task."""
        self.launcher.stop(self._state(task).order.task, signal_number)

    def wait_restarted(self, task: str, old_pid: int, timeout_s: float) -> int:
        """Wait until a task runs with another process number than `old_pid`; return the number.

        Raises:
            StartupError: it was not replaced within `timeout_s`.
        """
        state = self._state(task)
        with self._changed:
            if not self._changed.wait_for(
                lambda: state.ready and state.pid != old_pid, timeout=timeout_s
            ):
                raise StartupError(f"{task} was not replaced within {timeout_s:g} s: {state!r}.")
            return state.pid

    def wait_ended(self, task: str, timeout_s: float) -> bool:
        """Wait until a task has ended for good; return False after the limit.

        Raises:
            ClusterError: it failed; its last lines of output are in the text.
        """
        state = self._state(task)
        with self._changed:
            if not self._changed.wait_for(
                lambda: state.ended and state.code is not None and state.code >= 0, timeout_s
            ):
                return False
            if state.code:
                raise ClusterError(f"{state!r}{state.last_lines()}")
            return True

    @override
    def close(self) -> None:
        """Stop every task. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.launcher.close()

    @override
    def __repr__(self) -> str:
        return ", ".join(map(repr, self._states.values()))

    def _await_start(self, deadline: float, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: all(state.ready or state.ended for state in self._states.values()),
                timeout=deadline - time.monotonic(),
            )
            missing = [state for state in self._states.values() if not state.ready]
        if missing:
            raise StartupError(
                f"the cluster could not start (limit {timeout_s:.3g} s): "
                + "; ".join(f"{state!r}{state.last_lines()}" for state in missing)
            )

    def _on_event(self, event: TaskEvent) -> None:
        try:
            self._handle(event)
        except Exception:  # noqa: BLE001 - the launcher's thread must survive an error here
            _log.exception("handling %r failed", event)

    def _handle(self, event: TaskEvent) -> None:
        """Update the table; replace a task that exited."""
        if event.kind != "lost" and event.task not in self._states:
            return  # of a task that was removed
        if event.kind == "output":
            state = self._states[event.task]
            state.lines = [*state.lines[1 - LINES_KEPT :], event.text]
            task = f"/job:{state.order.job}/task:{state.order.index}"
            logging.getLogger(f"stratagem.tasks.{task}").info("[%s] %s", task, event.text)
            return
        again: TaskOrder | None = None
        stop = False
        with self._changed:
            if event.kind == "lost":
                _log.error("%s, and the tasks with it", event.text)
                for state in self._states.values():
                    state.ready, state.ended = False, f"ended: {event.text}"
            elif event.kind == "exited" and self._states[event.task].removed:
                state = self._states.pop(event.task)
                state.ready, state.ended = False, event.text
            elif event.kind == "exited":
                self._states[event.task].code = event.code
                again = self._locked_exited(self._states[event.task], event.text)
            else:
                state = self._states[event.task]
                state.pid = event.pid
                if event.kind == "started":
                    state.ended, state.lines = "", []
                    state.incarnation += 1
                else:
                    state.address, state.ready = event.address, True
                    stop = state.removed  # while it was being replaced
            self._changed.notify_all()
        if again is not None:
            self.launcher.spawn(again)
        if stop:
            self.launcher.stop(event.task, signal.SIGKILL)

    def _locked_exited(self, state: _TaskState, how: str) -> TaskOrder | None:
        """Note and log the end of a task; return the order for its replacement."""
        was_ready, state.ready, state.ended = state.ready, False, how
        if self._closed:
            return None
        if state.order.ends and state.code == 0:
            return None
        metrics.event("task_ended", task=state.order.task, how=how)
        order = self._locked_replacement(state, was_ready=was_ready)
        then = "" if order is None else "; its replacement starts"
        _log.warning("%r%s%s", state, then, state.last_lines())
        return order

    def _locked_replacement(self, state: _TaskState, *, was_ready: bool) -> TaskOrder | None:
        """Return the order for the replacement of a task that ended; None if there is none."""
        # A task that was never ready would fail again: its address may be taken, or its imports broken.
        # Replace only a task that was ready, or one whose old address may become free.
        if state.order.job not in self._restart or not (was_ready or state.retries > 0):
            return None
        if state.order.ends and not (state.code is not None and state.code < 0):
            return None
        state.retries = RETRIES if was_ready else state.retries - 1
        return replace(state.order, address=state.address)

    def _state(self, task: str) -> _TaskState:
        state = self._states.get(task)
        if state is None:
            raise ValueError(f"there is no task {task!r}: expected one of {list(self._states)}.")
        return state


class _TaskState:
    """State of one task."""

    def __init__(self, order: TaskOrder) -> None:
        self.order = order
        self.address = ""
        self.pid = 0
        self.ready = False
        self.ended = ""
        self.code: int | None = None  # exit code, when it has ended
        self.removed = False  # not listed, not replaced; its process may be ending
        self.incarnation = 0
        self.retries = 0
        self.lines: list[str] = []

    def last_lines(self) -> str:
        return "".join(f"\n    {line}" for line in self.lines)

    @override
    def __repr__(self) -> str:
        how = "ready" if self.ready else self.ended or "starting"
        again = f", incarnation {self.incarnation}" if self.incarnation > 1 else ""
        return f"{self.order.task} {how} (pid {self.pid}{again}) at {self.address or '?'}"
