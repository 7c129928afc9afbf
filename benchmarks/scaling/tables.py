"""The tables of ``docs/scaling.md``, as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from benchmarks.scaling import plan
from benchmarks.scaling.cluster_model import Job, Prediction
from benchmarks.scaling.costs import MEGABYTE, Cost, Step
from benchmarks.scaling.findings import Findings

_UNITS = (
    ("closure", "closure: schedule it, send it, report its result"),
    ("step", "`optimizer.step()`, with its message to one server"),
    ("message", "message of a step to one more server"),
    ("tensor", "dense parameter"),
    ("megabyte", "MB of dense parameters: gradients there, SGD, over sockets values back"),
    ("table", "embedding table in a step, each server"),
    ("rows", "1,000 rows of 16 floats: lookup, gradient, Adagrad"),
)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|---" + "|--:" * (len(names) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def costs(found: Findings) -> str:
    """Return microseconds of processor time per unit, role and transport."""
    units = {name: found.units(name) for name in plan.TRANSPORTS}

    def cell(cost: Cost, role: str) -> str:
        return f"{1e6 * getattr(cost, role):,.0f}"

    roles = ("coordinator", "worker", "server")
    head = ["µs of processor time per"] + [
        f"{role}, {transport}" for transport in plan.TRANSPORTS for role in roles
    ]
    rows = [
        [title, *(cell(getattr(units[t], name), r) for t in plan.TRANSPORTS for r in roles)]
        for name, title in _UNITS
    ]
    idle_one, idle_many = found.idle["1"], found.idle["8"]
    each = {role: (idle_many[role] - idle_one[role]) / 7 for role in ("coordinator", "server")}
    idle = (
        f"Without any closure, each worker costs the coordinator {1e3 * each['coordinator']:.1f} ms and a server "
        f"{1e3 * max(0.0, each['server']):.1f} ms per second (heartbeats and their figures). A message takes "
        + " and ".join(f"{1e6 * found.latency_s(t):.0f} µs over {t}" for t in plan.TRANSPORTS)
        + " from the sender's call to the receiver's start. "
    )
    return table(head, rows) + "\n\n" + idle + origin(found)


def comparison(found: Findings) -> str:
    """Return measured and predicted rates, and the error of each prediction, in steps per second."""
    rows, errors = [], []
    for one in found.measured:
        predicted = found.predict(one).steps_per_s
        error = predicted / one.sample.steps_per_s - 1
        errors.append(abs(error))
        rows.append(
            [
                f"{one.step.name}, {one.transport}",
                str(one.workers),
                str(one.servers),
                f"{one.sample.steps_per_s:,.0f}",
                f"{predicted:,.0f}",
                f"{error:+.0%}",
                f"{one.sample.others:.1f}",
            ]
        )
    head = ("step", "workers", "servers", "measured", "predicted", "error", "cores used by others")
    summary = f"Error without its sign: median {statistics.median(errors):.0%}, largest {max(errors):.0%}. "
    return table(head, rows) + "\n\n" + summary + origin(found)


def capacities(found: Findings) -> str:
    """Return what coordinator, server and network can carry, over sockets."""
    units = found.units("sockets")
    rows = [
        [
            "coordinator",
            f"{1 / units.closure.coordinator:,.0f} closures/s, whatever a closure contains",
        ],
        [
            "server",
            (
                f"{1 / units.megabyte.server / 1e3:.1f} GB/s of dense parameters, or "
                f"{1e3 / units.rows.server / 1e6:.1f} million rows/s"
            ),
        ],
    ]
    for step in found.steps()[:2]:
        load = max(one.read_s + one.update_s for one in step.loads(units, 1))
        up = sum(one.read_up + one.update_up for one in step.loads(units, 1))
        rows.append([f"one server, {step.name} step", f"{1 / load:,.0f} steps/s"])
        rows.append(
            [
                f"25 Gbit/s of one server, {step.name} step ({up / MEGABYTE:.1f} MB to it)",
                f"{plan.HOSTS.bytes_per_s / up:,.0f} steps/s",
            ]
        )
    return table(("part", "carries"), rows)


def forecasts(found: Findings) -> Iterator[tuple[Step, tuple[int, int, int], Prediction, float]]:
    """Yield step, cluster, prediction and efficiency for clusters of real hosts."""
    units = found.units("sockets")
    for step in found.steps():
        alone = Job(step, units, plan.HOSTS, workers=1, servers=1).run().steps_per_s
        for cluster in plan.CLUSTERS:
            workers, servers, per_closure = cluster
            job = Job(
                step,
                units,
                plan.HOSTS,
                workers=workers,
                servers=servers,
                per_closure=per_closure,
            )
            predicted = job.run()
            yield step, cluster, predicted, predicted.steps_per_s / (alone * workers)


def predictions(found: Findings) -> str:
    """Return the forecasts as a table."""
    rows = []
    for step, cluster, predicted, efficiency in forecasts(found):
        workers, servers, per_closure = cluster
        rows.append(
            [
                step.name,
                f"{workers:,}",
                str(servers),
                str(per_closure),
                f"{predicted.steps_per_s:,.0f}",
                f"{efficiency:.0%}",
                predicted.bottleneck,
                " / ".join(
                    f"{part:.0%}"
                    for part in (
                        predicted.coordinator,
                        predicted.worker,
                        predicted.server,
                        predicted.link,
                    )
                ),
            ]
        )
    head = (
        "step",
        "workers",
        "servers",
        "steps per closure",
        "steps/s",
        "of ideal",
        "limited by",
        "busy: coordinator / worker / server / its network",
    )
    return table(head, rows)


def origin(found: Findings) -> str:
    """Return date and machine."""
    machine = found.machine
    return f"Measured {found.began[:10]} on {machine['cores']} cores ({machine['processor']}) with `python -m benchmarks.scaling`."
