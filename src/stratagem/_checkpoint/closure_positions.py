"""Positions of shared datasets and similar objects, with the closures that a saved position includes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ClosurePosition(Protocol):
    """Object whose position depends on which closures have finished."""

    def pinned(self) -> AbstractContextManager[None]:
        """Let `state_dict` return the present position inside the context."""

    def state_dict_when_finished(self) -> dict[str, Any]:
        """Return the position of a program that continues when all present closures have finished."""


def pin_positions(live: Iterable[object]) -> ExitStack:
    """Return a context in which the positions of these objects do not change.

    Enter it before the servers make their cuts: closures that have finished by then are in the cuts.
    """
    pins = ExitStack()
    for value in live:
        if isinstance(value, ClosurePosition):
            pins.enter_context(value.pinned())
    return pins
