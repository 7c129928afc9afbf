"""Compact sets of mostly consecutive numbers."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import final

from typing_extensions import override


@final
class NumberRanges:
    """A set of whole numbers, kept as ranges.

    Numbers of finished closures are added in nearly ascending order: the set then is one range and a few more
    around closures that still run, however many have finished.

    Example:
        >>> finished = NumberRanges()
        >>> finished.add([1, 2, 3, 5])
        >>> finished.ranges, 3 in finished, 4 in finished
        (((1, 4), (5, 6)), True, False)
        >>> finished.add([4])
        >>> finished.ranges
        ((1, 6),)
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []  # each behind the last number of its range

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges in ascending order, each as (first, behind the last)."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def __contains__(self, number: int) -> bool:
        index = bisect.bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def add(self, numbers: Iterable[int]) -> None:
        """Add numbers in any order."""
        for number in sorted(numbers):
            self._add_range(number, number + 1)

    def merge(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Add ranges as `ranges` returned them."""
        for start, stop in ranges:
            if start < stop:
                self._add_range(start, stop)

    def _add_range(self, start: int, stop: int) -> None:
        # All ranges that touch the new one become one with it.
        first = bisect.bisect_left(self._stops, start)
        last = bisect.bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    @override
    def __repr__(self) -> str:
        return f"<NumberRanges {len(self._starts)} ranges>"
