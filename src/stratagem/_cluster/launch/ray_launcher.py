"""`RayLauncher`: starts tasks on the nodes of a Ray cluster, through one agent per node.

A task runs on the node where Ray has reserved its bundle (`ray_placement.py`). When a node is lost, Ray moves
the bundle, and the replacement of the task starts there. While no node has room, the order waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, final

from typing_extensions import override

from stratagem._cluster.launch.launcher import EventHandler, TaskEvent, TaskOrder
from stratagem._cluster.launch.ray_agent import CONCURRENT_CALLS, NodeAgent
from stratagem._owner import Owner

_log = logging.getLogger("stratagem.cluster")

TICK_S: Final = 0.2
"""How often the launcher looks for a node of waiting orders."""

POLL_S: Final = 5.0
"""How long an agent's call waits for events before it returns without any."""

AGAIN_S: Final = 1.0
"""Pause before a node gets another agent, or an unreachable agent another call."""

CLOSE_S: Final = 15.0
"""How long `close` waits for the agents, which kill their tasks in milliseconds."""


@dataclass(eq=False)
class _Agent:
    """One agent, and the tasks that it was told to start."""

    node: str
    handle: Any
    call: Any  # under way: `start` or `events`; None during a pause
    ready: bool = False
    next_event: int = 0
    again_at: float = 0.0
    tasks: set[str] = field(default_factory=set)
    orders: dict[Any, TaskOrder] = field(default_factory=dict)  # of calls of `spawn` under way


@final
class RayLauncher(Owner):
    """The agents of one cluster, and a thread that receives their events.

    Args:
        on_event: receives the events, on that thread.
        ray: the module, connected to a Ray cluster.
        node_of: returns the node of a task's bundle, or an empty text while it has none.
        on_gone: called with a task that was released and has ended.
        key: of the cluster.
        start_timeout_s: how long a fork server may take to start.
    """

    def __init__(
        self,
        on_event: EventHandler,
        *,
        ray: Any,
        node_of: Callable[[str], str],
        on_gone: Callable[[str], None],
        key: str,
        start_timeout_s: float,
    ) -> None:
        self._on_event = on_event
        self._ray = ray
        self._node_of = node_of
        self._on_gone = on_gone
        self._key = key
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._waiting: dict[str, TaskOrder] = {}
        self._released: set[str] = set()
        self._agents: dict[str, _Agent] = {}
        self._barred: dict[str, float] = {}  # nodes that get no agent before this time
        self._closing = threading.Event()
        self._actor = ray.remote(num_cpus=0, max_concurrency=CONCURRENT_CALLS)(NodeAgent)
        self._thread = threading.Thread(target=self._run, name="stratagem-ray-events", daemon=True)
        self._thread.start()

    def spawn(self, order: TaskOrder) -> None:
        """Start a task as soon as its bundle has a node."""
        with self._lock:
            if not self._closing.is_set():
                self._waiting[order.task] = order

    def stop(self, task: str, signal_number: int) -> None:
        """Send a signal to a task; do nothing if it is gone. A task that waits for a node is given up."""
        with self._lock:
            waited = self._waiting.pop(task, None)
            agent = next((one for one in self._agents.values() if task in one.tasks), None)
        if waited is not None:
            self._on_event(TaskEvent(kind="exited", task=task, text="given up before its start"))
        elif agent is not None and self._ray.is_initialized():
            agent.handle.stop.remote(task, signal_number)

    def release(self, task: str) -> None:
        """Call `on_gone` when the task has ended; it will not be started again."""
        with self._lock:
            self._released.add(task)

    @property
    def nodes(self) -> dict[str, str]:
        """Node of each task that runs."""
        with self._lock:
            return {task: one.node for one in self._agents.values() for task in one.tasks}

    @override
    def close(self) -> None:
        """Kill every task and agent; return when all are gone. May be called again."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self._waiting.clear()
        self._thread.join()  # it waits for at most TICK_S at a time
        if not self._ray.is_initialized():
            return  # Ray has ended the agents
        calls = [agent.handle.close.remote() for agent in self._agents.values()]
        if calls:
            _, late = self._ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S)
            if late:
                _log.warning("%d agents did not end in %g s: killed", len(late), CLOSE_S)
        for agent in self._agents.values():
            self._ray.kill(agent.handle)
        self._agents.clear()

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._ray.is_initialized():
                self._on_event(TaskEvent(kind="lost", text="this process has left the Ray cluster"))
                return
            try:
                self._turn()
            except Exception:  # noqa: BLE001 - this thread must survive an error of Ray
                if not self._closing.is_set() and self._ray.is_initialized():
                    _log.exception("talking to Ray failed")
                    self._closing.wait(AGAIN_S)

    def _turn(self) -> None:
        """Receive events for one tick, then start the waiting tasks that have a node."""
        now = time.monotonic()
        with self._lock:
            agents = list(self._agents.values())
        for agent in agents:
            if agent.call is None and now >= agent.again_at:
                agent.call = agent.handle.events.remote(agent.next_event, POLL_S)
        calls = {agent.call: agent for agent in agents if agent.call is not None}
        calls |= {call: agent for agent in agents for call in agent.orders}
        if calls:
            done, _ = self._ray.wait(list(calls), num_returns=1, timeout=TICK_S)
            for call in done:
                if call in calls[call].orders:
                    self._ordered(calls[call], call)
                else:
                    self._receive(calls[call])
        else:
            self._closing.wait(TICK_S)
        self._start_waiting()
        self._free_released()

    def _receive(self, agent: _Agent) -> None:
        errors = self._ray.exceptions
        try:
            result = self._ray.get(agent.call)
        except errors.ActorUnavailableError:
            # Ray cannot reach it at present, and will find out whether it is alive.
            agent.call, agent.again_at = None, time.monotonic() + AGAIN_S
        except errors.RayActorError as error:
            self._agent_gone(agent, str(error))
        except errors.RayTaskError as error:  # of `start`
            self._agent_failed(agent, str(error.cause))
        else:
            events: tuple[TaskEvent, ...] = ()
            if agent.ready:
                events, agent.next_event = result
            agent.ready = True
            agent.call = agent.handle.events.remote(agent.next_event, POLL_S)
            for event in events:
                self._handle(agent, event)

    def _ordered(self, agent: _Agent, call: Any) -> None:
        """Report a task that its agent could not start; usually events say what happens to it."""
        order = agent.orders.pop(call)
        task = order.task
        try:
            self._ray.get(call)
        except self._ray.exceptions.ActorUnavailableError:
            with self._lock:  # the order may not have arrived: repeat it
                agent.tasks.discard(task)
                self._waiting[task] = order
        except self._ray.exceptions.RayTaskError as error:
            with self._lock:
                agent.tasks.discard(task)
            text = f"not started: {error.cause}"
            self._on_event(TaskEvent(kind="exited", task=task, text=text))
        except self._ray.exceptions.RayActorError:
            pass  # `events` says so, too

    def _handle(self, agent: _Agent, event: TaskEvent) -> None:
        if event.kind == "lost":
            self._agent_gone(agent, event.text)
            return
        if event.kind == "exited":
            with self._lock:
                agent.tasks.discard(event.task)
        self._on_event(event)

    def _agent_gone(self, agent: _Agent, why: str) -> None:
        """Report the tasks of an agent whose process or node has ended."""
        _log.warning("the agent of Ray node %s is gone: %s", agent.node, _first_line(why))
        with self._lock:
            if self._agents.pop(agent.node, None) is None:
                return
            self._barred[agent.node] = time.monotonic() + AGAIN_S
            tasks = list(agent.tasks)
            starting = list(self._waiting)
        self._ray.kill(agent.handle)
        if not agent.ready:
            for task in starting:  # for the error if the cluster cannot start
                self._on_event(TaskEvent(kind="output", task=task, text=_first_line(why)))
        for task in tasks:
            text = f"lost with Ray node {agent.node}: {_first_line(why)}"
            self._on_event(TaskEvent(kind="exited", task=task, text=text))

    def _agent_failed(self, agent: _Agent, why: str) -> None:
        """Report the tasks of an agent that could not start its fork server."""
        with self._lock:
            self._agents.pop(agent.node, None)
            self._barred[agent.node] = time.monotonic() + AGAIN_S
            waiting = list(self._waiting)
        self._ray.kill(agent.handle)
        for task in waiting:
            if self._node_of(task) == agent.node:
                with self._lock:
                    self._waiting.pop(task, None)
                self._on_event(TaskEvent(kind="exited", task=task, text=f"not started: {why}"))

    def _start_waiting(self) -> None:
        with self._lock:
            waiting = dict(self._waiting)
        now = time.monotonic()
        for task, order in waiting.items():
            node = self._node_of(task)
            if not node or now < self._barred.get(node, 0.0):
                continue
            agent = self._agents.get(node) or self._start_agent(node)
            if not agent.ready:
                continue
            with self._lock:
                if self._waiting.pop(task, None) is None:
                    continue  # given up meanwhile
                agent.tasks.add(task)
            agent.orders[agent.handle.spawn.remote(order)] = order

    def _start_agent(self, node: str) -> _Agent:
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        where = affinity(node_id=node, soft=False)
        handle = self._actor.options(scheduling_strategy=where).remote(self._key)
        call = handle.start.remote(self._start_timeout_s)
        agent = _Agent(node, handle, call)
        with self._lock:
            self._agents[node] = agent
        return agent

    def _free_released(self) -> None:
        with self._lock:
            busy = {*self._waiting, *(task for one in self._agents.values() for task in one.tasks)}
            gone = self._released - busy
            self._released -= gone
        for task in gone:
            self._on_gone(task)

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closing.is_set() else f"{len(self._agents)} agents"
        return f"<RayLauncher [{state}, {len(self._waiting)} orders wait]>"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    with contextlib.suppress(StopIteration):
        return next(line for line in lines if "died because" in line or "Error" in line)
    return lines[0] if lines else "no reason given"
