"""`Owner`: whoever creates something that must be closed is a context manager, and closes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self, final


class Owner(ABC):
    """Owns threads, processes, sockets or memory; the end of a ``with`` block gives them back."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back everything that is owned; calling it again does nothing."""

    @final
    def __enter__(self) -> Self:
        return self

    @final
    def __exit__(self, *failure: object) -> None:
        self.close()
