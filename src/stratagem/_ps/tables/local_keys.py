"""Keys of a dynamic table whose rows are in this process."""

from __future__ import annotations

import threading
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stratagem._core.key_index import KeyIndex, KeyRule
from stratagem._core.key_map import Ints

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
