"""Index of a dynamic table: the row of each key, and the decision which keys get and lose rows.

A table has a fixed number of *buckets*, each with the same number of rows. A key belongs to one bucket, by its hash. So the
row of a key does not depend on how many servers share the buckets. Within a bucket, rows are used in the order in
which keys come: rows without a key are never touched and take no memory.

The array of keys has one row of three numbers for each row of the table: key, last use, count. A count of 0 is a row that
was never used, a negative one a free row. Pure: NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from typing_extensions import override

from stratagem._core.key_map import Ints, KeyMap, hash_keys, initial_rows, uniform_numbers

PROTECTED: Final = 64
"""A row that one of so many last lookups used is not evicted: its gradient may be on its way."""

KINDS: Final = ("normal", "uniform", "zeros")
ORDERS: Final = ("", "age", "count")

_BUCKETS: Final = 64
"""Most buckets of a table, and so most shards."""

_BUCKET_ROWS: Final = 256
"""Keys in a bucket, at least, if there are several buckets."""

_SCAN_ROWS: Final = 1 << 14
KEY, LAST_USE, COUNT = range(3)
"""Columns of the array of keys."""


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Settings of a dynamic table.

    Attributes:
        width: numbers in a row.
        max_rows: rows that fit at least.
        seed: of the first values of rows.
        kind: how first values are drawn; see `initial_rows`.
        scale: of the first values.
        admit_after: how often a key must be seen to get a row.
        admit_probability: with which probability it gets one each time that it is seen; 0 for not given.
        max_age: lookups after which an unused row is evicted; 0 for never.
        evict: which rows leave a full bucket: those of the oldest last use (``age``) or the smallest count, or none.
        on_disk: whether the rows are in a file.
    """

    width: int
    max_rows: int
    seed: int
    kind: str = "normal"
    scale: float = 1.0
    admit_after: int = 1
    admit_probability: float = 0.0
    max_age: int = 0
    evict: str = ""
    on_disk: bool = False

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return min(_BUCKETS, max(1, self.max_rows // _BUCKET_ROWS))

    @property
    def bucket_rows(self) -> int:
        """Rows of each bucket: `max_rows` keys fit although hashes fill buckets unevenly."""
        mean = self.max_rows / self.buckets
        return math.ceil(mean + (6 * math.sqrt(mean) if self.buckets > 1 else 0))

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.buckets * self.bucket_rows

    @property
    def admits_at_once(self) -> bool:
        """True if a key gets a row when it is first seen."""
        return self.admit_after <= 1 and not self.admit_probability

    @property
    def tracks_use(self) -> bool:
        """True if every lookup counts, not only the first one of a key."""
        return not self.admits_at_once or bool(self.max_age or self.evict)

    def numbers(self) -> tuple[float, ...]:
        """Return everything but the seed as numbers, for `from_numbers`."""
        kind, order = KINDS.index(self.kind), ORDERS.index(self.evict)
        first = (self.width, self.max_rows, kind, self.scale, self.admit_after)
        more = (self.admit_probability, self.max_age, order, self.on_disk)
        return tuple(map(float, (*first, *more)))

    @classmethod
    def from_numbers(cls, numbers: Sequence[float], seed: int) -> KeyRule:
        """Return the rule of these numbers.

        Example:
            >>> rule = KeyRule(width=4, max_rows=100, seed=3, evict="age")
            >>> KeyRule.from_numbers(rule.numbers(), 3) == rule
            True
        """
        width, rows, kind, scale, after, probability, age, order, on_disk = numbers
        names = KINDS[int(kind)], ORDERS[int(order)]
        return cls(
            width=int(width),
            max_rows=int(rows),
            seed=seed,
            kind=names[0],
            scale=scale,
            admit_after=int(after),
            admit_probability=probability,
            max_age=int(age),
            evict=names[1],
            on_disk=bool(on_disk),
        )

    def bucket_of(self, keys: Ints) -> Ints:
        """Return the bucket of each key."""
        # Other bits than those that give a key its place in a KeyMap.
        return ((hash_keys(keys) >> np.uint64(32)) % np.uint64(self.buckets)).astype(np.int64)

    def first_values(self, keys: Ints) -> np.ndarray[Any, Any]:
        """Return the first values of the rows of these keys."""
        return initial_rows(keys, self.width, seed=self.seed, kind=self.kind, scale=self.scale)

    def needed_sights(self, keys: Ints) -> Any:
        """Return how often each key must be seen until it gets a row."""
        if not self.admit_probability:
            return self.admit_after
        # When a draw with this probability succeeds for the first time; one number per key decides.
        drawn = uniform_numbers(keys, self.seed + 1)
        return np.ceil(np.log1p(-drawn) / math.log1p(-min(self.admit_probability, 1 - 2.0**-53)))


class Resolved(NamedTuple):
    """Rows of keys (-1: none), and the positions of the keys whose rows are new; `again`: rows used before."""

    rows: Ints
    new: Ints
    again: Ints


_NONE: Final[Ints] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """State of a `KeyIndex` beside the array of keys; a copy of both behaves as the original.

    Attributes:
        clock: number of lookups.
        free: rows whose keys have left, in the order in which they are used again within a bucket.
        given: clock when each row that was ever used got its key; empty if rows stay with their keys.
        seen_keys: keys that were seen and have no row.
        seen: how often each of them was seen.
    """

    clock: int = 0
    free: Ints = field(default_factory=lambda: _NONE)
    given: Ints = field(default_factory=lambda: _NONE)
    seen_keys: Ints = field(default_factory=lambda: _NONE)
    seen: Ints = field(default_factory=lambda: _NONE)


class KeyIndex:
    """Keys of consecutive buckets of a table.

    Args:
        rule: the table's settings.
        keys: the array of keys; rows are numbered from 0 here.
        first_bucket: number of the first bucket here.
        before_write: called with the rows whose entries in `keys` are about to change.
        name: of the table, for errors.

    Example:
        >>> rule = KeyRule(width=4, max_rows=100, seed=3)
        >>> index = KeyIndex(rule, np.zeros((rule.rows, 3), np.int64))
        >>> index.resolve(np.array([9, -5]), create=True).rows, len(index)
        (array([0, 1]), 2)
    """

    def __init__(
        self,
        rule: KeyRule,
        keys: Ints,
        first_bucket: int = 0,
        *,
        before_write: Callable[[Ints], None] = lambda rows: None,
        name: str = "table",
    ) -> None:
        self._rule = rule
        self._keys = keys
        self._first_bucket = first_bucket
        self._before_write = before_write
        self._name = name
        self.rebuild()

    def rebuild(self) -> None:
        """Read the array of keys again, after other code has written it."""
        size = self._rule.bucket_rows
        count = len(self._keys) // size
        self._map = KeyMap()
        self._used = [0] * count  # rows of each bucket that were ever used
        self._free: list[Ints] = [_NONE] * count
        self._given_at = np.zeros(0, np.int64)  # clock when each row got its key
        self.now = 0
        self._sights = KeyMap()
        self._seen: Ints = np.zeros(0, np.int64)
        for bucket in range(count):
            start = bucket * size
            for first in range(start, start + size, _SCAN_ROWS):
                part = self._keys[first : min(first + _SCAN_ROWS, start + size)]
                used = int(np.count_nonzero(part[:, COUNT]))
                self._used[bucket] += used
                if used < len(part):
                    break
            rows = self._keys[start : start + self._used[bucket]]
            has_key = rows[:, COUNT] > 0
            taken = np.flatnonzero(has_key)
            self._map.insert(np.ascontiguousarray(rows[taken, KEY]), taken + start)
            self._free[bucket] = np.flatnonzero(~has_key) + start
            if len(rows):
                self.now = max(self.now, int(rows[:, LAST_USE].max()))

    def record(self) -> IndexRecord:
        """Return what a copy needs beside the array of keys."""
        seen_keys = self._sights.keys()
        given = _NONE
        if self._given_at.size and self.rows_used:
            given = np.concatenate([self._given_at[low:high] for low, high in self.rows_used])
        seen = self._seen[: seen_keys.size].copy()
        return IndexRecord(self.now, np.concatenate([_NONE, *self._free]), given, seen_keys, seen)

    def restore(self, record: IndexRecord) -> None:
        """Read the array of keys again, and take the rest from a record."""
        self.rebuild()
        self.now = record.clock
        buckets = record.free // self._rule.bucket_rows
        self._free = [record.free[buckets == bucket] for bucket in range(len(self._used))]
        if record.given.size:
            self._given_at = np.zeros(len(self._keys), np.int64)
            start = 0
            for low, high in self.rows_used:
                self._given_at[low:high] = record.given[start : start + high - low]
                start += high - low
        self._sights.insert(record.seen_keys, np.arange(record.seen_keys.size))
        self._seen = record.seen

    def __len__(self) -> int:
        return len(self._map)

    @property
    def rows_used(self) -> list[tuple[int, int]]:
        """Ranges (first row, row after the last) in which rows were ever used."""
        size = self._rule.bucket_rows
        return [(n * size, n * size + used) for n, used in enumerate(self._used) if used]

    def taken(self) -> Ints:
        """Return the rows that have a key, in ascending order."""
        found = [
            np.flatnonzero(self._keys[first:last, COUNT] > 0) + first
            for first, last in self.rows_used
        ]
        return np.concatenate(found) if found else _NONE

    def find(self, keys: Ints) -> Ints:
        """Return the row of each key, -1 for keys without one."""
        return self._map.find(keys)

    def resolve(self, keys: Ints, *, create: bool, counts: Ints | None = None) -> Resolved:
        """Return the rows of keys, each given once; with `create` count their use, and give new keys a row.

        Args:
            keys: the keys.
            create: whether this is a lookup of a training step.
            counts: how often each key was asked for; once by default.

        Raises:
            MemoryError: the table is full.
        """
        rows = self._map.find(keys)
        if not create:
            return Resolved(rows, _NONE, _NONE)
        self.now += 1
        rule = self._rule
        if rule.max_age and self.now % max(1, rule.max_age // 4) == 0:
            self._evict_old()
            rows = self._map.find(keys)
        if rule.tracks_use:
            known = np.flatnonzero(rows >= 0)
            self._note_use(rows[known], 1 if counts is None else counts[known])
        new = np.flatnonzero(rows < 0)
        if new.size and not rule.admits_at_once:
            new = new[self._admitted(keys[new], None if counts is None else counts[new])]
        if not new.size:
            return Resolved(rows, _NONE, _NONE)
        given, again = self._allocate(keys[new])
        rows[new] = given
        self._before_write(given)
        self._keys[given, KEY] = keys[new]
        self._keys[given, LAST_USE] = self.now
        self._keys[given, COUNT] = 1 if counts is None else counts[new]
        self._map.insert(keys[new], given)
        self._note_given(given)
        return Resolved(rows, new, again)

    def is_older(self, rows: Ints, clock: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each row whether it had its present key at a time of this table's clock."""
        if not self._given_at.size:
            return np.ones(rows.size, np.bool_)
        return self._given_at[rows] <= clock

    # -------------------------------------------------------------- use, admission, eviction

    def _note_use(self, rows: Ints, counts: Any) -> None:
        self._before_write(rows)
        self._keys[rows, LAST_USE] = self.now
        self._keys[rows, COUNT] += counts

    def _note_given(self, rows: Ints) -> None:
        """Note when rows got their keys; only rows that can be evicted can have had another one."""
        if self._rule.max_age or self._rule.evict:
            if not self._given_at.size:
                self._given_at = np.zeros(len(self._keys), np.int64)
            self._given_at[rows] = self.now

    def _admitted(self, keys: Ints, counts: Ints | None) -> Ints:
        """Count sights of keys without a row; return the positions of those that get one now."""
        if len(self._sights) > max(1 << 16, self._rule.max_rows):  # of keys that never came back
            self._sights, self._seen = KeyMap(), np.zeros(0, np.int64)
        places = self._sights.find(keys)
        unknown = np.flatnonzero(places < 0)
        if unknown.size:
            start = len(self._sights)
            places[unknown] = np.arange(start, start + unknown.size)
            self._sights.insert(keys[unknown], places[unknown])
            if places[unknown[-1]] >= self._seen.size:
                grown = np.zeros(max(1 << 10, 2 * (start + unknown.size)), np.int64)
                grown[: self._seen.size] = self._seen
                self._seen = grown
            self._seen[places[unknown]] = 0
        self._seen[places] += 1 if counts is None else counts
        return np.flatnonzero(self._seen[places] >= self._rule.needed_sights(keys))

    def _allocate(self, keys: Ints) -> tuple[Ints, Ints]:
        """Return a free row of the right bucket for each key, and those of them that were used before."""
        buckets = self._rule.bucket_of(keys) - self._first_bucket
        given = np.empty(keys.size, np.int64)
        again = []
        for bucket in np.unique(buckets).tolist():
            places = np.flatnonzero(buckets == bucket)
            rows, is_again = self._rows_in(bucket, places.size)
            given[places] = rows
            if is_again:
                again.append(rows[:is_again])
        return given, np.concatenate(again) if again else _NONE

    def _rows_in(self, bucket: int, count: int) -> tuple[Ints, int]:
        size = self._rule.bucket_rows
        free, used = self._free[bucket], self._used[bucket]
        if free.size + size - used < count:
            self._make_space(bucket, count - (free.size + size - used))
            free = self._free[bucket]
        again, self._free[bucket] = free[:count], free[count:]
        fresh = count - again.size
        self._used[bucket] += fresh
        start = bucket * size + used
        return np.concatenate([again, np.arange(start, start + fresh)]), int(again.size)

    def _make_space(self, bucket: int, needed: int) -> None:
        rule = self._rule
        if not rule.evict:
            raise MemoryError(
                f"{self._name} is full: it was made for {rule.max_rows} rows. Let rows leave with evict='age' or "
                "evict='count', also after a checkpoint of this table was restored. Or begin a new run with a larger "
                "max_rows: a checkpoint fits only a table with its own max_rows"
            )
        start = bucket * rule.bucket_rows
        part = self._keys[start : start + rule.bucket_rows]
        may_go = np.flatnonzero((part[:, COUNT] > 0) & (part[:, LAST_USE] < self.now - PROTECTED))
        if may_go.size < needed:
            raise MemoryError(
                f"{self._name} is full, and too many of its rows were used in the last {PROTECTED} lookups to "
                f"evict {needed} of {rule.bucket_rows}: begin a new run with a larger max_rows, which is {rule.max_rows}"
            )
        order = (LAST_USE,) if rule.evict == "age" else (LAST_USE, COUNT)
        ranked = may_go[np.lexsort([part[may_go, column] for column in order])]
        # Some more than needed, so that a full table does not evict at every lookup.
        self._evict(ranked[: max(needed, rule.bucket_rows // 16)] + start)

    def _evict_old(self) -> None:
        oldest = self.now - max(self._rule.max_age, PROTECTED)
        rows = self.taken()
        self._evict(rows[self._keys[rows, LAST_USE] < oldest])

    def _evict(self, rows: Ints) -> None:
        if not rows.size:
            return
        self._before_write(rows)
        self._map.delete(np.ascontiguousarray(self._keys[rows, KEY]))
        self._keys[rows, COUNT] = -1
        buckets = rows // self._rule.bucket_rows
        for bucket in np.unique(buckets).tolist():
            self._free[bucket] = np.concatenate([self._free[bucket], rows[buckets == bucket]])

    @override
    def __repr__(self) -> str:
        return f"<KeyIndex of {self._name}: {len(self)} keys, {len(self._keys)} rows>"
