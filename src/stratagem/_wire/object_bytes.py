"""Pickle arbitrary Python objects for another process of the same user. Unpickling can run code."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle


def dump(obj: object) -> bytes:
    """Return any object as bytes; functions of ``__main__`` and lambdas travel by value.

    Example:
        >>> load(dump(lambda value: value + 1))(41)
        42
    """
    data: bytes = cloudpickle.dumps(obj)
    return data


def load(data: bytes) -> Any:
    """Return the object that `dump` was given."""
    return pickle.loads(data)
