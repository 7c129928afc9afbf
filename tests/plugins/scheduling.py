"""Schedule one function and return its result; count the workers that take closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import stratagem as sg

WAIT_S = 240.0


def run(coordinator: sg.ClusterCoordinator, function: Callable[..., Any], *args: Any) -> Any:
    """Schedule one call, wait for everything, return its result."""
    value = coordinator.schedule(function, args=args)
    coordinator.join(timeout_s=WAIT_S)
    return value.get(timeout_s=WAIT_S)


def workers_up(coordinator: sg.ClusterCoordinator) -> int:
    """Return how many workers take closures now."""
    return sum(worker.connected for worker in coordinator.workers)
