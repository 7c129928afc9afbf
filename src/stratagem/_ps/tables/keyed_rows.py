"""Sizes of dynamic tables, and their initialisation on servers.

A module makes its tensors with ``torch.empty_strided((KeyedRows(…), width), …)``. To torch the size is an ordinary number. The scope of
a parameter-server strategy finds the table's rule in it and makes a table on servers.
"""

from __future__ import annotations

import threading
from typing import Any, Final, Self, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stratagem._core.key_index import KeyIndex, KeyRule
from stratagem._core.key_map import Ints
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
        made = cls(part.rule.rows)
        made.part = part
        return made


_stale: Final[dict[int, list[Ints]]] = {}
"""Rows with a new key whose optimizer state is another key's, by the address of their table."""

_lock: Final = threading.Lock()
_has_hook = False


@final
class LocalKeys:
    """Rows of keys of one table. A copy or pickle of it starts anew from the table's array of keys."""

    def __init__(self, rule: KeyRule) -> None:
        self._rule = rule
        self._lock = threading.Lock()
        self._index: KeyIndex | None = None
        self._seen: tuple[int, int] = (0, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalKeys, (self._rule,)

    def index(self, keys: Tensor) -> KeyIndex:
        """Return the index of the array of keys, which is read again if something else has written it."""
        seen = (keys.data_ptr(), keys._version)
        if self._index is None or seen != self._seen:
            self._index = KeyIndex(self._rule, keys.detach().numpy(), name="this DynamicEmbedding")
            self._seen = seen
        return self._index

    def rows(self, keys: Tensor, values: Tensor, wanted: Ints, *, create: bool) -> Ints:
        """Return the row of each wanted key, -1 for none; with `create` make rows in `values` for new keys."""
        with self._lock:
            index = self.index(keys)
            if self._rule.tracks_use:
                unique, places, counts = np.unique(wanted, return_inverse=True, return_counts=True)
                return self._resolve(index, values, unique, counts, create=create)[places]
            found = index.find(wanted)
            new = np.flatnonzero(found < 0) if create else found[:0]
            if new.size:
                unique, places = np.unique(wanted[new], return_inverse=True)
                found[new] = self._resolve(index, values, unique, None, create=True)[places]
            return found

    def _resolve(
        self, index: KeyIndex, values: Tensor, keys: Ints, counts: Ints | None, *, create: bool
    ) -> Ints:
        found = index.resolve(keys, create=create, counts=counts)
        if found.new.size:
            # Through NumPy: a new row is no change that autograd or a strategy should see.
            first = torch.from_numpy(self._rule.first_values(keys[found.new])).to(values.dtype)
            memory = values.detach()
            if memory.dtype == torch.bfloat16:
                memory, first = memory.view(torch.int16), first.view(torch.int16)
            memory.numpy()[found.rows[found.new]] = first.numpy()
            if found.again.size:
                _note_stale(values, found.again)
        return found.rows


def _note_stale(values: Tensor, rows: Ints) -> None:
    global _has_hook
    with _lock:
        _stale.setdefault(values.data_ptr(), []).append(rows)
        if not _has_hook:
            register_optimizer_step_pre_hook(_reset_state)
            _has_hook = True


def _reset_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Set the state of rows with new keys to that before the first step."""
    del args, kwargs
    if not _stale:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            with _lock:
                rows = _stale.pop(parameter.data_ptr(), None)
            if rows is None:
                continue
            ids = torch.from_numpy(np.concatenate(rows))
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape[:1] == parameter.shape[:1]:
                    first = group.get("initial_accumulator_value", 0) if key == "sum" else 0
                    value.index_fill_(0, ids, first)
