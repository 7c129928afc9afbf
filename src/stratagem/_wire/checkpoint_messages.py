"""Messages about checkpoints between a parameter server and its coordinator (docs/design/0007)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stratagem._wire.message_base import Message, Record


class MakeCut(Message, frozen=True):
    """Keep the rows of these variables, and of optimizer state for them, as they are now, until EndCut.

    `probe`: a file that the sender made in `directory`. A server that does not see it does not share the file
    system and makes no cut. `track`: mark the rows that are written from now on. `base`: the earlier cut whose
    changes are asked for; 0 for none.
    """

    variables: tuple[int, ...]
    directory: str
    probe: str
    track: bool = False
    base: int = 0


class StateRecord(Record, frozen=True):
    """State that an optimizer keeps for a variable: a tensor without its rows, or a plain value."""

    optimizer: int
    variable: int
    key: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    value: bool | int | float | None = None

    @property
    def is_tensor(self) -> bool:
        """True if it has rows."""
        return bool(self.dtype)


class LedgerRecord(Record, frozen=True):
    """Writes that a server has applied (`WriteLedger`)."""

    last: dict[str, tuple[int, int]]
    """Worker → incarnation and number of its last write."""
    lowest: dict[str, int]
    """Worker → lowest incarnation that may write."""
    closures: tuple[tuple[int, int, bytes], ...]
    """Unfinished closure, block of 1024 of its writes, bits of those that were applied."""
    finished: tuple[tuple[int, int], ...]
    """Ranges of finished closures."""
    counts: tuple[int, int, int]
    """Writes applied, repeated, refused."""

    @property
    def last_closure(self) -> int:
        """Largest number of a closure that has written or is finished; 0 if none has."""
        ends = [behind - 1 for _, behind in self.finished]
        return max((*ends, *(closure for closure, _, _ in self.closures)), default=0)

    def text(self) -> str:
        """Return the record as text, for the manifest of a checkpoint."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_text(text: str) -> LedgerRecord:
        return msgspec.json.decode(text, type=LedgerRecord)


class CutMade(Message, frozen=True):
    """Answer to MakeCut; with `refused`, why no cut was made. `facts`: versions and applied writes, for JSON.

    `changed`: number of rows written since the base, by variable; variables without it count as written whole.
    `used`: number of rows in use, by variable, of dynamic tables.
    """

    cut: int = 0
    changed: Mapping[int, int] = msgspec.field(default_factory=dict)
    used: Mapping[int, int] = msgspec.field(default_factory=dict)
    items: tuple[StateRecord, ...] = ()
    facts: Mapping[str, Any] = msgspec.field(default_factory=dict)
    refused: str = ""


class PartRef(Record, frozen=True):
    """Rows of one tensor of a checkpoint that a server holds: a variable's, or optimizer state's with a `key`.

    `shape` is that of the whole tensor, `start` the first row here, `rows` their number. `per_shard`: a number that
    every shard has; the rows are those of the shard. `changed_only`: write only rows changed since the base of the cut.
    """

    tensor: str
    shape: tuple[int, ...]
    start: int
    rows: int
    variable: int
    optimizer: int = 0
    key: str = ""
    per_shard: bool = False
    changed_only: bool = False

    def of_changed_rows(self) -> PartRef:
        """Return the same part with `changed_only`."""
        return msgspec.structs.replace(self, changed_only=True)


class WriteCut(Message, frozen=True):
    """Write the parts of a cut to a file. The answer comes at once; AskTransfer asks for the result."""

    cut: int
    path: str
    parts: tuple[PartRef, ...]


class EndCut(Message, frozen=True):
    """Give up a cut. One that is being written is given up, too."""

    cut: int


class ReadParts(Message, frozen=True):
    """Read parts from a checkpoint into the variables and optimizer state here, or verify them only.

    `chain`: directory and identity of the checkpoint, then of its parents. `state`: plain values of optimizer
    state. The answer comes at once; AskTransfer asks for the result.
    """

    chain: tuple[tuple[str, str], ...]
    parts: tuple[PartRef, ...]
    state: tuple[StateRecord, ...] = ()
    verify: bool = False


class RestoreLedger(Message, frozen=True):
    """Remember the writes that a checkpoint contains."""

    ledger: LedgerRecord


class AskTransfer(Message, frozen=True):
    """Ask how far WriteCut or ReadParts of this session has come.

    `hurry`: a caller waits for it. `undo`: put back what ReadParts has replaced in variables without a value.
    """

    hurry: bool = False
    undo: bool = False


class StoredBlock(Record, frozen=True):
    """Rows of one tensor, as raw bytes in one file of a checkpoint, at a multiple of 64.

    `start` is the first row. With scattered rows (of a delta) it is the first row of the writer's range, and `ids_offset` and
    `ids_crc32` say where their numbers are: raw int64, ascending.
    """

    tensor: str
    file: str
    offset: int
    start: int
    rows: int
    crc32: int
    ids_offset: int = -1
    ids_crc32: int = 0

    @property
    def is_scattered(self) -> bool:
        """True if it has the numbers of its rows."""
        return self.ids_offset >= 0


class Transfer(Message, frozen=True):
    """Answer to AskTransfer. `size`, `crc32` and `blocks` describe a file that is complete.

    `failure`: why it ended badly; `damaged`: the file that is to blame, if one is.
    """

    moved: int
    done: bool = False
    failure: str = ""
    damaged: str = ""
    size: int = 0
    crc32: int = 0
    blocks: tuple[StoredBlock, ...] = ()
