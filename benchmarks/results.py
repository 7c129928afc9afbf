"""Results of a run: samples, summaries and checks, as plain data with conversion to JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.row import Kind, Row, Target


@dataclass(kw_only=True)
class Measurement:
    """All samples of one side at one point of a row; without samples, ``missing`` says why."""

    row: str
    point: str
    kind: Kind
    label: str
    samples: list[float] = field(default_factory=list)
    missing: str | None = None
    #: processor milliseconds per step, by process, one entry for each sample
    processor: list[dict[str, float]] = field(default_factory=list)
    #: bytes that the side's processes sent over TCP per step, one entry for each sample
    wire: list[float] = field(default_factory=list)
    #: further facts of the samples (staleness, AUC curves, …)
    extra: list[dict[str, Any]] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        """Median of the samples; None without samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread(self) -> float | None:
        """Half the range of the samples, as a fraction of the median."""
        middle = self.median
        if middle is None or middle == 0:
            return None
        return (max(self.samples) - min(self.samples)) / 2 / abs(middle)

    def processor_ms(self) -> dict[str, float]:
        """Median processor milliseconds per step of every process."""
        names = {name for sample in self.processor for name in sample}
        return {
            name: statistics.median([s[name] for s in self.processor if name in s])
            for name in sorted(names)
        }

    def processor_ms_by_role(self) -> dict[str, float]:
        """Median processor milliseconds per step of ``main``, ``worker`` and ``ps`` processes."""
        roles: dict[str, float] = {}
        for name, used in self.processor_ms().items():
            role = name.partition(" ")[0]
            roles[role] = roles.get(role, 0.0) + used
        return roles

    @property
    def wire_bytes(self) -> float | None:
        """Median bytes sent over TCP per step; None if they were not counted."""
        return statistics.median(self.wire) if self.wire else None


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison between sides."""

    row: str
    text: str
    passed: bool


@dataclass(kw_only=True)
class Results:
    """All results of one run."""

    machine: dict[str, Any]
    began: str
    seconds: float = 0.0
    #: how long each row took
    row_seconds: dict[str, float] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def of(self, row: str, point: str | None = None) -> list[Measurement]:
        """Return the measurements of a row, or of one of its points."""
        return [m for m in self.measurements if m.row == row and point in (None, m.point)]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with medians and spreads for human readers."""
        data = dataclasses.asdict(self)
        for plain, measurement in zip(data["measurements"], self.measurements, strict=True):
            plain["median"] = measurement.median
            plain["spread"] = measurement.spread
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Results:
        """Return the results that `to_json` described."""
        names = {each.name for each in dataclasses.fields(Measurement)}
        measurements = [
            Measurement(**{key: value for key, value in plain.items() if key in names})
            for plain in data["measurements"]
        ]
        checks = [Check(**plain) for plain in data["checks"]]
        return cls(
            machine=data["machine"],
            began=data["began"],
            seconds=data["seconds"],
            row_seconds=data.get("row_seconds", {}),
            measurements=measurements,
            checks=checks,
        )


def merged(parts: Sequence[Results]) -> Results:
    """Return the rows of several runs of one machine as one; a row that several runs have is the last one's.

    Raises:
        ValueError: the runs are from different machines or days.
    """
    load = max(part.machine.get("load_before", 0.0) for part in parts)
    whole = Results(machine={**parts[0].machine, "load_before": load}, began=parts[0].began)
    for part in parts:
        for what, ours, other in (
            ("processor", whole.machine.get("processor"), part.machine.get("processor")),
            ("day", whole.began[:10], part.began[:10]),
        ):
            if ours != other:
                raise ValueError(
                    f"the results are of different runs: {what} {ours!r} and {other!r}. Give files of one machine and one day."
                )
        again = {m.row for m in part.measurements}
        whole.measurements = [m for m in whole.measurements if m.row not in again]
        whole.measurements += part.measurements
        whole.checks = [c for c in whole.checks if c.row not in again] + part.checks
        whole.row_seconds |= part.row_seconds
        whole.seconds += part.seconds
    return whole


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the printed table: medians of all sides, and the verdict."""

    row: Row
    point: str
    ours: Measurement | None
    peers: list[Measurement]
    limit: Measurement | None
    bound: Measurement | None = None
    bare: Measurement | None = None

    @property
    def best_peer(self) -> Measurement | None:
        """The faster form of the peer; None if no peer was measured."""
        measured = [peer for peer in self.peers if peer.median is not None]
        if not measured:
            return None
        pick = max if self.row.better == "more" else min
        return pick(measured, key=lambda peer: peer.median or 0.0)

    @property
    def ratio(self) -> float | None:
        """Ratio of our result to the best peer's; None unless both were measured."""
        return self._advantage(self.ours, self.best_peer)

    @property
    def highest_ratio(self) -> float | None:
        """Ratio of the bound to the best peer's result; None unless both were measured."""
        return self._advantage(self.bound, self.best_peer)

    @property
    def fraction(self) -> float | None:
        """Ratio of our result to the limit; None unless both were measured."""
        return self._advantage(self.ours, self.limit)

    @property
    def of_bare(self) -> float | None:
        """Ratio of our result to the bare program's; None unless both were measured."""
        return self._advantage(self.ours, self.bare)

    @property
    def of_bound(self) -> float | None:
        """Ratio of our result to the bound; None unless both were measured."""
        return self._advantage(self.ours, self.bound)

    def verdict(self, target: Target) -> Literal["reached", "missed", "missing"]:
        """Return whether a target is reached; *missing* if a side was not measured."""
        mine = None if self.ours is None else self.ours.median
        limit = None if self.limit is None else self.limit.median
        # A value and what it must at least be.
        value, least = {
            "peer": (self.ratio, target.factor),
            "limit": (self.fraction, target.factor),
            "bound": (self.of_bound, target.factor),
            "bare": (self.of_bare, target.factor),
            "least": (mine, target.factor),
            "most": (None if mine is None else -mine, -target.factor),
            "above": (None if mine is None or limit is None else limit - mine, -target.factor),
        }[target.against]
        if value is None:
            return "missing"
        return "reached" if value >= least else "missed"

    def _advantage(self, one: Measurement | None, other: Measurement | None) -> float | None:
        this = one.median if one is not None else None
        that = other.median if other is not None else None
        if not this or not that:
            return None
        return this / that if self.row.better == "more" else that / this


def lines(rows: Sequence[Row], results: Results) -> list[Line]:
    """Return the lines of the table in the order of the rows; rows that were not run are left out."""
    found = []
    for row in rows:
        for point in row.points:
            group = results.of(row.name, point.label)
            if not group:
                continue
            found.append(
                Line(
                    row=row,
                    point=point.label,
                    ours=next((m for m in group if m.kind == "ours"), None),
                    peers=[m for m in group if m.kind == "peer"],
                    limit=next((m for m in group if m.kind == "limit"), None),
                    bound=next((m for m in group if m.kind == "bound"), None),
                    bare=next((m for m in group if m.kind == "bare"), None),
                )
            )
    return found
