"""Find the object that cannot be pickled, for the error message."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

DEPTH: Final = 16
"""Longest path that is followed."""

_MEMBERS: Final = ("_parameters", "_buffers", "_modules")


def path_to(root: Any, name: str, can_pack: Callable[[Any], bool]) -> str:
    """Return the path from an object that cannot be pickled to the part of it that is the reason.

    Args:
        root: the object.
        name: its name, with which the path begins.
        can_pack: returns whether an object can be pickled.

    Example:
        >>> import threading, pickle
        >>> def can_pack(obj):
        ...     try:
        ...         return bool(pickle.dumps(obj))
        ...     except TypeError:
        ...         return False
        >>> path_to({"rates": [1, threading.Lock()]}, "settings", can_pack)
        "settings → ['rates'] → [1]"
    """
    path, seen = [name], {id(root)}
    for _ in range(DEPTH):
        for label, part in _parts(root):
            if id(part) not in seen and not can_pack(part):
                path += [label] if label else []
                seen.add(id(part))
                root = part
                break
        else:
            break
    return " → ".join(path)


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, each with a label."""
    kind = type(obj)
    if kind is types.FunctionType:
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
        held = obj.__globals__
        yield from ((name, held[name]) for name in _names_in(obj.__code__) if name in held)
        yield from (("default argument", one) for one in obj.__defaults__ or ())
    elif kind is types.MethodType:
        yield "self", obj.__self__
        yield "", obj.__func__
    elif kind is functools.partial:
        yield "", obj.func
        yield from _parts(obj.args)
        yield from obj.keywords.items()
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in dict.items(obj))
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from ((f"[{number}]", value) for number, value in enumerate(obj))
    elif not isinstance(obj, types.ModuleType):
        for name, value in list(getattr(obj, "__dict__", {}).items()):
            if name in _MEMBERS:
                yield from dict.items(value)
            elif name.endswith("_hooks") and isinstance(value, dict):
                label = name.strip("_")
                yield from ((f"{label}[{n}]", hook) for n, hook in enumerate(value.values()))
            else:
                yield name, value


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code, and the functions defined in it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
