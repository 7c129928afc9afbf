"""Pickle users' modules, closure variables, weak references and scripted functions for workers.

Modules of the user's program are sent by value, others by name.
"""

from __future__ import annotations

import builtins
import functools
import io
import pkgutil
import sys
import types
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any, Final, NoReturn

import torch
from typing_extensions import override

from stratagem._wire.unpicklable import path_to

_KEPT = frozenset({"__name__", "__doc__", "__file__", "__package__"})
_CACHED: Final = type(functools.cache(len))


class NotSent:
    """Stands, on a worker, for a variable of a module that cannot be pickled. Every use of it raises an error."""

    def __init__(self, name: str, reason: str) -> None:
        self.__dict__.update(name=name, reason=reason)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        held = self.__dict__
        raise TypeError(
            f"{held['name']} was not sent to the workers: {held['reason']}. Create it inside the function, or "
            "with create_per_worker_resource."
        )

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":  # pickle and inspect look for such names
            raise AttributeError(name)
        self._refuse()

    __call__ = __enter__ = __exit__ = __iter__ = __len__ = __bool__ = __contains__ = _refuse
    __getitem__ = __setitem__ = __add__ = __radd__ = __mul__ = __rmul__ = _refuse

    @override
    def __repr__(self) -> str:
        return f"<{self.__dict__['name']}, not sent>"


def fill_module(module: types.ModuleType, state: Mapping[str, Any]) -> None:
    """Give a module its variables.

    Example:
        >>> made = types.ModuleType("made")
        >>> fill_module(made, {"rate": 0.5})
        >>> made.rate
        0.5
    """
    module.__dict__.update(state)
    module.__dict__["__builtins__"] = builtins.__dict__


def variables_of(module: types.ModuleType) -> dict[str, Any]:
    """Return the variables of a module that are sent."""
    return {
        name: value
        for name, value in vars(module).items()
        if name in _KEPT or not (name[:2] == "__" and name[-2:] == "__")
    }


def sendable_variables(
    module: types.ModuleType, failure: Callable[[Any], Exception | None]
) -> dict[str, Any]:
    """Return the variables of a module, a `NotSent` in place of each one that cannot be sent.

    Args:
        module: the module.
        failure: returns the error with which a value cannot be pickled, None if it can.
    """
    found = variables_of(module)
    for name, value in found.items():
        error = failure(value)
        if error is not None:
            full = f"{module.__name__}.{name}"
            path = path_to(value, full, lambda part: failure(part) is None)
            found[name] = NotSent(full, f"{error}, at {path}")
    return found


def find_by_name(name: str) -> Any:
    """Return a module, or an attribute of one, by its dotted name.

    Example:
        >>> import torch
        >>> find_by_name("torch.ops.aten") is torch.ops.aten
        True
    """
    found = sys.modules.get(name)
    return pkgutil.resolve_name(name) if found is None else found


def importable_name(obj: object) -> str | None:
    """Return the name of an object that pickle does not find by name, but a worker does.

    These are modules of a class of their own (``torch.ops``, ``torch.backends.cudnn``), builtin functions whose
    name the program has given to another function (``builtins.print = …``), and classes of extension modules under
    another name (``torch.nn.attention.SDPBackend``).
    """
    if type(obj).__name__ == "pybind11_type":
        kind: Any = obj
        module = sys.modules.get(kind.__module__)
        if getattr(module, kind.__qualname__, None) is not obj:
            names = [name for name, value in vars(module).items() if value is obj] if module else []
            return f"{kind.__module__}.{names[0]}" if names else None
        return None
    if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
        try:
            return obj.__name__ if find_by_name(obj.__name__) is obj else None
        except (ImportError, AttributeError, ValueError):  # it has no such name, or no valid one
            return None
    if type(obj) is types.BuiltinFunctionType and isinstance(obj.__self__, types.ModuleType):
        is_replaced = getattr(obj.__self__, obj.__name__, obj) is not obj
        return f"{obj.__self__.__name__}.{obj.__name__}" if is_replaced else None
    return None


def reduce_special(
    obj: object,
    describe: Callable[[object], object | None] | None,
    sent_by_value: Container[str] = (),
) -> tuple[Any, ...] | None:
    """Return how to pickle an object that pickle cannot: a closure variable, a weak reference, a scripted function.

    Pickle sends a function with a cache (``functools.cache``, ``lru_cache``) by name. One of the user's program is sent as
    the function and an empty cache, because workers need not have the program.

    A weak reference is sent only if it refers to an object that the strategy manages: nothing else is sure to exist on the
    worker after it was unpickled.

    Args:
        obj: any object.
        describe: returns the token of an object that the strategy manages, None for any other object.
        sent_by_value: the names of the modules whose functions are sent by value.
    """
    if type(obj) is types.CellType:
        return reduce_cell(obj)
    if type(obj) is _CACHED:
        cached: Any = obj
        is_users = cached.__module__ == "__main__" or cached.__module__ in sent_by_value
        if not is_users and "<locals>" not in cached.__qualname__:
            return None
        return with_cache, (cached.__wrapped__, cached.cache_parameters())
    if type(obj) is weakref.ReferenceType:
        referent = obj()
        managed = describe is not None and referent is not None and describe(referent) is not None
        return (weakref.ref, (referent,)) if managed else None
    if type(obj) is torch.jit.ScriptFunction:
        scripted: Any = obj
        arguments = enumerate(scripted.schema.arguments)
        defaults = {
            one.name: (place, one.default_value)
            for place, one in arguments
            if one.has_default_value()
        }
        return load_scripted, (bytes(scripted.save_to_buffer()), defaults)
    return None


def with_cache(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function with an empty cache.

    Example:
        >>> cached = with_cache(lambda x: x + 1, {"maxsize": None, "typed": False})
        >>> cached(1), cached(1), cached.cache_info().hits
        (2, 2, 1)
    """
    cached: Callable[..., Any] = functools.lru_cache(**settings)(function)
    return cached


def load_scripted(data: bytes, defaults: Mapping[str, tuple[int, Any]]) -> Callable[..., Any]:
    """Return a function that ``torch.jit.script`` has compiled.

    Args:
        data: the compiled function, without the default values of its arguments.
        defaults: place and default value of an argument, by name.
    """
    function = torch.jit.load(io.BytesIO(data)).forward

    def call(*args: Any, **kwargs: Any) -> Any:
        missing = {name: value for name, (place, value) in defaults.items() if place >= len(args)}
        return function(*args, **{**missing, **kwargs})

    return call


def leave_unnamed(names: dict[str, Any], code: types.CodeType) -> None:
    """Remove the module's name from the globals of a function that travels by value.

    `torch.compile` looks up globals in the module of that name. On a worker that is another module: `__main__` of the
    worker, or a module in its initial state. The name stays if the function reads it to define a class; a function that
    names ``__name__`` gets it with its other globals.
    """
    if not _defines_class(code):
        names.pop("__name__", None)


def _defines_class(code: types.CodeType) -> bool:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return any("__module__" in each.co_names or _defines_class(each) for each in inner)


def reduce_cell(cell: types.CellType) -> tuple[Any, ...]:
    """Return how to pickle the cell of a closure variable: the cell, then its value, which may refer to it."""
    try:
        value = cell.cell_contents
    except ValueError:  # the variable has no value yet
        return types.CellType, ()
    return types.CellType, (), (value,), None, None, fill_cell


def fill_cell(cell: types.CellType, value: tuple[Any]) -> None:
    """Give a closure variable its value."""
    cell.cell_contents = value[0]
