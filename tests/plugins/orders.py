"""Random orders of events for tests of pure code, and how many cases a test tries.

`make test` tries few cases, `make test-soak` many: tests whose number of cases depends on the run carry
the marker ``scaled``, and a hypothesis profile says how many there are.

| run                                  | `@orders(5000, …)` | `amount(100_000)` |
|--------------------------------------|-------------------:|------------------:|
| `make test`                          |                250 |             2,000 |
| `.ci/run` (profile ``bounded``)      |              5,000 |           100,000 |
| `make test-soak` (profile ``soak``)  |             50,000 |           100,000 |

Hypothesis draws one string of bytes per order, and the test reads its events from it: drawing each event
by itself costs a hundred times as much as the tested code. A failing order still shrinks: to few bytes,
most of them zero, so event 0 should be the least interesting one.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BOUNDED = 1_001
_SLOW = [HealthCheck.too_slow]  # on a busy machine every input takes long
settings.register_profile(
    "bounded", max_examples=BOUNDED, deadline=None, suppress_health_check=_SLOW
)
settings.register_profile("soak", max_examples=50_000, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("busy", deadline=None, suppress_health_check=_SLOW)
settings.load_profile("busy")  # of tests that count their examples themselves


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "scaled: tries more cases in `make test-soak`")


def _is_long_run() -> bool:
    return settings().max_examples > 1_000


def amount(full: int) -> int:
    """Return how many cases to try: all of them in a long run, a fiftieth otherwise."""
    return full if _is_long_run() else max(1, full // 50)


def tries(ordinary: int) -> Any:
    """Decorate a test with ``@given``: `ordinary` many examples in a long run, a twentieth otherwise."""
    count = max(ordinary, settings().max_examples) if _is_long_run() else ordinary // 20

    def decorate(test: Any) -> Any:
        return pytest.mark.scaled(settings(max_examples=count, deadline=None)(test))

    return decorate


def orders(ordinary: int, *, events: int) -> Any:
    """Decorate a test that takes `Events`: `ordinary` many orders of about `events` events each."""

    def decorate(test: Any) -> Any:
        drawn = st.binary(min_size=events, max_size=3 * events).map(Events)
        return tries(ordinary)(given(drawn)(test))

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
        """Return a number from 0 to count - 1; 0 when all bytes are used."""
        if self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1] % count

    def of(self, choices: Any) -> Any:
        """Return one of a sequence."""
        return choices[self.below(len(choices))]

    def __repr__(self) -> str:
        return f"Events({self._data!r})"
