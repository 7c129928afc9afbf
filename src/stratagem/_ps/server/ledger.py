"""Decide which writes a server applies: recognise repetitions, refuse fenced workers.

Pure: a function of the writes seen so far. `store.py` asks before it touches a variable.

Every incarnation of a worker has a number given by the coordinator, and numbers its writes to one server
1, 2, 3, … A connection keeps their order, and after a reconnection unacknowledged writes are sent again in
order; so "not above the last number seen" means "already seen". The writes of a closure that counts exactly
once are also numbered within the closure: these are recognised even when another worker, which runs the closure
again, sends them. Once a closure is finished, every further write of it is a late repetition.

Memory is bounded by the closures that run: finished ones are kept as ranges of numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from typing_extensions import override

from stratagem._ps.number_ranges import NumberRanges
from stratagem._ps.types import WriteId
from stratagem._wire.messages import LedgerRecord


class Admission(enum.Enum):
    """Decision about a write."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    FENCED = "fenced"


class WriteLedger:
    """Record of the writes that were admitted.

    Example:
        >>> ledger = WriteLedger()
        >>> first = WriteId("worker:0", incarnation=1, sequence=1)
        >>> ledger.admit(first), ledger.admit(first)
        (<Admission.APPLY: 'apply'>, <Admission.DUPLICATE: 'duplicate'>)
        >>> ledger.fence("worker:0", 1)
        >>> ledger.admit(WriteId("worker:0", incarnation=1, sequence=2))
        <Admission.FENCED: 'fenced'>
    """

    def __init__(self) -> None:
        # worker -> (incarnation, last sequence admitted)
        self._last: dict[str, tuple[int, int]] = {}
        # worker -> lowest incarnation that may still write
        self._lowest: dict[str, int] = {}
        # (unfinished closure, block of 1024 of its writes) -> those that were admitted, as bits
        self._closures: dict[tuple[int, int], int] = {}
        self._finished = NumberRanges()
        self.applied = 0
        self.duplicates = 0
        self.fenced = 0

    def admit(self, write: WriteId) -> Admission:
        """Decide on one write, and remember it if it is to be applied."""
        incarnation, last = self._last.get(write.worker, (0, 0))
        if write.incarnation < max(incarnation, self._lowest.get(write.worker, 0)):
            self.fenced += 1
            return Admission.FENCED
        if write.incarnation > incarnation:
            last = 0
        if write.sequence <= last:
            self.duplicates += 1
            return Admission.DUPLICATE
        self._last[write.worker] = (write.incarnation, write.sequence)
        if write.closure is not None:
            block, bit = (write.closure, write.nth >> 10), 1 << (write.nth & 1023)
            admitted = self._closures.get(block, 0)
            if admitted & bit or (not admitted and write.closure in self._finished):
                self.duplicates += 1
                return Admission.DUPLICATE
            self._closures[block] = admitted | bit
        self.applied += 1
        return Admission.APPLY

    def fence(self, worker: str, incarnation: int) -> None:
        """Refuse every write of this incarnation of the worker, and of earlier ones, from now on."""
        self._lowest[worker] = max(self._lowest.get(worker, 0), incarnation + 1)

    @property
    def finished(self) -> NumberRanges:
        return self._finished

    def finish_closures(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Note closures that are finished, as ranges (first, behind the last)."""
        self._finished.merge(ranges)
        for block in [one for one in self._closures if one[0] in self._finished]:
            del self._closures[block]

    def record(self) -> LedgerRecord:
        """Return everything that is remembered, as plain data."""
        closures = tuple(
            (closure, block, bits.to_bytes(128, "little"))
            for (closure, block), bits in self._closures.items()
        )
        counts = (self.applied, self.duplicates, self.fenced)
        return LedgerRecord(
            dict(self._last), dict(self._lowest), closures, self._finished.ranges, counts
        )

    def restore(self, record: LedgerRecord) -> None:
        """Remember exactly what a record says."""
        self._last, self._lowest = dict(record.last), dict(record.lowest)
        self._closures = {
            (closure, block): int.from_bytes(bits, "little")
            for closure, block, bits in record.closures
        }
        self._finished = NumberRanges()
        self._finished.merge(record.finished)
        self.applied, self.duplicates, self.fenced = record.counts

    @override
    def __repr__(self) -> str:
        unfinished = len({closure for closure, _ in self._closures})
        return (
            f"<WriteLedger {self.applied} applied, {self.duplicates} duplicates, "
            f"{self.fenced} fenced, {unfinished} unfinished closures>"
        )
