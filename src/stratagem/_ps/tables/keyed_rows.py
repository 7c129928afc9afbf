"""Sizes of dynamic tables, and their initialisation on servers.

A module makes its tensors with ``torch.empty_strided((KeyedRows(…), width), …)``. To torch the size is an ordinary number. The scope of
a parameter-server strategy finds the table's rule in it and makes a table on servers.
"""

from __future__ import annotations

from typing import Self

from stratagem._core.key_index import KeyRule
from stratagem._ps.init_ops import KEYED_ROWS, KEYED_ROWS_ON_DISK, KEYS_OF
from stratagem._ps.placement import Description
from stratagem._ps.types import InitOp


class KeyedPart:
    """Rows or keys of a dynamic table.

    Args:
        rule: the table's settings.
        rows: of keys, the part with the rows; None for the rows themselves.
    """

    def __init__(self, rule: KeyRule, rows: KeyedPart | None = None) -> None:
        self.rule = rule
        self._rows = rows
        self._place: Description | None = None

    @property
    def is_on_disk(self) -> bool:
        """True if this part is in a file: rows may be, keys are not."""
        return self.rule.on_disk and self._rows is None

    @property
    def rows_at(self) -> Description | None:
        """Place of the rows of the part with the keys."""
        return None if self._rows is None else self._rows._place

    def note_place(self, place: Description) -> None:
        """Note where this part is."""
        self._place = place

    def recipes(self, place: Description) -> list[InitOp]:
        """Return the initialisation of each shard."""
        if self._rows is None:
            name = KEYED_ROWS_ON_DISK if self.is_on_disk else KEYED_ROWS
            return [InitOp(name)] * len(place.shards)
        rows = self.rows_at
        assert rows is not None
        size = self.rule.bucket_rows
        return [
            InitOp(
                KEYS_OF, (float(shard.number), float(start // size), *numbers), seed=self.rule.seed
            )
            for shard, start, numbers in zip(
                rows.shards,
                rows.layout.offsets,
                [self.rule.numbers()] * len(rows.shards),
                strict=True,
            )
        ]


class KeyedRows(int):
    """Number of rows of a part of a dynamic table.

    Example:
        >>> import torch
        >>> part = KeyedPart(KeyRule(width=4, max_rows=100, seed=0))
        >>> torch.empty((KeyedRows.of(part), 4)).shape
        torch.Size([100, 4])
    """

    part: KeyedPart

    @classmethod
    def of(cls, part: KeyedPart) -> Self:
        """Return the number of rows of a part."""
        made = cls(part.rule.rows)
        made.part = part
        return made
