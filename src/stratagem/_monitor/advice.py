"""Find what limits the throughput of a cluster, and suggest a remedy.

Pure: a function of a `ClusterView`. Every rule compares measured figures with a limit that is named here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stratagem._monitor.cluster_view import ClusterView, ServerView, WorkerView

SERVER_BUSY: Final = 0.85
"""A server that works for this share of the time delays most requests."""

PROGRAM_BUSY: Final = 0.8
"""Share of one processor. Python runs one thread at a time, so that 1.0 is the most."""

FREQUENT: Final = 100.0
"""Closures per second that can keep the coordinator busy by their number."""

INPUT_WAIT: Final = 0.3
WORK_WAIT: Final = 0.3
OVERHEAD: Final = 0.4
READING: Final = 0.3
WRITING: Final = 0.35
COMPUTING: Final = 0.6
STARVED: Final = 0.4
"""Waiting for a processor, as a share of the time that threads could run."""

MEMORY: Final = 0.9
HOT: Final = 0.6
"""Share of all rows that one table delivers."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One finding and its remedy.

    Example:
        >>> str(Advice(kind="server busy", finding="server 1 is busy 96 %", remedy="add a server"))
        'server 1 is busy 96 %: add a server'
    """

    kind: str
    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.remedy}"


def advise(view: ClusterView) -> tuple[Advice, ...]:
    """Return what to change, the most urgent first; empty if nothing stands out.

    Example:
        >>> from stratagem._monitor.cluster_view import ServerView
        >>> busy = ServerView(name="ps 1", state="running", busy_share=0.96)
        >>> [str(one) for one in advise(ClusterView(time_s=0.0, servers=(busy,)))]
        ['server 1 is busy 96 %: add a server or use more shards']
    """
    found = [
        *_lost(view),
        *_not_finite(view),
        *_busy_servers(view),
        *_memory(view),
        *_input(view),
        *_work(view),
        *_processors(view),
        *_stragglers(view),
        *_writing(view),
        *_reading(view),
    ]
    if not any(one.kind == "processors" for one in found):
        found += _computing(view)
    return tuple(found)


def bottleneck(view: ClusterView) -> str:
    """Return the first finding, or a phrase that says that there is none."""
    advice = advise(view)
    if advice:
        return advice[0].finding
    return "nothing stands out" if view.phases else "not known yet"


def _lost(view: ClusterView) -> Iterator[Advice]:
    states = {one.state for one in view.workers} | {one.state for one in view.servers}
    if "wrong key" in states:
        yield Advice(
            kind="wrong key",
            finding="tasks run with another cluster key, or with certificates of another authority",
            remedy="set STRATAGEM_CLUSTER_KEY or STRATAGEM_CLUSTER_KEY_FILE (and STRATAGEM_TLS_CA) as for the tasks",
        )
    if "refused" in states:
        yield Advice(
            kind="refused",
            finding="tasks run another release of stratagem, or use TLS where this process does not",
            remedy="use the same release and the same STRATAGEM_TLS_ settings as the tasks",
        )
    for worker in view.workers:
        if worker.state in ("lost", "no answer"):
            yield Advice(
                kind="worker lost",
                finding=f"{worker.name} does not answer",
                remedy="its closures run on other workers; look at its log and its host",
            )
    for server in view.servers:
        if server.state in ("lost", "no answer"):
            yield Advice(
                kind="server lost",
                finding=f"{_called(server)} does not answer",
                remedy="training waits for it; look at its log and its host, and use checkpoints",
            )


def _not_finite(view: ClusterView) -> Iterator[Advice]:
    for scalar in view.scalars:
        if scalar.not_finite:
            yield Advice(
                kind="not finite",
                finding=f"{scalar.name} was NaN or infinite {scalar.not_finite} times",
                remedy="lower the learning rate, clip gradients, or look at the input",
            )


def _busy_servers(view: ClusterView) -> Iterator[Advice]:
    busy = [one for one in view.servers if (one.busy_share or 0.0) >= SERVER_BUSY]
    rest = [one.busy_share or 0.0 for one in view.servers if one not in busy]
    for server in busy:
        remedy = "add a server or use more shards"
        if rest and max(rest) < SERVER_BUSY / 2:
            remedy = "use more shards: the other servers have little to do"
        yield Advice(
            kind="server busy",
            finding=f"{_called(server)} is busy {_percent(server.busy_share)}",
            remedy=remedy,
        )


def _memory(view: ClusterView) -> Iterator[Advice]:
    for server in view.servers:
        if server.limit_bytes and server.held_bytes >= MEMORY * server.limit_bytes:
            share = server.held_bytes / server.limit_bytes
            yield Advice(
                kind="server memory",
                finding=f"{_called(server)} uses {_percent(share)} of its memory limit",
                remedy="add a server, or raise STRATAGEM_SERVER_MEMORY_BYTES",
            )


def _input(view: ClusterView) -> Iterator[Advice]:
    share = view.phases.get("waiting for input", 0.0)
    if share >= INPUT_WAIT:
        yield Advice(
            kind="input",
            finding=f"workers wait for input {_percent(share)} of the time",
            remedy="use num_parallel_calls and prefetch in the dataset, or faster storage",
        )


def _work(view: ClusterView) -> Iterator[Advice]:
    """Find workers that wait for closures, or spend their time on receiving and returning them."""
    idle, other = view.phases.get("waiting for work", 0.0), view.phases.get("other", 0.0)
    program = view.program
    busy = 0.0
    if program is not None:
        busy = (program.cpu_share or 0.0) + (program.starved_share or 0.0)
    frequent = (view.steps_per_s or 0.0) >= FREQUENT  # else the size of results keeps it busy
    if frequent and busy >= PROGRAM_BUSY and idle + other >= OVERHEAD:
        yield Advice(
            kind="coordinator saturated",
            finding=(
                f"coordinator saturated: its process uses {_percent(min(busy, 1.0))} of a processor, "
                f"and workers compute {_percent(view.phases.get('computing', 0.0))} of the time"
            ),
            remedy="schedule several steps per closure",
        )
    elif other >= OVERHEAD:
        yield Advice(
            kind="overhead",
            finding=(
                f"workers spend {_percent(other)} of the time receiving closures and returning results"
            ),
            remedy="schedule several steps per closure, or return smaller results",
        )
    elif idle >= WORK_WAIT:
        waits = f"workers wait for closures {_percent(idle)} of the time"
        if program is not None and program.queued == 0:
            remedy = (
                "schedule further ahead (fetch results later), or use fewer workers"
                if view.steps_per_s
                else "the program schedules nothing at the moment"
            )
        else:
            remedy = "schedule further ahead, or several steps per closure"
        yield Advice(kind="no work", finding=waits, remedy=remedy)


def _stragglers(view: ClusterView) -> Iterator[Advice]:
    for worker in view.workers:
        if worker.is_straggler:
            rates = [one.steps_per_s or 0.0 for one in view.workers if not one.is_straggler]
            usual = sum(rates) / len(rates) if rates else 0.0
            yield Advice(
                kind="straggler",
                finding=(
                    f"{worker.name} makes {worker.steps_per_s or 0.0:.3g} steps/s, the others "
                    f"{usual:.3g}"
                ),
                remedy=_straggler_remedy(worker),
            )


def _straggler_remedy(worker: WorkerView) -> str:
    phases = worker.phases
    longest = max(phases, key=phases.__getitem__) if phases else ""
    where = f"it spends most of its time {longest}; " if longest else ""
    return f"{where}look at its host, or remove it"


def _writing(view: ClusterView) -> Iterator[Advice]:
    share = view.phases.get("pushing", 0.0) + view.phases.get("waiting for acknowledgement", 0.0)
    if share >= WRITING:
        yield Advice(
            kind="writing",
            finding=f"workers push gradients and wait for servers {_percent(share)} of the time",
            remedy=(
                "use an optimizer that updates only the rows in use (SGD, Adagrad, SparseAdam), larger "
                "batches, or more servers"
            ),
        )


def _reading(view: ClusterView) -> Iterator[Advice]:
    share = view.phases.get("reading", 0.0)
    if share < READING:
        return
    finding = f"workers read rows and parameters {_percent(share)} of the time"
    remedy = "use fewer columns, or more servers"
    total = sum(table.rows_per_s for table in view.tables)
    hottest = view.tables[0] if view.tables else None
    if hottest is not None and total > 0 and hottest.rows_per_s >= HOT * total:
        finding += (
            f", {_percent(hottest.rows_per_s / total)} of the rows from the table {hottest.name!r}"
        )
        remedy = "divide that table into one shard per server, or use fewer columns in it"
    yield Advice(kind="reading", finding=finding, remedy=remedy)


def _processors(view: ClusterView) -> Iterator[Advice]:
    shares = [(one.cpu_share or 0.0, one.starved_share or 0.0) for one in view.workers]
    shares += [(one.cpu_share or 0.0, one.starved_share or 0.0) for one in view.servers]
    used, starved = sum(one for one, _ in shares), sum(one for _, one in shares)
    if starved > 0.5 and starved >= STARVED * (used + starved):
        yield Advice(
            kind="processors",
            finding=(
                f"the tasks wait for a processor {_percent(starved / (used + starved))} of the time that "
                "they could run"
            ),
            remedy="start fewer tasks or threads on each host, or use more hosts",
        )


def _computing(view: ClusterView) -> Iterator[Advice]:
    share = view.phases.get("computing", 0.0)
    if share >= COMPUTING:
        yield Advice(
            kind="computing",
            finding=f"workers compute {_percent(share)} of the time",
            remedy="add workers, or make the step cheaper",
        )


def _called(server: ServerView) -> str:
    """Return ``server 1`` for ``ps 1``."""
    return server.name.replace("ps ", "server ", 1)


def _percent(share: float | None) -> str:
    if share is None or math.isnan(share):
        return "?"
    return f"{100 * share:.0f} %"
