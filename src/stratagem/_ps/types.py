"""Types that clients, parameter servers and the coordinator share.

Clients and the coordinator import them from here, never from `_ps/server`.
Small records that also travel in messages are defined in `_wire/messages.py` and named again here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from stratagem._wire.messages import GroupSpec as GroupSpec
from stratagem._wire.messages import InitOp as InitOp
from stratagem._wire.messages import Setting as Setting
from stratagem._wire.messages import WriteId as WriteId

TRANSFER_BYTES: Final = 1 << 26
"""Values larger than this travel in pieces, so that neither side holds much more than the value."""

HyperparameterValue: TypeAlias = float | int | bool | str | Sequence[float | None] | None
Hyperparameters: TypeAlias = Mapping[str, HyperparameterValue]
"""Settings of an optimizer or of one of its parameter groups, by name."""

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types for the bits of any number, by its size in bytes."""


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values; a number that is none (NaN) equals itself.

    Example:
        >>> have_same_bits(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
        True
    """
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if one.is_complex():
        one, other = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
    bits = _BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))


StateValue: TypeAlias = Tensor | float | int | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """Gradient of one variable on one server: dense, or rows (unique ids and their values)."""

    variable: int
    values: Tensor
    ids: Tensor | None = None
    sparse: bool = False
    clock: int = -1
    """Of a dynamic table: its clock when the rows were looked up; -1 if rows never change their keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGradient:
    """Rows of several variables of one server, one after the other; `counts` has the number of each one's rows."""

    variables: tuple[int, ...]
    counts: tuple[int, ...]
    values: Tensor
    ids: Tensor
    sparse: bool = False

    def split(self) -> list[Gradient]:
        """Return the gradient of each variable; memory is not copied."""
        found = []
        start = 0
        for variable, count in zip(self.variables, self.counts, strict=True):
            values, ids = self.values.narrow(0, start, count), self.ids.narrow(0, start, count)
            gradient = Gradient(variable=variable, values=values, ids=ids, sparse=self.sparse)
            found.append(gradient)
            start += count
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One value that an optimizer keeps under `key` for one variable."""

    variable: int
    key: str
    value: StateValue


def row_pieces(rows: int, nbytes: int, piece_bytes: int | None = None) -> list[tuple[int, int]]:
    """Return (start, count) of the row ranges in which `nbytes` bytes of `rows` rows travel.

    A piece has at most `piece_bytes` bytes, by default `TRANSFER_BYTES`, or is one row.

    Example:
        >>> row_pieces(10, 400, piece_bytes=160)
        [(0, 4), (4, 4), (8, 2)]
    """
    step = max(1, (piece_bytes or TRANSFER_BYTES) * rows // max(1, nbytes))
    return [(start, min(step, rows - start)) for start in range(0, rows, step)]
