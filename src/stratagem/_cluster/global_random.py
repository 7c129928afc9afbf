"""Names for the functions of the global random generators, on the coordinator and on workers."""

from __future__ import annotations

import random
import sys
import types
from typing import Final

import numpy as np

_GENERATORS: Final = (
    (random, random.random.__self__),  # type: ignore[attr-defined]
    (np.random, np.random.rand.__self__),  # type: ignore[attr-defined]
)


def global_function(obj: object) -> str | None:
    """Return the name of a function of Python's or NumPy's global generator, None for another object.

    Such a function is a method of a generator. Pickled as one, it would bring along a copy of the sender's
    generator.

    Example:
        >>> from random import Random, shuffle
        >>> global_function(shuffle), global_function(Random(1).shuffle)
        ('random.shuffle', None)
    """
    if isinstance(obj, types.BuiltinFunctionType | types.MethodType):
        for module, generator in _GENERATORS:
            if obj.__self__ is generator:
                return f"{module.__name__}.{obj.__name__}"
    return None


def find_function(name: str) -> object:
    """Return this process's function of a `global_function` name."""
    module, _, function = name.rpartition(".")
    return getattr(sys.modules[module], function)
