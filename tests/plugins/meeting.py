"""Helpers for functions that run in replicas: the replica's number, and exchanging values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem._core import context


def me() -> int:
    """Return the number of the calling replica."""
    replica = context.current_replica()
    assert replica is not None
    return replica.id


def meet(value: Any, combine: Callable[..., Any], label: str = "here", **options: Any) -> Any:
    """Meets the other replicas of the run (contract 2)."""
    replica = context.current_replica()
    assert replica is not None
    return replica.group.rendezvous(replica.id, label, value, combine, **options)
