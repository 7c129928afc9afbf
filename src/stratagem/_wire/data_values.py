"""Decode results and exceptions of workers as data, without running a worker's code.

The sender replaces objects by calls of the `make_…` functions below (`as_data`). An object of a class is the name of its class
and its fields. The receiver (`find_global`) knows these functions, some immutable types and nothing else. It looks a class up
among the modules that it has imported and the classes that it has sent; it never imports. It sets fields without calling
the class, so neither `__init__` nor `__reduce__` nor `__setstate__` of a class runs.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import pathlib
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from cloudpickle import cloudpickle
from typing_extensions import override

ClassName: TypeAlias = tuple[str, str, str]
"""Module, qualified name, and the number under which cloudpickle sent the class, if it did."""

_ATTRIBUTES: Final = frozenset(("name", "path", "name_from", "obj"))
"""Attributes that exceptions of Python keep neither in a dictionary nor in their arguments."""

_HOOKS: Final = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__del__")


class UntrustedValueError(TypeError):
    """A worker's value is not plain data, and the coordinator does not trust its workers."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the value holds {name!r}, which is not plain data. A coordinator decodes tensors, NumPy arrays, built-in types, "
            f"dataclasses, named tuples, enums and exceptions of its own modules. Return one of these, or, if a compromised "
            f"worker may run code in the coordinator, set ClusterOptions(trust_workers=True) (STRATAGEM_TRUST_WORKERS=1)."
        )


# -- sending ---------------------------------------------------------------------------------------


def as_data(obj: object) -> tuple[Any, ...] | None:
    """Return the call that makes an equal object, as `__reduce__` does; None if the object is no data of a known kind.

    Example:
        >>> make, arguments = as_data(np.array([1, 2]))
        >>> make(*arguments)
        array([1, 2])
    """
    kind = type(obj)
    if isinstance(obj, type):
        return None
    if kind is np.ndarray or isinstance(obj, np.generic):
        return _array_as_data(np.asarray(obj), isinstance(obj, np.generic))
    if isinstance(obj, np.dtype):
        return (make_dtype, (np.lib.format.dtype_to_descr(obj),))
    if isinstance(obj, enum.Enum):
        return (make_enum, (_name_of(kind), obj.value))
    if isinstance(obj, BaseException):
        _, args, *held = _builtin_of(kind).__reduce__(obj)
        return (make_exception, (_name_of(kind), args, vars(obj) | (held[0] if held else {})))
    if isinstance(obj, tuple) and _is_named_tuple(kind):
        return (make_named_tuple, (_name_of(kind), list(obj)))
    if is_dataclass(kind) and _is_plain(kind):
        held = {name: getattr(obj, name) for name in _slots(kind, obj)}
        held |= getattr(obj, "__dict__", {})  # set after the object is made: it may refer to itself
        return (make_dataclass, (_name_of(kind),), held, None, None, fill_dataclass)
    if isinstance(obj, pathlib.PurePath):
        return (make_path, (str(obj),))
    if isinstance(obj, collections.Counter) and kind is collections.Counter:
        return (make_counter, (dict(obj.items()),))
    return None


def _slots(kind: type, obj: object) -> list[str]:
    """Return the fields of a dataclass that are slots and have a value."""
    missing = object()
    return [
        one.name
        for one in fields(kind)
        if isinstance(getattr(kind, one.name, None), types.MemberDescriptorType)
        and getattr(obj, one.name, missing) is not missing
    ]


def _array_as_data(array: np.ndarray[Any, Any], is_scalar: bool) -> tuple[Any, ...]:
    if array.dtype.hasobject:
        return make_object_array, (array.shape, array.ravel().tolist())
    content: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else b""
    description = np.lib.format.dtype_to_descr(array.dtype)
    return make_array, (description, array.shape, pickle.PickleBuffer(content), is_scalar)


def _name_of(kind: type) -> ClassName:
    sent = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(kind, "")
    return kind.__module__, kind.__qualname__, sent


# -- receiving -------------------------------------------------------------------------------------


def _class_of(name: ClassName, is_kind: Callable[[type], bool]) -> Any:
    """Return a class of this process by its name, without an import."""
    module, path, sent = name
    found = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(sent) if sent else None
    if found is None:
        found = sys.modules.get(module)
        for part in path.split("."):
            found = None if found is None else vars(found).get(part)  # no __getattr__ of a module
    if not isinstance(found, type) or not is_kind(found):
        raise UntrustedValueError(f"{module}.{path}")
    return found


def _is_plain(kind: type) -> bool:
    """Return whether a class leaves pickling and the end of its objects to Python."""
    hooks = (getattr(kind, hook, None) for hook in _HOOKS)
    return all(
        hook is None
        or hook is getattr(object, hook.__name__, None)
        or getattr(hook, "__module__", "") == "dataclasses"
        for hook in hooks
    )


def _is_named_tuple(kind: type) -> bool:
    is_of_torch = kind.__module__ == "torch.return_types"
    return issubclass(kind, tuple) and (
        is_of_torch or isinstance(getattr(kind, "_fields", None), tuple)
    )


def make_array(description: Any, shape: tuple[int, ...], content: Any, is_scalar: bool) -> Any:
    """Return an array over the received bytes, or its only element."""
    dtype = np.lib.format.descr_to_dtype(description)
    if dtype.hasobject:
        raise UntrustedValueError("numpy.dtype('O')")
    view = memoryview(content)
    array = np.frombuffer(view, dtype) if view.nbytes else np.empty(0, dtype)
    array = array.reshape(shape)
    return array[()] if is_scalar else array if array.flags.writeable else array.copy()


def make_object_array(shape: tuple[int, ...], values: list[object]) -> Any:
    """Return an array of Python objects."""
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


def make_dtype(description: Any) -> Any:
    """Return a dtype of NumPy."""
    return np.lib.format.descr_to_dtype(description)


def make_enum(name: ClassName, value: object) -> object:
    """Return the member of an enum."""
    return _class_of(name, lambda kind: issubclass(kind, enum.Enum))(value)


def make_named_tuple(name: ClassName, values: list[object]) -> object:
    """Return a named tuple, without a call of its class unless the class is torch's."""
    kind = _class_of(name, _is_named_tuple)
    return kind(values) if kind.__module__ == "torch.return_types" else tuple.__new__(kind, values)


def make_dataclass(name: ClassName) -> object:
    """Return an object of a dataclass without fields, without a call of `__init__`."""
    return object.__new__(_class_of(name, lambda kind: is_dataclass(kind) and _is_plain(kind)))


def fill_dataclass(made: object, values: dict[str, object]) -> None:
    """Set the fields of an object of a dataclass."""
    kind = type(made)
    if not (is_dataclass(kind) and _is_plain(kind)):
        raise UntrustedValueError(f"fields of {kind.__qualname__}")
    for field, value in values.items():
        if isinstance(getattr(kind, field, None), types.MemberDescriptorType):  # a slot
            object.__setattr__(made, field, value)
        else:
            made.__dict__[field] = value


def make_exception(name: ClassName, args: tuple[object, ...], held: dict[str, object]) -> object:
    """Return an exception with these arguments and attributes, without a call of an `__init__` in Python."""
    kind = _class_of(name, lambda kind: issubclass(kind, BaseException))
    builtin = _builtin_of(kind)
    made = builtin.__new__(kind, *args)
    builtin.__init__(made, *args)
    for name_, value in held.items():
        if name_ in _ATTRIBUTES and name_ in dir(builtin):  # such as the name of a missing module
            setattr(made, name_, value)
        else:
            made.__dict__[name_] = value
    return made


def _builtin_of(kind: type) -> Any:
    """Return the first class of Python itself that an exception class derives from."""
    return next(one for one in kind.__mro__ if one.__module__ == "builtins")


def make_value(value: Any) -> Any:
    """Return the value: for objects that stand for another one."""
    return value


def make_path(text: str) -> pathlib.PurePath:
    """Return a path of this system."""
    return pathlib.Path(text)


def make_counter(counts: dict[object, int]) -> collections.Counter[object]:
    """Return a counter."""
    return collections.Counter(counts)


def make_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that stands for one of our own subclasses."""
    return tensor


def refuse_class(metaclass: object, name: object = "", *others: object) -> object:
    """Raise for the definition of a class, by its name; cloudpickle passes the metaclass first."""
    raise UntrustedValueError(str(name or metaclass))


@final
class _Function:
    """A function that a pickle can call but not change (a pickle can set attributes of what it finds)."""

    __slots__ = ("_call",)
    _call: Callable[..., object]

    def __init__(self, function: Callable[..., object]) -> None:
        object.__setattr__(self, "_call", function)

    def __call__(self, *arguments: object) -> object:
        return self._call(*arguments)

    @override
    def __setattr__(self, name: str, value: object) -> None:
        raise UntrustedValueError(f"a change of {name}")

    def __setstate__(self, state: object) -> None:
        raise UntrustedValueError("a change of a function")


_FUNCTIONS: Final = {
    (__name__, one.__name__): _Function(one)
    for one in (
        *(make_array, make_object_array, make_dtype, make_enum, make_named_tuple),
        *(make_dataclass, fill_dataclass, make_exception, make_value, make_path),
        make_counter,
        make_tensor,
    )
}
_DEFINITIONS: Final = dict.fromkeys(  # for an error with the name of the class that is defined
    (
        ("cloudpickle.cloudpickle", "_make_skeleton_class"),
        ("builtins", "type"),
        ("builtins", "object"),
    ),
    _Function(refuse_class),
)
_TYPES: Final = {  # of C: a pickle cannot change them, and calling them makes plain values
    (one.__module__, one.__qualname__): one
    for one in (
        *(bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset),
        *(range, slice, collections.OrderedDict, collections.defaultdict, collections.deque),
        *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone, decimal.Decimal),
        *(torch.Size, torch.device),
    )
}


def find_global(module: str, name: str) -> object:
    """Return what a pickle of data may name.

    Raises:
        UntrustedValueError: anything else.

    Example:
        >>> find_global("builtins", "complex")
        <class 'complex'>
    """
    known: object = _FUNCTIONS.get((module, name)) or _TYPES.get((module, name))
    known = known or _DEFINITIONS.get((module, name))
    if known is None and module == "torch":
        known = vars(torch).get(name)
        known = known if isinstance(known, torch.dtype) else None
    if known is None:
        raise UntrustedValueError(f"{module}.{name}")
    return known
