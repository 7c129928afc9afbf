"""The order in which the elements of a shared dataset are leased: a pure function of dataset and seed.

A dataset has *parts*, such as row groups of a file. An epoch reads `interleave` parts at a time, in turn, so that
workers can read different parts. The order does not depend on workers, failures or time. So a position is a few
numbers, and a program that continues leases the same elements to the same closures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

from typing_extensions import override

from stratagem._data.seeds import mix, permutation


class Lease(NamedTuple):
    """Consecutive elements of one part, for one closure.

    Attributes:
        number: place in the order of the epoch, from 0.
        epoch: the pass over the data, from 0.
        part: the part, by its number in the dataset.
        first: first element, by its number in the part.
        elements: number of elements.
    """

    number: int
    epoch: int
    part: int
    first: int
    elements: int


@final
class LeaseOrder:
    """Position in the order of leases.

    Args:
        sizes: number of elements of each part; None if it is not known yet, see `unsized`.
        interleave: parts that are read in turn.
        per_closure: elements of a lease; the last lease of a part may have fewer.
        seed: seed of the random numbers of the dataset, and of the order of parts.
        shuffled: whether each epoch has its own order of parts.

    Example:
        >>> order = LeaseOrder([2, 1], interleave=2)
        >>> [order.next()[2:4] for _ in range(3)], order.next()
        ([(0, 0), (1, 0), (0, 1)], None)
    """

    def __init__(
        self,
        sizes: list[int | None],
        *,
        interleave: int = 1,
        per_closure: int = 1,
        seed: int = 0,
        shuffled: bool = False,
    ) -> None:
        self.sizes = sizes
        self.seed = seed
        self._shuffled = shuffled
        self.interleave = interleave
        self.per_closure = per_closure
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.leased = 0
        self._next_part = 0  # place in the order of parts
        # Part and next element of the parts that are read in turn. An ended part leaves a free slot; the
        # next call fills it, so that the order does not depend on when sizes become known.
        self._slots: list[list[int] | None] = [None] * self.interleave
        self._turn = 0
        parts = len(self.sizes)
        self._parts: list[int] = (
            permutation(mix(self.seed, epoch), parts).tolist()
            if self._shuffled
            else list(range(parts))
        )

    def begin_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self._begin(self.epoch + 1)

    @property
    def unsized(self) -> int | None:
        """The part whose size is needed before `next`; None if there is none."""
        wanted = self._slots.count(None)
        for place in range(self._next_part, len(self._parts)):
            if wanted == 0:
                return None
            part = self._parts[place]
            size = self.sizes[part]
            if size is None:
                return part
            wanted -= size > 0
        return None

    def next(self) -> Lease | None:
        """Return the next lease of the epoch; None at its end. `unsized` must be None."""
        slots = self._slots
        if None in slots:
            self._fill_slots()
        for turn in range(self._turn, self._turn + len(slots)):
            place = turn % len(slots)
            slot = slots[place]
            if slot is not None:
                break
        else:
            return None
        part, first = slot
        size = self.sizes[part]
        assert size is not None
        count = min(self.per_closure, size - first)
        slots[place] = [part, first + count] if first + count < size else None
        self._turn = (place + 1) % len(slots)
        self.leased += 1
        return Lease(self.leased - 1, self.epoch, part, first, count)

    def _fill_slots(self) -> None:
        for place, slot in enumerate(self._slots):
            while slot is None and self._next_part < len(self._parts):
                part = self._parts[self._next_part]
                self._next_part += 1
                if self.sizes[part]:
                    self._slots[place] = slot = [part, 0]

    def leases_of(self, epoch: int) -> Iterator[Lease]:
        """Yield the leases of an epoch from its beginning, as far as sizes are known."""
        again = LeaseOrder(
            self.sizes,
            interleave=self.interleave,
            per_closure=self.per_closure,
            seed=self.seed,
            shuffled=self._shuffled,
        )
        again._begin(epoch)
        while again.unsized is None and (lease := again.next()) is not None:
            yield lease

    def state(self) -> dict[str, Any]:
        """Return the position, as plain values."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "leased": self.leased,
            "next_part": self._next_part,
            "slots": [None if slot is None else list(slot) for slot in self._slots],
            "turn": self._turn,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        self.seed = state["seed"]
        self._begin(state["epoch"])
        self.leased = state["leased"]
        self._next_part = state["next_part"]
        self._slots = [None if slot is None else list(slot) for slot in state["slots"]]
        self._turn = state["turn"]

    @override
    def __repr__(self) -> str:
        return f"<LeaseOrder epoch {self.epoch}, {self.leased} leased>"
