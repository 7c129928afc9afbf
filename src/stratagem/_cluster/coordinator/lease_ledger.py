"""Decide which elements of a shared dataset a closure gets, and account for every element.

Pure: no thread, clock, file or socket. Its owner calls a method for every event of a closure, holding the
engine's lock (docs/design/0011).

A dataset has *parts*, such as row groups of a file. An epoch reads `interleave` parts at a time, in turn, so that
workers can read different parts. The order does not depend on workers, failures or time. So a position is a few
numbers, and a program that continues leases the same elements to the same closures.

States of a lease::

    order ──lease──▶ held by a closure ──finished──▶ trained
               ▲            │
               └─returned───┴─ended without a result──▶ lost, or returned

A lease belongs to its closure, wherever and however often the closure runs. A closure that ends without a result
before it ran gives its lease back. If it may have run, its elements are *in doubt*: they were trained, in part or
not at all. With `at_least_once` they are leased again and count as repeated; otherwise they count as lost.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from typing_extensions import override

from stratagem._data.seeds import mix, permutation
from stratagem._ps.number_ranges import NumberRanges


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
        self._steps = self._walk(epoch)
        self._ahead: Lease | int | None = None  # the first step that was not taken

    def begin_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self._begin(self.epoch + 1)

    @property
    def unsized(self) -> int | None:
        """The part whose size is needed before `next`; None if there is none."""
        if not isinstance(self._ahead, Lease):
            self._ahead = next(self._steps, None)
        return self._ahead if isinstance(self._ahead, int) else None

    def next(self) -> Lease | None:
        """Return the next lease of the epoch; None at its end. `unsized` must be None."""
        part = self.unsized
        assert part is None, f"the size of part {part} is not known"
        lease, self._ahead = self._ahead, None
        if not isinstance(lease, Lease):
            return None
        self.leased += 1
        return lease

    def _walk(self, epoch: int) -> Iterator[Lease | int]:
        """Yield the leases of an epoch; and, until its size is known, the part that comes next."""
        count = len(self.sizes)
        order = (
            permutation(mix(self.seed, epoch), count).tolist() if self._shuffled else range(count)
        )
        parts, number = iter(order), 0
        opened: deque[tuple[int, int]] = (
            deque()
        )  # parts that are read in turn, with their next element
        while True:
            while len(opened) < self.interleave and (part := next(parts, None)) is not None:
                while self.sizes[part] is None:
                    yield part
                if self.sizes[part]:
                    opened.append((part, 0))
            if not opened:
                return
            part, first = opened.popleft()
            left = (self.sizes[part] or 0) - first
            taken = min(self.per_closure, left)
            yield Lease(number, epoch, part, first, taken)
            number += 1
            if taken < left:
                opened.append((part, first + taken))

    def leases_of(self, epoch: int) -> Iterator[Lease]:
        """Yield the leases of an epoch from its beginning, as far as sizes are known."""
        for lease in self._walk(epoch):
            if not isinstance(lease, Lease):
                return
            yield lease

    def state(self) -> dict[str, Any]:
        """Return the position, as plain values."""
        return {"seed": self.seed, "epoch": self.epoch, "leased": self.leased}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position. The sizes of all parts before it are known."""
        self.seed = state["seed"]
        self._begin(state["epoch"])
        for _ in range(state["leased"]):
            self.next()

    @override
    def __repr__(self) -> str:
        return f"<LeaseOrder epoch {self.epoch}, {self.leased} leased>"


@dataclass(slots=True)
class _Held:
    lease: Lease
    in_doubt: bool  # the elements may have been trained by an earlier closure
    ran: bool = False  # this closure may have run, in part, on a worker that was lost


class _Returned(NamedTuple):
    lease: Lease
    in_doubt: bool


def _place(returned: _Returned) -> tuple[int, int]:
    return returned.lease.epoch, returned.lease.number


@final
class LeaseLedger:
    """The leases of one shared dataset.

    Args:
        order: the order of leases, at its beginning.
        passes: epochs after which `lease` reports the end; None for no end.
        at_least_once: lease elements in doubt again.

    Attributes:
        rows: number of rows trained, in all epochs.
        repeated: leases that were perhaps trained twice.
        lost: leases that were perhaps not trained, and will not be.

    Example:
        >>> ledger = LeaseLedger(LeaseOrder([2]))
        >>> ledger.lease(7).first, ledger.lease(8).first, ledger.lease(9)
        (0, 1, None)
        >>> ledger.finished(7, elements=1, rows=32, exactly_once=True)
        >>> ledger
        <LeaseLedger epoch 0: 2 leased, 1 held, 0 returned, 32 rows trained, 0 repeated, 0 lost>
    """

    def __init__(
        self, order: LeaseOrder, *, passes: int | None = 1, at_least_once: bool = False
    ) -> None:
        self.order = order
        self.rows = 0
        self.repeated: list[Lease] = []
        self.lost: list[Lease] = []
        self._passes = passes
        self._at_least_once = at_least_once
        self._ended = False  # the end was reported: the next lease begins another pass
        self._passed = 0  # epochs of this pass that have been leased completely
        self._held: dict[int, _Held] = {}
        self._returned: list[_Returned] = []  # in order
        self._trained: dict[int, NumberRanges] = {}  # numbers of leases, by epoch

    # ------------------------------------------------------------------ events

    def lease(self, closure: int) -> Lease | None:
        """Lease the next elements to a closure; None, once, at the end of the data.

        The owner has made sure that `order.unsized` is None.
        """
        if self._returned:
            lease, in_doubt = self._returned.pop(0)
            if self._ended:  # reported too early: it will be reported again
                self._ended, self._passed = False, self._passed - 1
        else:
            found = self._next()
            if found is None:
                return None
            lease, in_doubt = found, False
        self._held[closure] = _Held(lease, in_doubt)
        return lease

    def _next(self) -> Lease | None:
        if self._ended:
            self._ended, self._passed = False, 0
            self.order.begin_epoch()
        found = self.order.next()
        if found is not None:
            return found
        self._passed += 1
        if self.order.leased and (self._passes is None or self._passed < self._passes):
            self.order.begin_epoch()  # all sizes are known: the last epoch has read every part
            return self.order.next()
        self._ended = True
        return None

    def finished(self, closure: int, *, elements: int, rows: int, exactly_once: bool) -> None:
        """Handle a result: the closure has read this many elements, with this many rows."""
        held = self._held.pop(closure, None)
        if held is None:
            return  # from before `load`
        lease = held.lease
        self.rows += rows
        unread = lease.elements - elements
        if unread:
            self.lost.append(lease._replace(first=lease.first + elements, elements=unread))
        if elements:
            self._trained.setdefault(lease.epoch, NumberRanges()).add([lease.number])
            if held.in_doubt or (held.ran and not exactly_once):
                self.repeated.append(lease)

    def runs_again(self, closure: int) -> None:
        """Note that a closure may have run in part, and will run again."""
        if closure in self._held:
            self._held[closure].ran = True

    def ended(self, closure: int, *, ran: bool) -> None:
        """Handle a closure that ends without a result. `ran`: it may have run."""
        held = self._held.pop(closure, None)
        if held is not None:
            self._settle(held.lease, in_doubt=ran or held.ran or held.in_doubt)

    def _settle(self, lease: Lease, *, in_doubt: bool) -> None:
        """Lease elements again later, unless they may have been trained and may not be repeated."""
        if in_doubt and not self._at_least_once:
            self.lost.append(lease)
        else:
            bisect.insort(self._returned, _Returned(lease, in_doubt), key=_place)

    # ------------------------------------------------------------------ questions

    @property
    def held(self) -> list[Lease]:
        """Leases of closures that have not ended."""
        return [held.lease for held in self._held.values()]

    @property
    def returned(self) -> list[Lease]:
        """Leases that the next closures get."""
        return [one.lease for one in self._returned]

    def trained(self, epoch: int) -> list[Lease]:
        """Return the leases of an epoch that were trained."""
        numbers = self._trained.get(epoch)
        if numbers is None:
            return []
        return [lease for lease in self.order.leases_of(epoch) if lease.number in numbers]

    # ------------------------------------------------------------------ positions

    def state(self, *, unsent: Collection[int]) -> dict[str, Any]:
        """Return the position as plain values.

        `unsent`: closures that no worker has received. The elements of other closures that have not ended are in
        doubt for a program that continues here.
        """
        return self.snapshot()(unsent)

    def snapshot(self) -> Callable[[Collection[int]], dict[str, Any]]:
        """Return the position as a function of `unsent`, see `state`, which may be known later than the rest."""
        state = self._state(self._trained, self._returned, [])
        held = {
            closure: (list(one.lease), one.in_doubt, one.ran) for closure, one in self._held.items()
        }

        def state_with(unsent: Collection[int]) -> dict[str, Any]:
            returned, doubtful = list(state["returned"]), []
            for closure, (lease, in_doubt, ran) in held.items():
                if closure in unsent and not ran:
                    returned.append([lease, in_doubt])
                else:
                    doubtful.append(lease)
            return {**state, "returned": returned, "in_doubt": doubtful}

        return state_with

    def state_when_finished(self) -> dict[str, Any]:
        """Return the position of a program that continues after all present closures have finished."""
        trained: dict[int, NumberRanges] = {}
        for epoch, numbers in self._trained.items():
            trained[epoch] = NumberRanges()
            trained[epoch].merge(numbers.ranges)
        repeated = []
        for held in self._held.values():
            trained.setdefault(held.lease.epoch, NumberRanges()).add([held.lease.number])
            if held.in_doubt:
                repeated.append(held.lease)
        return self._state(trained, self._returned, repeated)

    def _state(
        self,
        trained: Mapping[int, NumberRanges],
        returned: Sequence[_Returned],
        repeated: Sequence[Lease],
    ) -> dict[str, Any]:
        return {
            "order": self.order.state(),
            "ended": self._ended,
            "passed": self._passed,
            "rows": self.rows,
            "returned": [[list(lease), in_doubt] for lease, in_doubt in returned],
            "in_doubt": [],
            "trained": [[epoch, [list(r) for r in one.ranges]] for epoch, one in trained.items()],
            "repeated": [list(lease) for lease in (*self.repeated, *repeated)],
            "lost": [list(lease) for lease in self.lost],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position. Closures that run still do not count any more."""
        self.order.load(state["order"])
        self._ended, self._passed = state["ended"], state["passed"]
        self.rows = state["rows"]
        self.repeated = [Lease(*lease) for lease in state["repeated"]]
        self.lost = [Lease(*lease) for lease in state["lost"]]
        self._held.clear()
        self._trained = {}
        for epoch, ranges in state["trained"]:
            self._trained[epoch] = numbers = NumberRanges()
            numbers.merge([(start, stop) for start, stop in ranges])
        self._returned = [_Returned(Lease(*lease), doubt) for lease, doubt in state["returned"]]
        self._returned.sort(key=_place)
        for lease in state["in_doubt"]:
            self._settle(Lease(*lease), in_doubt=True)

    @override
    def __repr__(self) -> str:
        return (
            f"<LeaseLedger epoch {self.order.epoch}: {self.order.leased} leased, {len(self._held)} held, "
            f"{len(self._returned)} returned, {self.rows} rows trained, {len(self.repeated)} repeated, "
            f"{len(self.lost)} lost>"
        )
