"""Which writes a server may apply: duplicates and fenced workers are recognised here.

Pure: a function of the writes seen so far. `store.py` asks before it touches a variable.

Every worker life has an incarnation number given by the coordinator, and numbers its writes to one
server 1, 2, 3, … A connection keeps their order, and after a reconnection unacknowledged writes are
sent again in order; so "not above the last number seen" means "already applied". A closure that is
to count exactly once also numbers its own writes: these are recognised even when another worker,
running the closure again, sends them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import override


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteId:
    """Who writes: worker, its life, the number of the write, and the closure's own number of it."""

    worker: str
    incarnation: int
    sequence: int
    closure: int | None = None
    nth: int = 0


class Admission(enum.Enum):
    """What is to be done with a write."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    FENCED = "fenced"


class WriteLedger:
    """Remembers which writes were admitted.

    Example:
        >>> ledger = WriteLedger()
        >>> first = WriteId(worker="worker:0", incarnation=1, sequence=1)
        >>> ledger.admit(first), ledger.admit(first)
        (<Admission.APPLY: 'apply'>, <Admission.DUPLICATE: 'duplicate'>)
        >>> ledger.fence("worker:0", 1)
        >>> ledger.admit(WriteId(worker="worker:0", incarnation=1, sequence=2))
        <Admission.FENCED: 'fenced'>
    """

    def __init__(self) -> None:
        # worker -> (incarnation, last sequence admitted)
        self._last: dict[str, tuple[int, int]] = {}
        # worker -> lowest incarnation still allowed to write
        self._lowest: dict[str, int] = {}
        # exactly-once closure -> numbers of its writes that were admitted
        self._closures: dict[int, set[int]] = {}
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
            seen = self._closures.setdefault(write.closure, set())
            if write.nth in seen:
                self.duplicates += 1
                return Admission.DUPLICATE
            seen.add(write.nth)
        self.applied += 1
        return Admission.APPLY

    def fence(self, worker: str, incarnation: int) -> None:
        """From now on refuse every write of this incarnation of the worker and of earlier ones."""
        self._lowest[worker] = max(self._lowest.get(worker, 0), incarnation + 1)

    def forget_closures(self, closures: Iterable[int]) -> None:
        """These exactly-once closures are finished: nobody will run them again."""
        for closure in closures:
            self._closures.pop(closure, None)

    @override
    def __repr__(self) -> str:
        return (
            f"<WriteLedger {self.applied} applied, {self.duplicates} duplicates, "
            f"{self.fenced} fenced, {len(self._closures)} closures remembered>"
        )
