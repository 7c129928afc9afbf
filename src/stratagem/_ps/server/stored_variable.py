"""A variable in a store, and how a store gets its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Allocate: TypeAlias = Callable[[int, tuple[int, ...], torch.dtype, bool], Tensor]
"""Returns memory for a variable, given its number, shape and dtype, and whether only to reserve addresses."""


@dataclass(slots=True)
class StoredVariable:
    """A shard in the server's memory, and how many writes it has seen."""

    name: str
    tensor: Tensor
    version: int = 0


def plain_allocate(
    number: int, shape: tuple[int, ...], dtype: torch.dtype, reserve: bool
) -> Tensor:
    """Return ordinary memory."""
    del number
    return torch.zeros(shape, dtype=dtype) if reserve else torch.empty(shape, dtype=dtype)
