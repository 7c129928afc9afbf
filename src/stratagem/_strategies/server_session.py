"""The session of a parameter-server strategy, and its connections to the servers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from stratagem import config
from stratagem._ps.client.job_connection import JobConnection
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership, ServerConnection
from stratagem._ps.client.server_replacement import promotion
from stratagem._ps.client.shard_holders import ShardHolders
from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables
from stratagem._ps.coordinator.named_job import NamedJob
from stratagem._ps.coordinator.server_backups import ServerBackups
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.round_trip import attempt_limit_s


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


def connect_servers(
    addresses: Sequence[tuple[str, Callable[[], str]]],
    membership: Membership,
    backups: int,
    job: NamedJob | None = None,
) -> tuple[PsClient, ServerBackups | None]:
    """Connect the coordinator to all servers; return also where backups are, if there are any.

    Backups of a live job whose primary was lost take over.
    """
    wait_s = config.server_wait_s()
    if job is not None:
        job.check_backups(backups)
    if not backups:
        return PsClient(addresses, membership, connect_timeout_s=wait_s), None
    live = () if job is None else job.shards
    holders = ShardHolders(addresses, [one.holder for one in live])
    kept = ServerBackups(holders)
    for shard, one in enumerate(live):
        kept.views[shard], kept.backups[shard] = one.view, one.backup
        if one.is_orphan:
            kept.views[shard] += 1
            promote_orphan(holders, membership, shard, kept.views[shard])
    client = PsClient(holders.servers(), membership, connect_timeout_s=wait_s, holders=holders)
    return client, kept


def promote_orphan(holders: ShardHolders, membership: Membership, shard: int, view: int) -> None:
    """Let the backup of a shard take over whose primary was lost while no coordinator ran."""
    task, address = holders.processes[holders.holders[shard]]
    alone = replace(membership, session="", is_owner=False)
    with closing(ServerConnection(task, address, alone)) as connection:
        connection.open(timeout_s=attempt_limit_s())
        connection.request(promotion(membership, shard, view))


def server_addresses(variables: CoordinatorVariables) -> dict[str, Any]:
    """Return what a worker needs to find the servers."""
    holders = variables.client.replacement.holders
    if holders is None:
        return {"servers": variables.client.addresses()}
    tasks = [task for task, _ in holders.processes]
    known = tuple((task, holders.address(process)) for process, task in enumerate(tasks))
    return {"servers": known, "holders": tuple(holders.holders)}
