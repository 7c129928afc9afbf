"""The base checkpoint of the next delta, and the decision between a delta and a full save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from stratagem._checkpoint.directory import SavedCheckpoint
from stratagem._ps.blocks.manifest import NAME, StoredTensor


@final
class DeltaBase:
    """The last checkpoint of a manager, and the cuts of the servers that it was written from.

    Args:
        full_every: every so many saves, one is full.
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._parent: SavedCheckpoint | None = None
        self._deltas = 0
        self._cuts: dict[tuple[Any, int], int] = {}

    def cut_of(self, variables: Any, server: int) -> int:
        """Return the number of a server's cut in the last checkpoint; 0 if there was none."""
        return self._cuts.get((variables, server), 0)

    def parent_of(
        self, tensors: Mapping[str, StoredTensor], *, delta_bytes: int, full_bytes: int
    ) -> SavedCheckpoint | None:
        """Return the checkpoint that the next save is to be built on; None for a full save.

        A delta has the same tensors as its parent.
        """
        parent = self._parent
        is_full = (
            parent is None
            or self._deltas + 1 >= self._full_every
            # A larger delta costs more at restore than it saves.
            or 2 * delta_bytes > full_bytes
            or dict(parent.manifest.tensors) != dict(tensors)
            or not (parent.path / NAME).exists()
        )
        return None if is_full else parent

    def note(self, saved: SavedCheckpoint, cuts: Mapping[tuple[Any, int], int]) -> None:
        """Note a complete checkpoint, and the cuts it was written from."""
        self._deltas = self._deltas + 1 if saved.manifest.is_delta else 0
        self._parent, self._cuts = saved, dict(cuts)
