"""Optimizer state of a store as records and blocks of rows, for a copy of the whole store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from stratagem._ps.server.row_operations import row_blocks
from stratagem._ps.server.shard_optimizer import ServerOptimizer
from stratagem._ps.store_records import Block, StateRecord
from stratagem._wire import codec


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


def exported_state(
    optimizers: Mapping[int, ServerOptimizer],
    block_bytes: int | None,
    ranges: Callable[[int], list[tuple[int, int]] | None],
) -> Iterator[Block]:
    """Yield the rows of the optimizers' tensors; `ranges` returns those in use of a dynamic table."""
    for number, optimizer in optimizers.items():
        for entry in optimizer.state_entries():
            if isinstance(entry.value, Tensor):
                used = ranges(entry.variable) if entry.value.dim() else None
                for start, stop, rows in row_blocks(entry.value, block_bytes, used):
                    yield Block("optimizer", entry.variable, entry.key, start, stop, rows, number)
