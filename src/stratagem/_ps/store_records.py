"""The state of a parameter server's store as plain data: a manifest, and blocks of rows.

`VariableStore.describe` returns the manifest, `VariableStore.export` the blocks; `VariableStore.restore` takes
both. A block is a range of rows of one tensor, so that the state of a store can be sent as a stream (a new backup).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from stratagem._wire.messages import LedgerRecord as LedgerRecord
from stratagem._wire.messages import OptimizerRecord as OptimizerRecord
from stratagem._wire.messages import StateRecord as StateRecord
from stratagem._wire.messages import StoreManifest as StoreManifest
from stratagem._wire.messages import VariableRecord as VariableRecord


class Block(NamedTuple):
    """Rows of one tensor of a store.

    Attributes:
        variable: number of the variable.
        start: the first row; a tensor without axes is one row.
        rows: the rows.
        optimizer: number of the optimizer whose state for the variable they belong to; 0 for a value.
        key: name of the optimizer's state; empty for a value.
    """

    variable: int
    start: int
    rows: Tensor
    optimizer: int = 0
    key: str = ""


@dataclass(slots=True)
class StoreStats:
    """Numbers about a store, for metrics and `repr`."""

    variables: int
    optimizers: int
    bytes: int
    applied: int
    duplicates: int
    fenced: int
