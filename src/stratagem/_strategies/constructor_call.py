"""Arguments of a strategy's constructor, from its attributes, and the expression that creates it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from stratagem._core.devices import Device, parse_device


def arguments_of(strategy: object) -> dict[str, Any]:
    """Return the arguments that create an equal strategy: attribute ``_x`` for parameter ``x``, devices by name."""
    names = inspect.signature(type(strategy)).parameters
    return {name: _plain(getattr(strategy, f"_{name}")) for name in names}


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


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], Device):
        return [each.name for each in value]
    return value.name if isinstance(value, Device) else value


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    is_device = isinstance(value, str) and "/device:" in value
    return parse_device(value).short if is_device else value
