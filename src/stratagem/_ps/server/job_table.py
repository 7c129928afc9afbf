"""The named jobs of a parameter server, with the coordinator and the position of each.

A named job is a session with an *instance*, an *epoch* and a *record* (docs/design/0009). This module has no clock and no
socket: `loop.py` passes the messages, the connections and the time, and cuts off the connections of replaced coordinators.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias, final

from typing_extensions import override

from stratagem._ps.job_reports import describe_coordinator
from stratagem._ps.server.session import Session
from stratagem._ps.server.session_table import SessionTable
from stratagem._wire import messages
from stratagem._wire.messages import JobReport, ShardReport, VariableRecord
from stratagem.errors import CoordinatorReplaced, NotFoundError


@dataclass(slots=True)
class _HeldJob:
    instance: str
    epoch: int
    coordinator: str = "a coordinator"
    since: float = 0.0
    seed: int = 0
    owner: Hashable | None = None  # the connection that sends signs of life
    heard_at: float = 0.0
    serial: int = 0
    record: bytes = b""

    def describe(self) -> str:
        return describe_coordinator(self.coordinator, self.since)


@final
class JobTable:
    """The named jobs of one server, by the names of their sessions."""

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions
        self._jobs: dict[str, _HeldJob] = {}

    def report(self, session: str, now: float) -> JobReport:
        """Return what is known about a job."""
        job = self._jobs.get(session)
        if job is None:
            return JobReport()
        shards = tuple(
            ShardReport(
                shard, one.view, one.is_backup, one.is_complete, one.is_linked, *_contents(one)
            )
            for shard, one in self._sessions.shards(session).items()
            if shard >= 0
        )
        whole = self._sessions.get(session, -1)
        variables, optimizers, deleted = ((), (), ()) if whole is None else _contents(whole)
        return JobReport(
            epoch=job.epoch,
            instance=job.instance,
            coordinator=job.coordinator,
            since=job.since,
            silent_s=now - job.heard_at if job.owner is not None else math.inf,
            connected=job.owner is not None,
            serial=job.serial,
            record=job.record,
            seed=job.seed,
            variables=variables,
            optimizers=optimizers,
            deleted=deleted,
            shards=shards,
            last_closure=max(
                (
                    one.store.describe().ledger.last_closure
                    for one in self._sessions.shards(session).values()
                ),
                default=0,
            ),
        )

    def claim(self, message: messages.ClaimJob, owner: Hashable, now: float) -> Session:
        """Give a job to a new coordinator; return its session. The caller has ended a session not to be kept.

        Raises:
            CoordinatorReplaced: another coordinator has an epoch that is not smaller.
        """
        self.check_claim(message)
        known = self._jobs.get(message.session)
        opening = messages.OpenSession(session=message.session, lease_s=message.lease_s)
        session = self._sessions.open(opening, owner=owner)
        self._sessions.own_alone(message.session, owner, message.lease_s)
        job = _HeldJob(message.instance, message.epoch, message.coordinator, message.since)
        job.owner, job.heard_at, job.seed = owner, now, message.seed
        if known is not None:
            job.serial, job.record = known.serial, known.record
        self._jobs[message.session] = job
        return session

    def check_claim(self, message: messages.ClaimJob) -> None:
        """Raise if the job belongs to a coordinator with an epoch that is not smaller."""
        job = self._jobs.get(message.session)
        if job is not None and message.epoch <= job.epoch:
            raise self._replaced(message.session, message.epoch, job)

    def admit(
        self,
        message: messages.OpenSession
        | messages.JoinSession
        | messages.OpenReplica
        | messages.Promote,
        *,
        opens: bool = False,
    ) -> None:
        """Refuse a replaced coordinator, and its workers, that connect again; unnamed sessions pass.

        With `opens`, the coordinator sets up a server that was restarted: the job is known from then on.
        """
        job = self._jobs.get(message.session)
        if job is None:
            if opens and message.epoch:
                self._jobs[message.session] = _HeldJob(message.instance, message.epoch)
        elif message.instance != job.instance or message.epoch < job.epoch:
            raise self._replaced(message.session, message.epoch, job)
        elif opens:
            job.epoch = message.epoch

    def keep(self, message: messages.KeepJob, owner: Hashable, now: float) -> messages.JobKept:
        """Note a sign of life of a job's coordinator, and its record if that is newer.

        Raises:
            NotFoundError: the job is not known here: the server was restarted, or the lease ran out.
            CoordinatorReplaced: another coordinator has the job.
        """
        job = self._jobs.get(message.session)
        if job is None:
            raise NotFoundError(f"there is no {message.session!r} here")
        if (message.instance, message.epoch) != (job.instance, job.epoch):
            raise self._replaced(message.session, message.epoch, job)
        job.owner, job.heard_at = owner, now
        self._sessions.add_owner(message.session, owner)
        if message.serial > job.serial:
            job.serial, job.record = message.serial, message.record
        return messages.JobKept(serial=job.serial)

    def leave(self, owner: Hashable) -> None:
        """Note that a connection is gone."""
        for job in self._jobs.values():
            if job.owner == owner:
                job.owner = None

    def forget(self, session: str) -> None:
        """Forget a job whose session has ended."""
        self._jobs.pop(session, None)

    def refusal(self, session: str) -> str:
        """Return the error text for connections that a claim has cut off."""
        job = self._jobs.get(session)
        return "" if job is None else str(self._replaced(session, 0, job))

    @staticmethod
    def _replaced(session: str, epoch: int, job: _HeldJob) -> CoordinatorReplaced:
        mine = f", epoch {epoch}," if epoch else ""
        return CoordinatorReplaced(
            f"this coordinator{mine} of {session!r} was replaced by {job.describe()}, epoch "
            f"{job.epoch}. It cannot read, write or schedule any more: end this process. Only the newest "
            f"coordinator of a named job works."
        )

    @override
    def __repr__(self) -> str:
        return f"<JobTable {len(self._jobs)} jobs>"


_Contents: TypeAlias = tuple[
    tuple[VariableRecord, ...], tuple[tuple[int, str], ...], tuple[tuple[int, int], ...]
]


def _contents(session: Session) -> _Contents:
    """Return the variables and optimizers of a session, and ranges of freed variables."""
    manifest = session.store.describe()
    optimizers = tuple((one.number, one.class_name) for one in manifest.optimizers)
    return manifest.variables, optimizers, session.deleted.ranges
