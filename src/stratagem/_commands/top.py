"""``stratagem top``: show the state of every task of a running cluster."""

from __future__ import annotations

import time

from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._commands.serve import cluster_from
from stratagem._demo.view import Picture, ServerRow, WorkerRow, open_view
from stratagem._wire import messages
from stratagem._wire.cluster_key import cluster_key
from stratagem._wire.connecting import connect
from stratagem._wire.round_trip import answer_limit_s
from stratagem.errors import WireError

__all__ = ["look", "watch"]


def watch(*, cluster: str | None, once: bool, interval_s: float) -> int:
    """Show the cluster until Ctrl-C; return 1 if no task answers at first."""
    if not interval_s > 0:
        raise ValueError(f"--interval {interval_s!r}: expected a positive number of seconds")
    spec = ClusterSpec(cluster_from(cluster))
    began = time.monotonic()
    first = look(spec, elapsed_s=0.0)
    states = [row.state for row in first.workers] + [row.state for row in first.servers]
    with open_view() as view:
        view.show(first)
        if once or all(state == "no answer" for state in states):
            return int(all(state == "no answer" for state in states))
        while True:
            time.sleep(interval_s)
            view.show(look(spec, elapsed_s=time.monotonic() - began))


def look(spec: ClusterSpec, *, elapsed_s: float) -> Picture:
    """Return a picture of the cluster now; it also shows tasks that do not answer."""
    workers = [
        _worker(index, spec.task_address("worker", index)) for index in _indices(spec, "worker")
    ]
    servers = [_server(index, spec.task_address("ps", index)) for index in _indices(spec, "ps")]
    return Picture(
        title="stratagem top",
        done_steps=sum(row.steps for row in workers),
        total_steps=0,
        elapsed_s=elapsed_s,
        examples_per_s=None,
        workers=workers,
        servers=servers,
    )


def _indices(spec: ClusterSpec, job: str) -> list[int]:
    return list(spec.task_indices(job)) if job in spec.jobs else []


def _ask(address: str, *, greet: bool) -> dict[str, object] | None:
    """Return the figures that a task reports, or None if it does not answer."""
    try:
        with connect(address, key=cluster_key()) as channel:
            limit_s = channel.round_trip.limit_s(answer_limit_s())
            if greet:  # a parameter server expects a first message with the connection's purpose
                channel.request(messages.Hello(purpose="control"), timeout_s=limit_s)
            reply = channel.request(messages.AskStats(), timeout_s=limit_s).message
    except WireError:
        return None
    return dict(reply.facts) if isinstance(reply, messages.Stats) else None


def _number(facts: dict[str, object], name: str) -> int:
    value = facts.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


def _worker(index: int, address: str) -> WorkerRow:
    facts = _ask(address, greet=False)
    if facts is None:
        return WorkerRow(name=f"worker {index}", state="no answer", steps=0)
    return WorkerRow(
        name=f"worker {index}",
        state=str(facts.get("state", "running")),
        steps=_number(facts, "steps"),
        restarts=max(0, _number(facts, "incarnation") - 1),
    )


def _server(index: int, address: str) -> ServerRow:
    facts = _ask(address, greet=True)
    if facts is None:
        return ServerRow(name=f"ps {index}", state="no answer", held_bytes=0, updates=0)
    return ServerRow(
        name=f"ps {index}",
        state="running",
        held_bytes=_number(facts, "bytes"),
        updates=_number(facts, "applied"),
    )
