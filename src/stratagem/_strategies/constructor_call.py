"""Format the expression that creates a strategy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from stratagem._core.devices import parse_device


def constructor_call(kind: type, arguments: Mapping[str, Any]) -> str:
    """Return the expression, with short device names and without arguments that have their default values.

    Example:
        >>> import stratagem as sg
        >>> constructor_call(
        ...     sg.OneDeviceStrategy, {"device": "/job:localhost/replica:0/task:0/device:CPU:1"}
        ... )
        "OneDeviceStrategy(device='cpu:1')"
    """
    parameters = inspect.signature(kind).parameters
    parts = ", ".join(
        f"{name}={_short(value)!r}"
        for name, value in arguments.items()
        if name not in parameters or value != parameters[name].default
    )
    return f"{kind.__name__}({parts})"


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    is_device = isinstance(value, str) and "/device:" in value
    return parse_device(value).short if is_device else value
