"""The model of larger clusters: simulated hosts, costs of units, jobs, and the tables made from a run (issue 14.7)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling import __main__ as command
from benchmarks.scaling import plan, tables
from benchmarks.scaling.cluster_model import Job, Machines
from benchmarks.scaling.costs import Cost, Step, UnitCosts, unit_costs
from benchmarks.scaling.findings import Findings, Measured, Sample
from benchmarks.scaling.measure import Bench, by_role
from benchmarks.scaling.simulation import Host, Process, Simulation, send

UNITS = UnitCosts(
    closure=Cost(coordinator=2e-4, worker=1e-4),
    step=Cost(worker=2e-4, server=1e-4),
    message=Cost(worker=5e-5, server=8e-5),
    tensor=Cost(worker=1e-5, server=1e-5),
    megabyte=Cost(worker=3e-4, server=2e-4),
    table=Cost(worker=3e-4, server=2e-4),
    rows=Cost(worker=1e-4, server=1e-4),
)
DENSE = Step(name="dense", compute_s=2e-3, tensor_bytes=(1_000_000,))
ROWS = Step(name="rows", compute_s=2e-3, tensor_bytes=(4096,), rows=10_000)
HERE = Machines(shared=True, cores=2, latency_s=0.0, sockets=True)
APART = Machines(shared=False, cores=2, latency_s=0.0, sockets=True)


def test_two_processes_run_at_full_speed_on_two_cores_and_three_share_them():
    simulation = Simulation()
    host = Host(simulation, cores=2)
    ended: list[tuple[str, float]] = []
    for name in "abc":
        Process(host).work(1.0, lambda name=name: ended.append((name, simulation.now)))
    late = Process(host)
    simulation.after(0.75, lambda: late.work(0.25, lambda: ended.append(("late", simulation.now))))
    simulation.run(until_s=10.0)
    # Three at 2/3 of a core have 0.5 s left at 0.75. Then four at 1/2: the late one ends after 0.5 s, with 0.25 s left for the others.
    assert [name for name, _ in ended] == ["late", "a", "b", "c"]
    assert dict(ended)["late"] == pytest.approx(1.25)
    assert dict(ended)["c"] == pytest.approx(1.25 + 0.25 * 3 / 2)
    assert late.busy_s == pytest.approx(0.25)


def test_a_process_does_its_work_in_order_on_one_core():
    simulation = Simulation()
    process = Process(Host(simulation, cores=8))
    ended: list[float] = []
    process.work(1.0, lambda: ended.append(simulation.now))
    process.work(2.0, lambda: ended.append(simulation.now))
    simulation.run(until_s=10.0)
    assert ended == [1.0, 3.0]


def test_messages_share_the_link_of_their_receiver():
    """Two hosts send a megabyte each at the same time: the second has arrived after both have passed the receiver's link."""
    simulation = Simulation()
    hosts = [Host(simulation, cores=1, bytes_per_s=1e6) for _ in range(3)]
    arrived: list[float] = []
    for sender in hosts[:2]:
        send(sender, hosts[2], 1e6, 0.5, lambda: arrived.append(simulation.now))
    send(hosts[2], hosts[2], 1e6, 0.5, lambda: arrived.append(simulation.now))
    simulation.run(until_s=10.0)
    assert arrived == [0.5, 1.5, 2.5]


def test_one_worker_takes_the_sum_of_its_parts():
    predicted = Job(DENSE, UNITS, APART, workers=1, servers=1).run()
    worker_s = 1e-4 + 2e-3 + 2e-4 + 1e-5 + 3e-4
    server_s = 1e-4 + 1e-5 + 2e-4
    assert predicted.steps_per_s == pytest.approx(1 / (worker_s + server_s), rel=0.05)
    assert predicted.server == pytest.approx(server_s / (worker_s + server_s), rel=0.05)


def test_many_workers_on_two_cores_are_limited_by_their_processor_time():
    predicted = Job(DENSE, UNITS, HERE, workers=8, servers=1).run()
    total_s = 2e-4 + (1e-4 + 2e-3 + 2e-4 + 1e-5 + 3e-4) + (1e-4 + 1e-5 + 2e-4)
    assert predicted.steps_per_s == pytest.approx(2 / total_s, rel=0.05)


@pytest.mark.parametrize(
    ("step", "servers", "network", "limit", "rate"),
    [
        (DENSE, 1, float("inf"), "servers", 1 / 3.1e-4),
        (replace(DENSE, tensor_bytes=(500,)), 1, float("inf"), "coordinator", 5e3),
        (DENSE, 1, 1e9, "network of the servers", 1e3),
        (replace(DENSE, compute_s=1.0), 1, float("inf"), "workers", 100 / 1.00092),
    ],
)
def test_a_hundred_workers_are_limited_by_the_busiest_part(step, servers, network, limit, rate):
    machines = replace(APART, bytes_per_s=network)
    predicted = Job(step, UNITS, machines, workers=100, servers=servers).run()
    assert predicted.bottleneck == limit
    assert predicted.steps_per_s == pytest.approx(rate, rel=0.06)


def test_more_servers_and_several_steps_per_closure_raise_the_limit():
    def rate(step: Step, servers: int, per_closure: int) -> float:
        job = Job(step, UNITS, APART, workers=100, servers=servers, per_closure=per_closure)
        return job.run().steps_per_s

    assert rate(ROWS, 8, 1) > 2 * rate(ROWS, 1, 1)  # rows are divided among all servers
    assert rate(DENSE, 8, 1) == pytest.approx(rate(DENSE, 1, 1))  # one tensor has one server
    small = replace(DENSE, tensor_bytes=(500,))
    assert rate(small, 1, 8) > 1.5 * rate(small, 1, 1)  # the coordinator is the limit


def test_rows_over_sockets_are_asked_for_before_the_computation():
    sockets = Job(ROWS, UNITS, replace(APART, latency_s=1e-3), workers=1, servers=1).run()
    shared = replace(APART, latency_s=1e-3, sockets=False)
    memory = Job(ROWS, UNITS, shared, workers=1, servers=1).run()
    assert 1 / sockets.steps_per_s == pytest.approx(1 / memory.steps_per_s + 2e-3, rel=0.03)


def test_unit_costs_are_found_again_in_the_probes_made_of_them():
    """Probes whose costs are sums of known units give back these units."""
    probes = {}
    for name, size in plan.PROBES.items():
        count = size["tensors"]
        step = Step(
            name=name,
            compute_s=0.0,
            tensor_bytes=(size["tensor_bytes"],) * count,
            rows=size["rows"],
        )
        units = replace(UNITS, megabyte=Cost(worker=3e-4, server=2e-4))
        loads = step.loads(units, size["servers"])
        cost = Cost(
            worker=step.worker_s(units, size["servers"]),
            server=sum(load.read_s + load.update_s for load in loads),
        )
        probes[name] = cost + units.closure * (1 / size.get("per_closure", 1))
    found = unit_costs(probes)
    for name in ("closure", "step", "message", "tensor", "megabyte", "table", "rows"):
        for role in ("coordinator", "worker", "server"):
            expected = getattr(getattr(UNITS, name), role)
            # A probe has 4 kB of parameters beside its unit.
            assert getattr(getattr(found, name), role) == pytest.approx(expected, rel=0.1, abs=3e-6)


def test_processes_are_summed_by_role():
    used = {"main": 1.0, "worker 0": 2.0, "worker 1": 3.0, "ps 0": 4.0}
    assert by_role(used) == Cost(coordinator=1.0, worker=5.0, server=4.0)


def findings() -> Findings:
    """A run whose measurements are what the model predicts, but for one that is half of it."""
    found = Findings(
        machine={"cores": 2, "processor": "test", "name": "x"}, began="2026-01-02T03:04:05"
    )
    for transport in plan.TRANSPORTS:
        found.plain[transport] = dict.fromkeys(plan.PROBES, 1e-4)
        found.probes[transport] = {
            name: Sample(
                steps_per_s=1000 * size.get("per_closure", 1),
                cost=Cost(coordinator=1e-4, worker=3e-4, server=1e-4)
                + Cost(worker=1e-4, server=1e-4) * (size["rows"] / 1e3)
                + Cost(worker=1e-5, server=1e-5) * size["tensors"]
                + Cost(worker=1e-4, server=1e-4) * (size["tensor_bytes"] / 1e6)
                - Cost(coordinator=8e-5, worker=5e-5) * ("per_closure" in size),
                wire_bytes=100.0,
                others=0.0,
            )
            for name, size in plan.PROBES.items()
        }
    found.idle = {
        "1": {"coordinator": 0.001, "server": 0.0},
        "8": {"coordinator": 0.008, "server": 0},
    }
    some = Sample(steps_per_s=1.0, cost=Cost(), wire_bytes=0.0, others=0.0)
    for name, step in (("MLP", DENSE), ("embedding", ROWS)):
        one = Measured(
            transport="sockets",
            step=replace(step, name=name),
            per_closure=1,
            workers=2,
            servers=1,
            sample=some,
        )
        rate = found.predict(one).steps_per_s / (2 if name == "embedding" else 1)
        found.measured.append(replace(one, sample=replace(some, steps_per_s=rate)))
    return found


def test_the_tables_show_the_error_of_every_prediction():
    text = tables.comparison(findings())
    assert "| MLP, sockets | 2 | 1 |" in text
    assert "| +0% |" in text
    assert "| +100% |" in text
    assert "median 50%, largest 100%" in text
    assert "Measured 2026-01-02 on 2 cores (test)" in text


def test_a_run_is_written_and_put_into_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file of measurements gives the same tables again, without measuring."""
    monkeypatch.setattr(plan, "CLUSTERS", ((10, 2, 1),))
    source, page = tmp_path / "run.json", tmp_path / "scaling.md"
    found = findings()
    source.write_text(json.dumps(found.to_json()))
    assert Findings.from_json(json.loads(source.read_text())) == found
    names = ("costs", "comparison", "capacities", "predictions")
    marks = "".join(f"<!-- scaling-{n}:begin -->\n<!-- scaling-{n}:end -->\n" for n in names)
    page.write_text(marks)
    assert command.main(["--from", str(source), "--page", str(page)]) == 0
    text = page.read_text()
    for make in (tables.costs, tables.comparison, tables.capacities, tables.predictions):
        assert make(found) in text


@pytest.mark.soak
def test_a_cluster_is_measured_and_grows():
    """Real processes: costs by role, bytes over sockets, and more workers in the same cluster."""
    size = {**plan.PROBES["base"], "sockets": True}
    with Bench("scaling_probe", size, seconds=0.1, samples=1, priority=False) as bench:
        one = bench.measure()
        bench.resize(2)
        two = bench.measure()
        idle = bench.idle(0.1)
    assert bench.facts["plain_s"] > 0
    for sample in (one, two):
        assert min(sample.cost.coordinator, sample.cost.worker, sample.cost.server) > 0
        assert sample.wire_bytes > 2 * size["tensor_bytes"]
    assert set(idle) == {"coordinator", "worker", "server"}
