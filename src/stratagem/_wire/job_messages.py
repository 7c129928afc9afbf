"""Messages between a parameter server and the coordinator of a named job (docs/design/0009)."""

from __future__ import annotations

from stratagem._wire.backup_messages import VariableRecord
from stratagem._wire.message_base import Message, Record


class AskJob(Message, frozen=True):
    """Ask what a server knows about a named job, given by the name of its session."""

    session: str


class ShardReport(Record, frozen=True):
    """A shard of a live job with backups, as one server has it; `is_linked`: its backup answers."""

    shard: int
    view: int
    is_backup: bool
    is_complete: bool
    is_linked: bool
    variables: tuple[VariableRecord, ...]
    optimizers: tuple[tuple[int, str], ...]
    deleted: tuple[tuple[int, int], ...]


class JobReport(Message, frozen=True):
    """Answer to AskJob; `epoch` 0: the server does not know the job.

    `coordinator` describes its owner, which has owned it since `since` (seconds of the Unix epoch) and was heard
    `silent_s` ago; `connected`: the owner's connection is open. `deleted`: ranges of freed variables. `last_closure`: the
    largest number of a closure that has written.
    """

    epoch: int = 0
    instance: str = ""
    coordinator: str = ""
    since: float = 0.0
    silent_s: float = 0.0
    connected: bool = False
    serial: int = 0
    record: bytes = b""
    seed: int = 0
    variables: tuple[VariableRecord, ...] = ()
    optimizers: tuple[tuple[int, str], ...] = ()
    deleted: tuple[tuple[int, int], ...] = ()
    shards: tuple[ShardReport, ...] = ()
    last_closure: int = 0


class ClaimJob(Message, frozen=True):
    """Become the coordinator of a named job, and cut all earlier ones off; refused unless `epoch` is larger.

    `keep`: adopt the variables; otherwise the server frees what it has of the job.
    """

    session: str
    instance: str
    epoch: int
    coordinator: str
    since: float
    lease_s: float
    keep: bool
    seed: int = 0


class KeepJob(Message, frozen=True):
    """Sign of life of a job's coordinator; with a newer `record` if `serial` is larger than the server's."""

    session: str
    instance: str
    epoch: int
    serial: int = 0
    record: bytes = b""


class JobKept(Message, frozen=True):
    """Answer to KeepJob: number of the record that the server has."""

    serial: int
