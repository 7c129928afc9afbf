"""`NodeAgent`: the Ray actor that hosts a fork server on one node.

It runs in a process of Ray and imports neither torch nor the packages that need it, so it is small and up in
half a second. The fork server that it starts imports torch once for all tasks of the node::

    user's process ──actor calls──▶ agent (one per node) ──pipes──▶ fork server ──fork──▶ task, task, …

The agent ends with the user's process (Ray sees to it), with `close`, or with its node. The fork server ends
with the agent, and the tasks with the fork server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from stratagem._cluster.launch.fork_launcher import ForkLauncher
from stratagem._cluster.launch.launcher import TaskEvent, TaskOrder

CONCURRENT_CALLS = 4
"""Calls at a time: one waits for events; `spawn`, `stop` and `close` must not wait for it."""


@final
class NodeAgent:
    """Starts and stops the tasks of one node. `RayLauncher` makes it and calls its methods through Ray.

    Args:
        key: of the cluster. A constructor argument, because everybody who may look at a Ray job sees its
            runtime environment.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._host = ""
        self._launcher: ForkLauncher | None = None
        self._changed = threading.Condition()
        self._events: list[TaskEvent] = []
        self._first = 0  # number of the first event that is kept
        self._running: set[str] = set()
        self._closed = False

    def start(self, start_timeout_s: float) -> int:
        """Start the fork server; return the number of the agent's process.

        Raises:
            StartupError: the fork server did not start.
        """
        import ray

        self._host = ray.util.get_node_ip_address()
        self._launcher = ForkLauncher(self._note, start_timeout_s=start_timeout_s)
        return os.getpid()

    def spawn(self, order: TaskOrder) -> None:
        """Start a task, which listens on the address of this node at a free port.

        Do nothing if it runs: the launcher repeats an order when it does not know whether the order arrived.
        """
        with self._changed:
            if order.task in self._running:
                return
            self._running.add(order.task)
        host = f"[{self._host}]" if ":" in self._host else self._host
        if self._launcher is not None:
            self._launcher.spawn(replace(order, key=self._key, address=f"{host}:0"))

    def stop(self, task: str, signal_number: int) -> None:
        """Send a signal to a task; do nothing if it is gone."""
        if self._launcher is not None:
            self._launcher.stop(task, signal_number)

    def events(self, after: int, wait_s: float) -> tuple[Sequence[TaskEvent], int]:
        """Return the events from number `after` on, and the number of the next one; forget earlier ones.

        Wait for the first one, at most `wait_s`.
        """
        with self._changed:
            del self._events[: max(0, after - self._first)]
            self._first = max(self._first, after)
            self._changed.wait_for(lambda: self._events or self._closed, wait_s)
            return tuple(self._events), self._first + len(self._events)

    def close(self) -> None:
        """Kill every task of the node; return when they are gone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._launcher is not None:
            self._launcher.close()

    def _note(self, event: TaskEvent) -> None:
        with self._changed:
            if event.kind == "exited":
                self._running.discard(event.task)
            self._events.append(event)
            self._changed.notify_all()
