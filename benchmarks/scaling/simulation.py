"""Discrete-event simulation of hosts, processes and a network. Pure: simulated time only, no randomness.

A *process* does its work in order, on at most one core. A *host* divides its cores evenly among its processes that have work. A
*message* takes time on the links of both hosts, and a latency. Callers describe behaviour as functions that are called when work
or a message is done.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Done = Callable[[], None]


class Simulation:
    """Simulated time, and the events to come.

    Example:
        >>> simulation = Simulation()
        >>> simulation.after(2.0, lambda: print("at", simulation.now))
        >>> simulation.run(until_s=10.0)
        at 2.0
        >>> simulation.now
        10.0
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Done]] = []
        self._order = (
            itertools.count()
        )  # events of the same time happen in the order of their creation

    def after(self, delay_s: float, event: Done) -> None:
        """Call ``event`` after a delay."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def run(self, *, until_s: float) -> None:
        """Let all events happen up to a time."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until_s


@dataclass
class Link:
    """One direction of a host's network: messages pass one after another."""

    bytes_per_s: float
    free_at: float = 0.0
    busy_s: float = 0.0

    def reserve(self, earliest: float, size: float) -> float:
        """Return when a message that may begin at ``earliest`` has passed."""
        duration = size / self.bytes_per_s
        self.free_at = max(self.free_at, earliest) + duration
        self.busy_s += duration
        return self.free_at


class Host:
    """Machine with cores and a network connection.

    Args:
        cores: processes that run at full speed at the same time; at least one.
        bytes_per_s: speed of the network in each direction.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        cores: float,
        bytes_per_s: float = float("inf"),
    ) -> None:
        self.simulation = simulation
        self.cores = cores
        self.sending, self.receiving = Link(bytes_per_s), Link(bytes_per_s)
        self._running: dict[Process, float] = {}  # remaining seconds at full speed
        self._updated_at = 0.0
        self._plan = 0

    def start(self, process: Process, seconds: float) -> None:
        """Let a process run for this long, measured at full speed; the process is told at the end."""
        self._advance()
        self._running[process] = seconds
        self._replan()

    def _speed(self) -> float:
        return min(1.0, self.cores / len(self._running))

    def _advance(self) -> None:
        """Account for the time since the last change."""
        elapsed = self.simulation.now - self._updated_at
        self._updated_at = self.simulation.now
        if self._running and elapsed > 0:
            done = elapsed * self._speed()
            for process in self._running:
                self._running[process] -= done
                process.busy_s += done

    def _replan(self) -> None:
        """Plan the end of the process that ends first; a plan made before is void."""
        self._plan += 1
        if not self._running:
            return
        plan, process = self._plan, min(self._running, key=self._running.__getitem__)
        delay = max(0.0, self._running[process]) / self._speed()

        def end() -> None:
            if plan == self._plan:
                self._advance()
                del self._running[process]
                self._replan()
                process.ended()

        self.simulation.after(delay, end)


@dataclass(eq=False)
class Process:
    """Process of a host: does its work in order. ``busy_s`` is the processor time that it has used."""

    host: Host
    busy_s: float = 0.0
    _work: deque[tuple[float, Done]] = field(default_factory=deque)

    def work(self, seconds: float, done: Done) -> None:
        """Do work that takes this long on a core, after all earlier work; then call ``done``."""
        self._work.append((seconds, done))
        if len(self._work) == 1:
            self.host.start(self, seconds)

    def ended(self) -> None:
        """Finish the current work. The host calls."""
        _, done = self._work.popleft()
        if self._work:
            self.host.start(self, self._work[0][0])
        done()


def send(sender: Host, receiver: Host, size: float, latency_s: float, arrived: Done) -> None:
    """Send a message. Within a host it takes the latency only; the processes' work contains the copying."""
    simulation = sender.simulation
    if sender is receiver:
        simulation.after(latency_s, arrived)
        return
    sent_at = sender.sending.reserve(simulation.now, size)
    begun_at = sent_at - size / sender.sending.bytes_per_s
    received_at = receiver.receiving.reserve(begun_at, size)
    simulation.after(max(sent_at, received_at) - simulation.now + latency_s, arrived)
