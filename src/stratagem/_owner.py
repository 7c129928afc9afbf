"""`Owner`: base class of objects that must be closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self, final


class Owner(ABC):
    """Owner of threads, processes, sockets or memory; a ``with`` block releases them at its end."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release everything that is owned; a second call does nothing."""

    @final
    def __enter__(self) -> Self:
        return self

    @final
    def __exit__(self, *failure: object) -> None:
        self.close()
