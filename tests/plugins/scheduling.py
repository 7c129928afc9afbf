"""Scheduling one function and returning its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import stratagem as sg

WAIT_S = 240.0


def run(coordinator: sg.ClusterCoordinator, function: Callable[..., Any], *args: Any) -> Any:
    """Schedules one call, waits for everything, gives what it returned."""
    value = coordinator.schedule(function, args=args)
    coordinator.join(timeout_s=WAIT_S)
    return value.get(timeout_s=WAIT_S)
