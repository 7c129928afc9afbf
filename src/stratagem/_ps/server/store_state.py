"""Contents of a store as records and blocks of rows, for a copy of the whole store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from stratagem._ps.server.shard_optimizer import ServerOptimizer
from stratagem._ps.types import row_pieces
from stratagem._wire import codec
from stratagem._wire.messages import StateRecord

if TYPE_CHECKING:
    from stratagem._ps.server.store import VariableStore


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


def described_state(optimizers: Mapping[int, ServerOptimizer]) -> tuple[StateRecord, ...]:
    """Return what the optimizers, by number, keep: shapes of tensors, and plain values."""
    state = []
    for number, optimizer in optimizers.items():
        for entry in optimizer.state_entries():
            value = entry.value
            if isinstance(value, Tensor):
                dtype, shape = codec.dtype_name(value.dtype), tuple(value.shape)
                record = StateRecord(number, entry.variable, entry.key, dtype, shape)
            else:
                record = StateRecord(number, entry.variable, entry.key, value=value)
            state.append(record)
    return tuple(state)


def exported(store: VariableStore, block_bytes: int | None = None) -> Iterator[Block]:
    """Yield the rows of all tensors of a store, in blocks of at most `block_bytes` (by default 64 MiB).

    The rows are not copied: a caller that yields to writers in between copies what it needs. Sparse state
    (SGD's momentum of sparse gradients) is yielded as dense.
    """
    for number in store.versions():
        ranges = store.keyed.ranges(number)
        for start, rows in _row_blocks(store.read(number), block_bytes, ranges):
            yield Block(number, start, rows)
    for number in store.optimizers:
        for entry in store.optimizer_state(number):
            if isinstance(entry.value, Tensor):
                ranges = store.keyed.ranges(entry.variable) if entry.value.dim() else None
                for start, rows in _row_blocks(entry.value, block_bytes, ranges):
                    yield Block(entry.variable, start, rows, number, entry.key)


def _row_blocks(
    tensor: Tensor, block_bytes: int | None, ranges: Sequence[tuple[int, int]] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield first row and rows of a tensor; one without axes is one row. `ranges`: the rows to yield, by default all."""
    whole = tensor.to_dense() if tensor.is_sparse else tensor
    rows = whole if whole.dim() else whole.reshape(1)
    for low, high in [(0, rows.shape[0])] if ranges is None else ranges:
        for start, count in row_pieces(high - low, rows[low:high].nbytes, block_bytes):
            yield low + start, rows[low + start : low + start + count]
