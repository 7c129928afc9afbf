"""Messages about backups of parameter servers (docs/design/0010).

A *shard* here is what one parameter server holds of a strategy, by the server's number. One process has it as primary, and
another one may have it as backup. The primary forwards every message that changes the shard on one connection, the *link*.
"""

from __future__ import annotations

from stratagem._wire.checkpoint_messages import LedgerRecord, StateRecord
from stratagem._wire.message_base import Message, Record, TensorRef
from stratagem._wire.server_messages import GroupSpec, InitOp, Setting


class SetBackup(Message, frozen=True):
    """From the coordinator to a primary: keep a backup at `address` from now on; without an address, continue alone.

    The answer comes when the backup has the whole state. `view` numbers the decisions of the coordinator about a shard.
    """

    view: int
    address: str = ""


class Promote(Message, frozen=True):
    """From the coordinator to a backup: become the primary of a shard, and refuse the primary before."""

    session: str
    shard: int
    view: int
    instance: str = ""
    epoch: int = 0


class OpenReplica(Message, frozen=True):
    """First message on a link: keep a backup of a shard. Replaces an older backup or primary of it."""

    session: str
    shard: int
    view: int
    lease_s: float
    instance: str = ""
    epoch: int = 0


class BackupAt(Message, frozen=True):
    """From a primary to its clients: where its backup is, which may take over."""

    address: str


class Deposed(Message, frozen=True):
    """From a backup to its primary: the backup has taken over, the primary frees what it has."""


class VariableRecord(Record, frozen=True):
    """A variable without its value. `recipe`: initialisation of a part of a dynamic table."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    version: int
    recipe: tuple[InitOp, ...] = ()


class OptimizerRecord(Record, frozen=True):
    """An optimizer without its state."""

    number: int
    class_name: str
    groups: tuple[GroupSpec, ...]
    defaults: dict[str, Setting]
    attributes: dict[str, Setting]


class StoreManifest(Record, frozen=True):
    """Everything a store holds but the rows of its tensors."""

    variables: tuple[VariableRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    state: tuple[StateRecord, ...]
    ledger: LedgerRecord


class ReplicaState(Message, frozen=True):
    """Begin of a shard's state: everything but rows. Replaces what the backup had."""

    manifest: StoreManifest
    deleted: tuple[tuple[int, int], ...] = ()


class ReplicaRows(Message, frozen=True):
    """Rows of a variable, or of optimizer state for it if `key` is not empty."""

    variable: int
    start: int
    rows: TensorRef
    optimizer: int = 0
    key: str = ""


class ReplicaKeys(Message, frozen=True):
    """A piece of what a dynamic table knows beside its variables (`IndexRecord`); without `values` it is complete."""

    variable: int
    name: str = ""
    values: TensorRef | None = None
    clock: int = 0


class ReplicaReady(Message, frozen=True):
    """End of a shard's state: the backup is complete."""


class FromClient(Message, frozen=True):
    """The following messages on the link come from this client of the primary."""

    client: int


class ClientGone(Message, frozen=True):
    """A client of the primary has disconnected: its memory is not needed any more."""

    client: int


class CloseReplica(Message, frozen=True):
    """The shard was closed: free the backup."""
