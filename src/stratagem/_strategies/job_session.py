"""The session of a parameter-server strategy: one of its own, or that of a named job, which is claimed."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Final

import torch

from stratagem import config
from stratagem._ps.client.job_connection import JobConnection
from stratagem._ps.client.server_connection import Membership
from stratagem._ps.coordinator.named_job import NamedJob
from stratagem._wire.handshake import ClusterKey

_NAME: Final = re.compile(r"[\w.-]{1,100}")


def check_job(job: object, lease_s: float | None) -> None:
    """Raise if the name or lease of a job is invalid."""
    if job is None:
        if lease_s is not None:
            raise ValueError(f"job_lease_s={lease_s!r} without a job: pass job='a name', too.")
        return
    if not isinstance(job, str) or not _NAME.fullmatch(job):
        raise ValueError(
            f"job={job!r} is no name of a job: expected up to 100 letters, digits, dots, dashes and "
            "underscores, such as 'ctr-v3'."
        )
    if lease_s is not None and not lease_s > 0:
        raise ValueError(f"job_lease_s={lease_s!r}: expected a positive number of seconds.")


def join_job(
    job: str | None,
    lease_s: float | None,
    servers: Sequence[tuple[str, Callable[[], str]]],
    key: ClusterKey | None,
) -> tuple[Membership, NamedJob | None]:
    """Return the session to open: one of its own, or that of a named job, which is claimed."""
    task = "/job:chief/task:0"
    if job is None:
        session, lease_s = secrets.token_hex(8), config.session_lease_s()
        return Membership(session=session, task=task, is_owner=True, lease_s=lease_s, key=key), None
    connection = JobConnection(
        job,
        servers,
        key=key,
        lease_s=config.job_lease_s() if lease_s is None else lease_s,
        limit_s=config.job_limit_s(),
        wait_s=config.server_wait_s(),
        seed=torch.initial_seed(),
    )
    membership = Membership(
        session=connection.session,
        task=task,
        is_owner=True,
        lease_s=connection.lease_s,
        key=key,
        instance=connection.instance,
        epoch=connection.epoch,
    )
    return membership, NamedJob(connection)
