"""Measurements of one run, and everything that follows from them: unit costs, predictions and errors. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from benchmarks.scaling import plan
from benchmarks.scaling.cluster_model import Job, Machines, Prediction
from benchmarks.scaling.costs import Cost, Step, UnitCosts, unit_costs


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement: steps per second, cost of a step, bytes sent over TCP per step, and cores that other programs used."""

    steps_per_s: float
    cost: Cost
    wire_bytes: float
    others: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of one step on a cluster of some size.

    ``step`` describes the step; its compute time was measured in the same process, before the cluster ran.
    """

    transport: str
    step: Step
    per_closure: int
    workers: int
    servers: int
    sample: Sample


@dataclass(kw_only=True)
class Findings:
    """All measurements of a run.

    Args:
        probes: by transport and probe.
        plain: compute time of each probe in plain PyTorch, by transport and probe.
        idle: processor seconds per second without any closure: coordinator and server, with 1 and with 8 workers.
    """

    machine: dict[str, Any]
    began: str
    probes: dict[str, dict[str, Sample]] = field(default_factory=dict)
    plain: dict[str, dict[str, float]] = field(default_factory=dict)
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)

    def units(self, transport: str) -> UnitCosts:
        """Return the unit costs of a transport."""
        found = self.probes[transport]
        plain = self.plain[transport]
        return unit_costs({name: found[name].cost - Cost(worker=plain[name]) for name in found})

    def latency_s(self, transport: str) -> float:
        """Return the time from sending a message to the start of its receiver, on this machine.

        In the probe with several steps per closure a worker and a server take turns; what remains is latency, twice per step.
        """
        several = self.probes[transport]["several"]
        remaining = 1 / several.steps_per_s - several.cost.worker - several.cost.server
        return max(0.0, remaining / 2)

    def here(self, transport: str, others: float = 0.0) -> Machines:
        """Return this machine: its cores are shared by all processes. Other programs use ``others`` of them, but leave one."""
        return Machines(
            shared=True,
            cores=max(1.0, self.machine["cores"] - others),
            latency_s=self.latency_s(transport),
            sockets="sockets" in plan.TRANSPORTS[transport],
        )

    def predict(self, measured: Measured) -> Prediction:
        """Predict what was measured."""
        return Job(
            measured.step,
            self.units(measured.transport),
            self.here(measured.transport, measured.sample.others),
            workers=measured.workers,
            servers=measured.servers,
            per_closure=measured.per_closure,
        ).run()

    def steps(self) -> tuple[Step, ...]:
        """Return the steps to predict for real hosts."""
        by_name = {one.step.name: one.step for one in self.measured}
        return plan.future_steps(by_name["MLP"], by_name["embedding"])

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Findings:
        """Return the findings that `to_json` described."""

        def sample(plain: dict[str, Any]) -> Sample:
            return Sample(**{**plain, "cost": Cost(**plain["cost"])})

        def step(plain: dict[str, Any]) -> Step:
            return Step(**{**plain, "tensor_bytes": tuple(plain["tensor_bytes"])})

        return cls(
            machine=data["machine"],
            began=data["began"],
            probes={
                transport: {name: sample(one) for name, one in found.items()}
                for transport, found in data["probes"].items()
            },
            plain=data["plain"],
            idle=data["idle"],
            measured=[
                Measured(**{**one, "step": step(one["step"]), "sample": sample(one["sample"])})
                for one in data["measured"]
            ],
        )
