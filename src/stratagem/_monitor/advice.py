"""Find what limits the throughput of a cluster, and suggest a remedy.

Pure: a function of a `ClusterView`. Every rule compares measured figures with a limit that is named here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from stratagem._monitor.cluster_view import ClusterView, ServerView
from stratagem._monitor.view_tables import share

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


class Advice(NamedTuple):
    """One finding and its remedy.

    Example:
        >>> str(Advice("server busy", "server 1 is busy 96 %", "add a server"))
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
    rules = _lost, _not_finite, _servers, _input, _work, _processors, _stragglers, _phases
    found = [one for rule in rules for one in rule(view)]
    if any(one.kind == "processors" for one in found):  # they compute longer because they wait
        found = [one for one in found if one.kind != "computing"]
    return tuple(found)


def bottleneck(view: ClusterView) -> str:
    """Return the first finding, or a phrase that says that there is none."""
    advice = advise(view)
    if advice:
        return advice[0].finding
    return "nothing stands out" if view.phases else "not known yet"


def _lost(view: ClusterView) -> Iterator[Advice]:
    states = {one.state for one in view.tasks}
    if "wrong key" in states:
        yield Advice(
            "wrong key",
            "tasks run with another cluster key, or with certificates of another authority",
            "set STRATAGEM_CLUSTER_KEY or STRATAGEM_CLUSTER_KEY_FILE (and STRATAGEM_TLS_CA) as for the tasks",
        )
    if "refused" in states:
        yield Advice(
            "refused",
            "tasks run another release of stratagem, or use TLS where this process does not",
            "use the same release and the same STRATAGEM_TLS_ settings as the tasks",
        )
    for worker in view.workers:
        if worker.state in ("lost", "no answer"):
            remedy = "its closures run on other workers; look at its log and its host"
            yield Advice("worker lost", f"{worker.name} does not answer", remedy)
    for server in view.servers:
        if server.state in ("lost", "no answer"):
            remedy = "training waits for it; look at its log and its host, and use checkpoints"
            yield Advice("server lost", f"{_called(server)} does not answer", remedy)


def _not_finite(view: ClusterView) -> Iterator[Advice]:
    for scalar in view.scalars:
        if scalar.not_finite:
            finding = f"{scalar.name} was NaN or infinite {scalar.not_finite} times"
            remedy = "lower the learning rate, clip gradients, or look at the input"
            yield Advice("not finite", finding, remedy)


def _servers(view: ClusterView) -> Iterator[Advice]:
    busy = [one for one in view.servers if (one.busy_share or 0.0) >= SERVER_BUSY]
    rest = [one.busy_share or 0.0 for one in view.servers if one not in busy]
    remedy = "add a server or use more shards"
    if rest and max(rest) < SERVER_BUSY / 2:
        remedy = "use more shards: the other servers have little to do"
    for one in busy:
        yield Advice("server busy", f"{_called(one)} is busy {share(one.busy_share)}", remedy)
    for one in view.servers:
        if one.limit_bytes and one.held_bytes >= MEMORY * one.limit_bytes:
            used = share(one.held_bytes / one.limit_bytes)
            finding = f"{_called(one)} uses {used} of its memory limit"
            remedy = "add a server, or raise STRATAGEM_SERVER_MEMORY_BYTES"
            yield Advice("server memory", finding, remedy)


def _input(view: ClusterView) -> Iterator[Advice]:
    part = view.phases.get("waiting for input", 0.0)
    if part >= INPUT_WAIT:
        finding = f"workers wait for input {share(part)} of the time"
        remedy = "use num_parallel_calls and prefetch in the dataset, or faster storage"
        yield Advice("input", finding, remedy)


def _work(view: ClusterView) -> Iterator[Advice]:
    """Find workers that wait for closures, or spend their time on receiving and returning them."""
    idle, other = view.phases.get("waiting for work", 0.0), view.phases.get("other", 0.0)
    program = view.program
    busy = 0.0
    if program is not None:
        busy = (program.cpu_share or 0.0) + (program.starved_share or 0.0)
    frequent = (view.steps_per_s or 0.0) >= FREQUENT  # else the size of results keeps it busy
    if frequent and busy >= PROGRAM_BUSY and idle + other >= OVERHEAD:
        computing = share(view.phases.get("computing", 0.0))
        yield Advice(
            "coordinator saturated",
            f"coordinator saturated: its process uses {share(min(busy, 1.0))} of a processor, and workers "
            f"compute {computing} of the time",
            "schedule several steps per closure",
        )
    elif other >= OVERHEAD:
        yield Advice(
            "overhead",
            f"workers spend {share(other)} of the time receiving closures and returning results",
            "schedule several steps per closure, or return smaller results",
        )
    elif idle >= WORK_WAIT:
        remedy = "schedule further ahead, or several steps per closure"
        if program is not None and program.queued == 0:
            remedy = "the program schedules nothing at the moment"
            if view.steps_per_s:
                remedy = "schedule further ahead (fetch results later), or use fewer workers"
        yield Advice("no work", f"workers wait for closures {share(idle)} of the time", remedy)


def _processors(view: ClusterView) -> Iterator[Advice]:
    used = sum(one.cpu_share or 0.0 for one in view.tasks)
    starved = sum(one.starved_share or 0.0 for one in view.tasks)
    if starved > 0.5 and starved >= STARVED * (used + starved):
        part = share(starved / (used + starved))
        finding = f"the tasks wait for a processor {part} of the time that they could run"
        remedy = "start fewer tasks or threads on each host, or use more hosts"
        yield Advice("processors", finding, remedy)


def _stragglers(view: ClusterView) -> Iterator[Advice]:
    rates = [one.steps_per_s or 0.0 for one in view.workers if not one.is_straggler]
    usual = sum(rates) / len(rates) if rates else 0.0
    for worker in view.workers:
        if worker.is_straggler:
            own = worker.steps_per_s or 0.0
            finding = f"{worker.name} makes {own:.3g} steps/s, the others {usual:.3g}"
            phases = worker.phases
            longest = max(phases, key=phases.__getitem__) if phases else ""
            where = f"it spends most of its time {longest}; " if longest else ""
            yield Advice("straggler", finding, f"{where}look at its host, or remove it")


def _phases(view: ClusterView) -> Iterator[Advice]:
    """Find what takes most of the workers' time: writes, reads, or the computation."""
    phases = view.phases
    writing = phases.get("pushing", 0.0) + phases.get("waiting for acknowledgement", 0.0)
    if writing >= WRITING:
        yield Advice(
            "writing",
            f"workers push gradients and wait for servers {share(writing)} of the time",
            "use an optimizer that updates only the rows in use (SGD, Adagrad, SparseAdam), larger batches, or "
            "more servers",
        )
    reading = phases.get("reading", 0.0)
    if reading >= READING:
        finding = f"workers read rows and parameters {share(reading)} of the time"
        remedy = "use fewer columns, or more servers"
        total = sum(table.rows_per_s for table in view.tables)
        hottest = view.tables[0] if view.tables else None
        if hottest is not None and total > 0 and hottest.rows_per_s >= HOT * total:
            part = share(hottest.rows_per_s / total)
            finding += f", {part} of the rows from the table {hottest.name!r}"
            remedy = "divide that table into one shard per server, or use fewer columns in it"
        yield Advice("reading", finding, remedy)
    computing = phases.get("computing", 0.0)
    if computing >= COMPUTING:
        finding = f"workers compute {share(computing)} of the time"
        yield Advice("computing", finding, "add workers, or make the step cheaper")


def _called(server: ServerView) -> str:
    """Return ``server 1`` for ``ps 1``."""
    return server.name.replace("ps ", "server ", 1)
