"""Measure the parameter-server rows between hosts in network namespaces, with delay and limited rates.

``python -m benchmarks.namespaces`` makes the hosts, measures, removes the hosts, and puts its table into docs/performance.md (root
only). ``--from FILE`` makes the table again.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.hosts import Hosts, Link, missing
from benchmarks.row import Row, tiny
from benchmarks.runner import CHECK_TIMEOUT_S, SAMPLE_TIMEOUT_S, SETUP_TIMEOUT_S, machine
from benchmarks.scaling.measure import busy_seconds
from benchmarks.sides import ROOT, SideProcess

LINKS = (
    Link(name="not limited"),
    Link(name="10 Gbit/s, 1 ms", gigabits=10, round_trip_s=1e-3),
    Link(name="1 Gbit/s, 1 ms", gigabits=1, round_trip_s=1e-3),
)
ROWS = ("empty", "mlp", "embedding", "read", "add")
PORT = 2222
TASKS = {"worker": ("worker0", "worker1"), "ps": ("ps0", "ps1")}
CHIEF = "chief"
CLOSE_LIMIT_S = 10.0
# A link or the processors count as the bound from these shares on: queues never fill them completely.
FULL_LINK, FULL_PROCESSORS = 0.75, 0.85


@dataclass(kw_only=True)
class Found:
    """Figures of one row over one link: medians over the samples."""

    row: str
    title: str
    unit: str
    link: str
    value: float
    spread: float
    steps_per_s: float
    bytes_per_step: float
    #: processor milliseconds per step of coordinator, workers, servers, and of the switch that makes the delay
    processor_ms: dict[str, float]
    #: of the busiest direction of a host's link
    link_share: float
    #: of all cores, with the switch
    processor_share: float
    #: of all cores, with all programs of this machine
    busy_share: float

    @property
    def bound(self) -> str:
        """The resource that limits the rate."""
        if self.link_share >= FULL_LINK:
            return "bandwidth"
        if self.busy_share < FULL_PROCESSORS:
            return "latency"
        return "processor" if self.processor_share >= self.busy_share / 2 else "other programs"


@dataclass(kw_only=True)
class Findings:
    """A run."""

    machine: dict[str, Any]
    began: str
    #: of each link: round trip of a byte in seconds, and 10**9 bits per second of one TCP connection
    links: dict[str, tuple[float, float]] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Findings:
        """Return the findings that ``asdict`` described."""
        links = {name: (float(pair[0]), float(pair[1])) for name, pair in data["links"].items()}
        return cls(
            machine=data["machine"],
            began=data["began"],
            links=links,
            found=[Found(**one) for one in data["found"]],
        )


def measure(chosen: Sequence[Row], *, seconds: float, repetitions: int) -> Findings:
    """Make hosts, measure the rows over every link, and remove the hosts."""
    findings = Findings(machine=machine(), began=datetime.now(UTC).isoformat(timespec="seconds"))
    with Hosts([CHIEF, *(name for names in TASKS.values() for name in names)]) as hosts:
        for link in LINKS:
            hosts.set_link(link)
            one, other = TASKS["ps"][0], TASKS["worker"][0]
            round_trip = hosts.round_trip_s(one, other)
            findings.links[link.name] = (round_trip, hosts.stream_gigabits(one, other, seconds))
            say(f"{link.name}: round trip {1e3 * round_trip:.2f} ms", findings.links[link.name][1])
        for row in chosen:
            hosts.set_link(LINKS[0])
            with ExitStack() as stack:
                side = _start(hosts, row, stack)
                findings.found += _measure_row(hosts, row, side, seconds, repetitions)
    return findings


def say(*words: object) -> None:
    """Tell how far the run is."""
    print(*words, file=sys.stderr, flush=True)


def _start(hosts: Hosts, row: Row, stack: ExitStack) -> SideProcess:
    """Start servers, workers and the coordinator, each on its host."""
    key = secrets.token_hex(24)
    addresses = {
        job: [f"{hosts.addresses[name]}:{PORT}" for name in names] for job, names in TASKS.items()
    }
    environment = {
        **os.environ,
        "STRATAGEM_CLUSTER_KEY": key,
        "STRATAGEM_SHARED_MEMORY": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    pids: dict[str, list[int]] = {}
    for job, names in TASKS.items():
        for index, name in enumerate(names):
            words = f"-m stratagem server --job {job} --index {index} --cluster".split()
            task = subprocess.Popen(
                [*hosts.prefix(name), sys.executable, *words, json.dumps(addresses)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(_end, task)
            pids.setdefault(job, []).append(task.pid)
    for names in TASKS.values():
        for name in names:
            hosts.wait_for(name, PORT)
    side = SideProcess("ours", prefix=hosts.prefix(CHIEF))
    stack.callback(side.close)
    size = {**row.points[0].size, "addresses": addresses, "key": key, "pids": pids}
    side.ask("setup", timeout_s=SETUP_TIMEOUT_S, row=row.name, size=size)
    facts = side.ask("check", timeout_s=CHECK_TIMEOUT_S)
    if "loss_after" in facts and not facts["loss_after"] < facts["loss_before"]:
        raise RuntimeError(f"{row.name}: the loss does not fall: {facts}")
    return side


def _end(task: subprocess.Popen[bytes]) -> None:
    """End a task and its children."""
    try:
        os.killpg(task.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    task.wait(CLOSE_LIMIT_S)


def _measure_row(
    hosts: Hosts,
    row: Row,
    side: SideProcess,
    seconds: float,
    repetitions: int,
) -> list[Found]:
    samples: dict[str, list[Found]] = {link.name: [] for link in LINKS}
    for _ in range(repetitions):
        for link in LINKS:
            hosts.set_link(link)
            side.ask(
                "sample", timeout_s=SAMPLE_TIMEOUT_S, seconds=seconds / 10
            )  # its rate is another
            samples[link.name].append(_sample(hosts, row, side, link, seconds))
    return [_median(found) for found in samples.values()]


def _sample(hosts: Hosts, row: Row, side: SideProcess, link: Link, seconds: float) -> Found:
    traffic, used, busy = hosts.traffic(), _processor(hosts, side), busy_seconds()
    answer = side.ask("sample", timeout_s=SAMPLE_TIMEOUT_S, seconds=seconds)
    busy, after = busy_seconds() - busy, hosts.traffic()
    spent = {role: value - used[role] for role, value in _processor(hosts, side).items()}
    steps, taken = answer["steps"], answer["seconds"]
    moved = {
        name: [b - a for a, b in zip(traffic[name], after[name], strict=True)] for name in after
    }
    busiest = max(max(pair) for pair in moved.values())
    found = Found(
        row=row.name,
        title=row.title.removeprefix("over sockets: "),
        unit=row.unit,
        link=link.name,
        value=answer["value"],
        spread=0.0,
        steps_per_s=steps / taken,
        bytes_per_step=sum(sent for sent, _ in moved.values()) / steps,
        processor_ms={role: 1e3 * value / steps for role, value in spent.items()},
        # Without a rate, the processors are the link.
        link_share=busiest * 8 / taken / (link.gigabits * 1e9) if link.gigabits else 0.0,
        processor_share=sum(spent.values()) / taken / (os.cpu_count() or 1),
        busy_share=busy / taken / (os.cpu_count() or 1),
    )
    say(f"{row.name}, {link.name}: {found.value:.4g} {row.unit}, {found.bound}")
    return found


def _processor(hosts: Hosts, side: SideProcess) -> dict[str, float]:
    roles = {"main": 0.0, "worker": 0.0, "ps": 0.0, "switch": 0.0}
    for name, used in side.processor_seconds().items():
        roles[name.partition(" ")[0]] += used
    pid = hosts.switch_pid()
    if pid is not None:
        roles["switch"] = time.clock_gettime((~pid << 3) | 2)
    return roles


def _median(samples: Sequence[Found]) -> Found:
    values = [one.value for one in samples]
    middle = statistics.median(values)
    return Found(
        row=samples[0].row,
        title=samples[0].title,
        unit=samples[0].unit,
        link=samples[0].link,
        value=middle,
        spread=(max(values) - min(values)) / 2 / middle,
        steps_per_s=statistics.median(one.steps_per_s for one in samples),
        bytes_per_step=statistics.median(one.bytes_per_step for one in samples),
        processor_ms={
            role: statistics.median(one.processor_ms[role] for one in samples)
            for role in samples[0].processor_ms
        },
        link_share=statistics.median(one.link_share for one in samples),
        processor_share=statistics.median(one.processor_share for one in samples),
        busy_share=statistics.median(one.busy_share for one in samples),
    )


def table(findings: Findings) -> str:
    """Return the table of a run."""
    head = (
        "work",
        "link",
        "value",
        "steps/s",
        "bytes per step",
        "coordinator / workers / servers (ms)",
        "busiest link",
        "processors",
        "limited by",
    )
    body = [
        (
            f"{one.title} ({one.unit})",
            one.link,
            f"{report.number(one.value)} ±{one.spread:.0%}",
            report.number(one.steps_per_s),
            report.number(one.bytes_per_step),
            " / ".join(report.number(one.processor_ms[role]) for role in ("main", "worker", "ps")),
            f"{one.link_share:.0%}" if one.link_share else "–",
            f"{one.processor_share:.0%}",
            one.bound,
        )
        for one in findings.found
    ]
    links = "; ".join(
        f"*{name}*: {1e3 * round_trip:.2f} ms and {gigabits:.1f} Gbit/s"
        for name, (round_trip, gigabits) in findings.links.items()
    )
    words = (
        f"Round trip of a byte and rate of one plain TCP connection over each link, measured in the same run: {links}. "
        "*Busiest link*: the busier direction of the busiest host's link, as a part of its rate. *Processors*: of all cores, with the process that delays packets. *Other programs*: they used the cores, and the row says nothing. "
        f"{report.when_on(findings.machine, findings.began[:10])}"
    )
    return f"{report.markdown_table(head, body, left=2)}\n\n{words}"


def choose(names: Sequence[str]) -> list[Row]:
    """Return the socket rows of these names."""
    known = {row.name.removesuffix("_sockets"): row for row in rows.TABLE if "_sockets" in row.name}
    return [known[name] for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.namespaces", description=__doc__)
    parser.add_argument("--only", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one sample")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: tries the machinery only")
    parser.add_argument(
        "--from", dest="source", type=Path, help="make the table of this file again"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    given = parser.parse_args(arguments)
    if given.source is not None:
        findings = Findings.from_json(json.loads(given.source.read_text()))
    else:
        reason = missing()
        if reason is not None:
            parser.error(f"hosts cannot be made: {reason}")
        # As Ctrl-C: the hosts must go with the process.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        chosen = choose(given.only.split(","))
        if given.tiny:
            chosen = [tiny(row) for row in chosen]
        findings = measure(chosen, seconds=given.seconds, repetitions=given.repetitions)
        name = f"namespaces-{findings.began[:10]}-{findings.machine['name']}.json"
        given.results.mkdir(parents=True, exist_ok=True)
        (given.results / name).write_text(json.dumps(asdict(findings), indent=1) + "\n")
    text = table(findings)
    print(text)
    if report.include(given.page, text, "namespaces"):
        print(f"\nput into {given.page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
