"""``python -m benchmarks.scaling``: measure costs, compare the model with this machine, predict larger clusters.

Prints the tables, writes the measurements to ``benchmarks/results/`` and the tables into ``docs/scaling.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import report, runner
from benchmarks.scaling import plan, tables
from benchmarks.scaling.costs import Step
from benchmarks.scaling.findings import Findings, Measured
from benchmarks.scaling.measure import Bench

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "scaling.md"


def measure(
    *, seconds: float, samples: int, priority: bool, say: Callable[[str], None]
) -> Findings:
    """Measure everything that the plan names."""
    found = Findings(
        machine=runner.machine(), began=datetime.now(UTC).isoformat(timespec="seconds")
    )
    for transport, extra in plan.TRANSPORTS.items():
        found.probes[transport], found.plain[transport] = {}, {}
        for name, size in plan.PROBES.items():
            say(f"{transport}: probe {name!r}")
            with Bench(
                "scaling_probe",
                {**size, **extra},
                seconds=seconds,
                samples=samples,
                priority=priority,
            ) as bench:
                found.probes[transport][name] = bench.measure()
                found.plain[transport][name] = bench.facts["plain_s"]
                if name == "base" and transport == "sockets":
                    found.idle["1"] = bench.idle(seconds)
                    bench.resize(8)
                    found.idle["8"] = bench.idle(seconds)
    for name, work in plan.COMPARED.items():
        for transport, extra in plan.TRANSPORTS.items():
            for servers in plan.SERVERS:
                size = {
                    **work["size"],
                    **extra,
                    "workers": 1,
                    "servers": servers,
                    "shards": servers,
                }
                with Bench(
                    work["row"], size, seconds=seconds, samples=samples, priority=priority
                ) as bench:
                    facts = bench.facts
                    step = Step(
                        name=name,
                        compute_s=facts["plain_s"],
                        tensor_bytes=tuple(facts["tensor_bytes"]),
                        rows=facts["rows"],
                    )
                    for workers in plan.WORKERS:
                        say(f"{transport}: {name}, {workers} workers, {servers} servers")
                        bench.resize(workers)
                        found.measured.append(
                            Measured(
                                transport=transport,
                                step=step,
                                per_closure=size.get("per_closure", 1),
                                workers=workers,
                                servers=servers,
                                sample=bench.measure(),
                            )
                        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one sample")
    parser.add_argument(
        "--samples", type=int, default=3, help="samples, of which the fastest one counts"
    )
    parser.add_argument(
        "--priority",
        action="store_true",
        help="let the measured processes go before other programs of this machine (root only)",
    )
    parser.add_argument(
        "--from", dest="source", type=Path, help="use the measurements of this file"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=PAGE, help="page that gets the tables")
    given = parser.parse_args(arguments)
    if given.source is not None:
        found = Findings.from_json(json.loads(given.source.read_text()))
    else:
        found = measure(
            seconds=given.seconds,
            samples=given.samples,
            priority=given.priority,
            say=lambda words: print(words, file=sys.stderr, flush=True),
        )
        path = given.results / f"scaling-{found.began[:10]}-{found.machine['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found.to_json(), indent=1) + "\n")
        print(f"written: {path}")
    for make in (tables.costs, tables.comparison, tables.capacities, tables.predictions):
        text = make(found)
        print(f"\n{text}")
        if report.include(given.page, text, f"scaling-{make.__name__}"):
            print(f"\nput into {given.page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
