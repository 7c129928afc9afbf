"""A variable in a store, and how a store gets its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from stratagem._ps.init_ops import MemoryKind
from stratagem._ps.types import InitOp
from stratagem._wire.shm import zeros_on_disk

Allocate: TypeAlias = Callable[[int, tuple[int, ...], torch.dtype, MemoryKind], Tensor]
"""Returns memory for a variable, given its number, shape, dtype and the kind of memory."""


@dataclass(slots=True)
class StoredVariable:
    """A shard in the server's memory, and how many writes it has seen."""

    name: str
    tensor: Tensor
    version: int = 0
    recipe: tuple[InitOp, ...] = ()
    """How a variable that uses its memory bit by bit was initialised: a copy is made in the same way."""


def plain_allocate(
    number: int, shape: tuple[int, ...], dtype: torch.dtype, kind: MemoryKind
) -> Tensor:
    """Return ordinary memory, or a file."""
    del number
    if kind == "disk":
        return zeros_on_disk(shape, dtype)
    make = torch.empty if kind == "memory" else torch.zeros
    return make(shape, dtype=dtype)
