"""A variable in a store, and the allocation of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from stratagem._ps.init_ops import AT_FIRST_USE, RESERVING, MemoryKind, initialise
from stratagem._ps.types import InitOp
from stratagem._wire.shm import zeros_on_disk
from stratagem.errors import CheckpointError

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
    pending: tuple[InitOp, ...] = ()
    """Initialisations to be run before the first use: a checkpoint may be read instead."""
    is_read_into: bool = False
    """True while rows of a checkpoint take the place of pending initialisations."""

    @property
    def is_unwritten(self) -> bool:
        """True if nobody has written to the variable: it has no value, or none but a computed one."""
        return not self.version or bool(self.pending)

    def initialise(self, operations: Sequence[InitOp]) -> None:
        """Run in-place initialisations in order, or at the first use (`AT_FIRST_USE`)."""
        if AT_FIRST_USE in operations:
            self.pending = tuple(one for one in operations if one != AT_FIRST_USE)
            return
        for operation in operations:
            initialise(self.tensor, operation)
            if operation.name in RESERVING:
                self.recipe = (*self.recipe, operation)

    def run_pending(self) -> None:
        """Run the pending initialisations: the variable is used for the first time.

        Raises:
            CheckpointError: a checkpoint is being read in their place.
        """
        if self.is_read_into:
            raise CheckpointError(
                f"{self.name!r} is being restored from a checkpoint, and has no values before: wait until "
                "the restore has ended."
            )
        pending, self.pending = self.pending, ()
        self.initialise(pending)


def plain_allocate(
    number: int, shape: tuple[int, ...], dtype: torch.dtype, kind: MemoryKind
) -> Tensor:
    """Return ordinary memory, or a file."""
    del number
    if kind == "disk":
        return zeros_on_disk(shape, dtype)
    make = torch.empty if kind == "memory" else torch.zeros
    return make(shape, dtype=dtype)
