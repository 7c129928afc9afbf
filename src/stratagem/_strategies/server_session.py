"""The connections of a parameter-server strategy to its servers, with backups or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from stratagem import config
from stratagem._ps.client.ps_client import PsClient
from stratagem._ps.client.server_connection import Membership, ServerConnection
from stratagem._ps.client.server_replacement import promotion
from stratagem._ps.client.shard_holders import ShardHolders
from stratagem._ps.coordinator.coordinator_variables import CoordinatorVariables
from stratagem._ps.coordinator.named_job import NamedJob
from stratagem._ps.coordinator.server_backups import ServerBackups
from stratagem._wire.round_trip import attempt_limit_s


def check_backups(backups: object, servers: int) -> None:
    """Raise if a number of backups cannot be kept."""
    if isinstance(backups, bool) or not isinstance(backups, int) or backups < 0:
        raise ValueError(f"backups={backups!r}: expected 0 or 1.")
    if backups > 1:
        raise ValueError(f"backups={backups}: expected 0 or 1, since a server has one backup.")
    if backups and servers < 2:
        raise ValueError(
            f"backups={backups} with one parameter server: a backup is on another server. Start two servers "
            "or more, or use backups=0."
        )


def check_staleness(staleness: object, backups: int) -> None:
    """Raise if the limit of the staleness is no such number."""
    if staleness is None:
        return
    if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
        raise ValueError(
            f"staleness={staleness!r}: expected 0 for synchronous rounds; 1 or more, the number of other workers' "
            "updates that a function may miss; or None for no limit."
        )
    if staleness == 0 and backups:
        raise ValueError(
            f"staleness=0 with backups={backups}: backups do not hold the gradients of a round. Use staleness=1 or "
            "more, or save checkpoints (CheckpointManager) instead of backups."
        )


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
