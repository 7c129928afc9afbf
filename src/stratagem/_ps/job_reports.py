"""Decide about a named job, from the reports of its servers. Pure.

`client/job_connection.py` asks the servers and carries the decisions out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from stratagem._wire.messages import JobReport, ShardReport, VariableRecord

SEEN_S: Final = 1.0
"""How long a live owner must have been seen before its job counts as in use: one that is ending is gone sooner."""


@dataclass(frozen=True)
class ShardPlace:
    """Place of a server's variables: in the process `holder`, with a complete backup in `backup`.

    `is_orphan`: the primary is gone, and the holder has the backup, which must be promoted.
    """

    view: int
    holder: int
    backup: int | None
    is_orphan: bool


@dataclass(frozen=True)
class JobState:
    """State of a job, from the reports of all servers.

    Attributes:
        epoch: the largest epoch.
        coordinator: host and process that had the job last.
        instance: of the job, if it can be adopted; else empty.
        record: the newest record of its position.
        serial: number of that record.
        seed: of the job's random streams.
        variables: (server, number) → variable.
        optimizers: number → dotted name of the class.
        deleted: by server, ranges of freed variables.
        shards: with backups, by server, which processes have its variables.
        last_closure: the largest number of a closure that has written.
    """

    epoch: int
    coordinator: str = ""
    instance: str = ""
    record: bytes = b""
    serial: int = 0
    seed: int = 0
    variables: Mapping[tuple[int, int], VariableRecord] = field(default_factory=dict)
    optimizers: Mapping[int, str] = field(default_factory=dict)
    deleted: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    shards: tuple[ShardPlace, ...] = ()
    last_closure: int = 0

    @property
    def is_live(self) -> bool:
        """True if the job can be adopted."""
        return bool(self.instance)


def state_of(reports: Sequence[JobReport]) -> JobState:
    """Return the state of a job: live if every server has the same instance of it, with a record.

    With backups: if some process has each shard, and one has a record.

    Example:
        >>> known = JobReport(epoch=3, instance="a", serial=1, record=b"r")
        >>> state_of([known, known]).is_live, state_of([known, JobReport()]).is_live
        (True, False)
    """
    last = max(reports, key=lambda one: one.epoch)
    anew = JobState(last.epoch, last.coordinator)
    known = [one for one in reports if one.instance]  # a process that was restarted reports nothing
    newest = max(known, key=lambda one: one.serial, default=JobReport())
    if len({one.instance for one in known}) != 1 or not newest.record:
        return anew
    places: list[ShardPlace] = []
    holders: Sequence[JobReport | ShardReport] = reports
    if any(one.shards for one in reports):
        found = [_place_of(shard, reports) for shard in range(len(reports))]
        holders = [holder for holder, _ in filter(None, found)]
        places = [place for _, place in filter(None, found)]
        if len(places) < len(reports):
            return anew
    elif not all(one.instance and one.record for one in reports):
        return anew
    return replace(
        anew,
        instance=newest.instance,
        record=newest.record,
        serial=newest.serial,
        seed=newest.seed,
        variables={
            (server, variable.number): variable
            for server, one in enumerate(holders)
            for variable in one.variables
        },
        optimizers={number: name for one in holders for number, name in one.optimizers},
        deleted={server: one.deleted for server, one in enumerate(holders)},
        shards=tuple(places),
        last_closure=max(one.last_closure for one in known),
    )


def _place_of(shard: int, reports: Sequence[JobReport]) -> tuple[ShardReport, ShardPlace] | None:
    """Return which process has a shard: its newest primary; without one, its newest backup."""
    here = [
        (one.view, not one.is_backup, process, one)
        for process, report in enumerate(reports)
        for one in report.shards
        if one.shard == shard and one.is_complete
    ]
    if not here:
        return None
    primaries = [one for one in here if one[1]]
    view, is_primary, holder, best = max(primaries or here, key=lambda one: one[:3])
    backups = [at for seen, primary, at, _ in here if not primary and seen == view]
    has_backup = is_primary and best.is_linked
    backup = next((at for at in backups if at != holder), None) if has_backup else None
    return best, ShardPlace(view, holder, backup, not is_primary)


def describe_coordinator(coordinator: str, since: float) -> str:
    """Return host and process of a coordinator, and since when it has its job."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    return f"{coordinator} since {when}" if since else coordinator


def silence_s(reports: Sequence[JobReport]) -> float:
    """Return for how long no server has heard the job's owner; infinite if it has no connection."""
    return min((one.silent_s for one in reports if one.connected), default=math.inf)


def judge_owner(
    reports: Sequence[JobReport], *, waited_s: float, limit_s: float
) -> Literal["free", "in use", "unknown"]:
    """Return whether a job may be claimed, `waited_s` after the first question.

    Example:
        >>> heard = JobReport(epoch=1, instance="a", connected=True, silent_s=0.2)
        >>> judge_owner([heard], waited_s=0.0, limit_s=10.0)
        'unknown'
        >>> judge_owner([heard], waited_s=1.5, limit_s=10.0)
        'in use'
        >>> stopped = JobReport(epoch=1, instance="a", connected=True, silent_s=11.0)
        >>> judge_owner([stopped], waited_s=0.0, limit_s=10.0)
        'free'
    """
    silent_s = silence_s(reports)
    if silent_s >= limit_s:
        return "free"
    return "in use" if waited_s > max(SEEN_S, silent_s) else "unknown"
