"""Iterator over a worker's dataset that measures the wait for each element."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any, Self, final

from stratagem import metrics


@final
class TimedIterator:
    """Iterator over the elements of another one; the timer ``input.next`` has the waiting times.

    All other attributes are those of the iterator inside, such as the position of a dataset. The worker uses `reads` and
    `at_end` to find functions that began when the dataset was used up.

    Example:
        >>> elements = TimedIterator(iter([1, 2]))
        >>> next(elements), elements.get_next()
        (1, 2)
    """

    def __init__(self, inside: Iterator[Any]) -> None:
        self._inside = inside
        self._waited = metrics.timer("input.next")
        self.reads: list[TimedIterator] = []
        """Iterators of the first two attempts to read. The worker has one list for all its iterators, and clears it."""
        self.at_end = False
        """True if the last attempt to read has found no element."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        began = perf_counter()
        if len(self.reads) < 2:
            self.reads.append(self)
        try:
            element = next(self._inside)
        except StopIteration:
            self.at_end = True
            raise
        self._waited.record(perf_counter() - began)
        return element

    def get_next(self) -> Any:
        """Return the next element."""
        return self.__next__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inside"], name)
