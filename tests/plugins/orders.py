"""Orders of events for tests of what is pure: thousands of them for the price of a few.

Hypothesis draws one string of bytes per order, and the test reads its events from it: drawing each
event by itself costs a hundred times what the tested code does with it. A failing order still shrinks: to
few bytes, most of them zero, so event 0 should be the dullest one.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

settings.register_profile("nightly", max_examples=50_000, deadline=None)


def examples(ordinary: int) -> int:
    """How many are tried: as many as said, or more under ``--hypothesis-profile=nightly``."""
    return max(ordinary, settings().max_examples)


def orders(ordinary: int, *, events: int) -> Any:
    """Decorates a test that takes `Events`: at least so many orders, of about that many events."""

    def decorate(test: Any) -> Any:
        drawn = st.binary(min_size=events, max_size=3 * events).map(Events)
        return settings(max_examples=examples(ordinary), deadline=None)(given(drawn)(test))

    return decorate


class Events:
    """Choices read from bytes, one after another.

    Example:
        >>> events = Events(bytes([7, 1, 0]))
        >>> events.below(4), events.of("ab"), events.more, events.below(9), events.more
        (3, 'b', True, 0, False)
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def more(self) -> bool:
        return self._at < len(self._data)

    def below(self, count: int) -> int:
        """A number from 0 to count - 1; 0 when all is used up."""
        if self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1] % count

    def of(self, choices: Any) -> Any:
        """One of a sequence."""
        return choices[self.below(len(choices))]

    def __repr__(self) -> str:
        return f"Events({self._data!r})"
