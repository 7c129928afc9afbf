"""The state of a parameter server's store as plain data: a manifest, and blocks of rows.

`VariableStore.describe` returns the manifest, `VariableStore.export` the blocks; `VariableStore.restore` takes
both. A block is a range of rows of one tensor, so that the state of a store can be sent as a stream (a new backup).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from stratagem._wire.messages import OptimizerRecord as OptimizerRecord
from stratagem._wire.messages import StateRecord as StateRecord
from stratagem._wire.messages import VariableRecord as VariableRecord

Kind: TypeAlias = Literal["variable", "optimizer"]


class Block(NamedTuple):
    """Rows of one tensor of a store.

    Attributes:
        kind: whether they belong to a variable's value or to an optimizer's state for it.
        variable: number of the variable.
        key: name of the optimizer's state; empty for a value.
        start: the first row; a tensor without axes is one row.
        stop: the row after the last.
        tensor: the rows.
        optimizer: number of the optimizer; 0 for a value.
    """

    kind: Kind
    variable: int
    key: str
    start: int
    stop: int
    tensor: Tensor
    optimizer: int = 0


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """Writes that were applied: see `server/ledger.py`."""

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


@dataclass(frozen=True, slots=True)
class StoreManifest:
    """Everything a store holds but the rows of its tensors."""

    variables: tuple[VariableRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    state: tuple[StateRecord, ...]
    ledger: LedgerRecord


@dataclass(slots=True)
class StoreStats:
    """Numbers about a store, for metrics and `repr`."""

    variables: int
    optimizers: int
    bytes: int
    applied: int
    duplicates: int
    fenced: int
