"""Hash map from int64 keys to row numbers, for whole arrays at once; hashes of keys.

Open addressing with linear probing in one NumPy array. A lookup of 26,000 keys in a map of a million takes about
as long as sorting them (docs/design/0012). Pure: NumPy only.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from typing_extensions import override

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"
Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

_EMPTY: Final = 0
_DELETED: Final = 1
_FIRST: Final = 2
"""Stored values are row numbers plus this, so that new memory is an empty map."""

_SMALLEST: Final = 1 << 10

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix(words: Words) -> Words:
    """Return well-distributed numbers (the finaliser of SplitMix64); the argument is overwritten."""
    words ^= words >> np.uint64(30)
    words *= _MIX[0]
    words ^= words >> np.uint64(27)
    words *= _MIX[1]
    words ^= words >> np.uint64(31)
    return words


def hash_keys(keys: Ints, seed: int = 0) -> Words:
    """Return a hash of each key, the same in every process.

    Example:
        >>> hash_keys(np.array([1, 2])) % np.uint64(10)
        array([8, 9], dtype=uint64)
    """
    words = keys.astype(np.int64, copy=False).view(np.uint64) * _GOLDEN
    words += np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & ((1 << 64) - 1))
    return mix(words)


def uniform_numbers(keys: Ints, seed: int) -> Floats:
    """Return a number in 0 … 1 for each key."""
    return (hash_keys(keys, seed) >> np.uint64(11)) * 2.0**-53


def initial_rows(keys: Ints, width: int, *, seed: int, kind: str, scale: float) -> Floats:
    """Return the first values of the rows of these keys; they depend on key and seed alone.

    Args:
        keys: the keys.
        width: numbers in a row.
        seed: of the table.
        kind: ``normal`` (standard deviation `scale`), ``uniform`` (from -`scale` to `scale`) or ``zeros``.
        scale: see `kind`.

    Example:
        >>> initial_rows(np.array([7]), 3, seed=1, kind="uniform", scale=0.5).shape
        (1, 3)
    """
    if kind == "zeros":
        return np.zeros((keys.size, width))
    base = hash_keys(keys, seed)[:, None]
    columns = np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
    words = mix(base + columns)
    if kind == "uniform":
        return ((words >> np.uint64(11)) * 2.0**-52 - 1.0) * scale
    first = ((words >> np.uint64(32)) + np.uint64(1)) * 2.0**-32
    second = (words & np.uint64(0xFFFFFFFF)) * 2.0**-32
    result: Floats = np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second) * scale
    return result


class KeyMap:
    """Map from keys to numbers from 0.

    Example:
        >>> known = KeyMap()
        >>> known.insert(np.array([40, -7]), np.array([0, 1]))
        >>> known.find(np.array([-7, 3, 40]))
        array([ 1, -1,  0])
    """

    def __init__(self) -> None:
        self._entries: Ints = np.zeros((_SMALLEST, 2), np.int64)  # key, number + _FIRST
        self._size = 0
        self._deleted = 0

    def __len__(self) -> int:
        return self._size

    def find(self, keys: Ints) -> Ints:
        """Return the number of each key, -1 for keys that are not here."""
        found = np.full(keys.size, -1, np.int64)
        if not self._size or not keys.size:
            return found
        # 16 bytes as one item: a single gather for key and number.
        pairs = self._entries.view(np.complex128).reshape(-1)
        last = pairs.size - 1
        places = (hash_keys(keys) & np.uint64(last)).view(np.int64)
        wanted, where = keys, None
        while True:
            entries = pairs.take(places).view(np.int64).reshape(-1, 2)
            numbers = entries[:, 1]
            is_hit = (entries[:, 0] == wanted) & (numbers >= _FIRST)
            if where is None:
                np.copyto(found, numbers - _FIRST, where=is_hit)
            else:
                found[where[is_hit]] = numbers[is_hit] - _FIRST
            left = np.flatnonzero(~is_hit & (numbers != _EMPTY))
            if not left.size:
                return found
            wanted = wanted[left]
            where = left if where is None else where[left]
            places = (places[left] + 1) & last

    def keys(self) -> Ints:
        """Return all keys in the order of their numbers, which must be 0, 1, 2 and so on."""
        used = self._entries[self._entries[:, 1] >= _FIRST]
        found = np.empty(len(used), np.int64)
        found[used[:, 1] - _FIRST] = used[:, 0]
        return found

    def insert(self, keys: Ints, numbers: Ints) -> None:
        """Add keys that are not here yet, each once, with their numbers."""
        self._make_space(keys.size)
        entries, last = self._entries, len(self._entries) - 1
        places = (hash_keys(keys) & np.uint64(last)).view(np.int64)
        values = numbers + _FIRST
        self._size += keys.size
        while keys.size:
            is_free = entries[places, 1] < _FIRST
            free = np.flatnonzero(is_free)
            self._deleted -= int(np.count_nonzero(entries[np.unique(places[free]), 1] == _DELETED))
            entries[places[free], 0] = keys[free]
            entries[places[free], 1] = values[free]
            # Of several keys for one place the last one written is there; the others go on.
            is_done = is_free & (entries[places, 1] == values) & (entries[places, 0] == keys)
            left = np.flatnonzero(~is_done)
            keys, values, places = keys[left], values[left], (places[left] + 1) & last

    def delete(self, keys: Ints) -> None:
        """Remove keys that are here, each given once."""
        last = len(self._entries) - 1
        places = (hash_keys(keys) & np.uint64(last)).view(np.int64)
        self._size -= keys.size
        self._deleted += keys.size
        while keys.size:
            is_hit = (self._entries[places, 0] == keys) & (self._entries[places, 1] >= _FIRST)
            self._entries[places[is_hit], 1] = _DELETED
            left = np.flatnonzero(~is_hit)
            keys, places = keys[left], (places[left] + 1) & last

    def _make_space(self, more: int) -> None:
        """Grow, and drop deleted entries, if less than half of the places would be empty."""
        wanted = self._size + more
        if 2 * (wanted + self._deleted) <= len(self._entries):
            return
        used = self._entries[self._entries[:, 1] >= _FIRST]
        size = len(self._entries)
        while size < 3 * wanted:
            size *= 2
        self._entries = np.zeros((size, 2), np.int64)
        self._size = self._deleted = 0
        self.insert(used[:, 0], used[:, 1] - _FIRST)

    @override
    def __repr__(self) -> str:
        return f"<KeyMap {self._size} keys>"
