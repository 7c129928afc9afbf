"""Each replica's own stream of random numbers."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from stratagem._core.context import Replica


class Streams:
    """The random streams of one run."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def of(self, replica: Replica) -> AbstractContextManager[None]:
        """Held by a replica while its function runs."""
        return contextlib.nullcontext()
