"""Counters: integers that a function increases where other calls can see them.

Examples are ``self.steps += 1``, ``global steps; steps += 1`` and the same with ``nonlocal``. Scheduled functions run in
several processes, so their counters are kept in step by the coordinator (`_ps/coordinator/advance_ledger.py`). Replicas
share counters: `kept_values` gives each replica its own values.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, final

from typing_extensions import override

from stratagem._core.step_code import changes_in

_SETUP: Final = frozenset({"__init__", "__new__", "__setstate__", "load_state_dict"})
"""Methods that prepare an object: what they add up is no counter of steps."""


def attributes_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of attributes that code increases or decreases."""
    return frozenset(name[1:] for name in changes_in(code).counted if name[0] == ".")


@functools.lru_cache(maxsize=1024)
def counted_attributes(kind: type[Any]) -> frozenset[str]:
    """Return the names of attributes that the methods of a class increase or decrease."""
    return frozenset(
        name
        for base in kind.__mro__[:-1]
        for method, member in vars(base).items()
        if isinstance(member, types.FunctionType) and method not in _SETUP
        for name in attributes_in(member.__code__)
    )


def attributes_counted_by(function: Any) -> frozenset[str]:
    """Return the names of attributes that a function increases, also inside partials and wrappers (`run_steps`)."""
    codes = _codes_of(function)
    return frozenset(name for code in codes for name in _learned.get(code, attributes_in(code)))


def learn(function: Any, names: frozenset[str]) -> bool:
    """Note which attributes a function and the code that it leads to increase; return whether there are new ones."""
    codes = _codes_of(function)
    if not codes or names <= attributes_counted_by(function):
        return False
    _learned[codes[-1]] = names
    return True


_learned: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = weakref.WeakKeyDictionary()


def _codes_of(function: Any) -> list[types.CodeType]:
    """Return the code of a function and of those that it wraps, the innermost last."""
    found: list[types.CodeType] = []
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if isinstance(code, types.CodeType):
            found.append(code)
        function = getattr(function, "__wrapped__", None)
    return found


Owner = Any
"""An object with the attribute, or a function with the global variable or closure variable."""


def _variables(function: types.FunctionType, name: str) -> Any:
    """Return the cell of a closure variable, or the dict of the global variables."""
    names = function.__code__.co_freevars
    cells = function.__closure__
    return cells[names.index(name)] if cells and name in names else function.__globals__


def is_counter(value: object) -> bool:
    """Return whether a value can be a counter: an integer."""
    return type(value) is int


class StepCounter:
    """An integer that is kept in step."""

    value: Any = None

    def get(self) -> Any:
        """Return the value; None if there is none."""
        return self.value

    def set(self, value: Any) -> None:
        """Set the value."""
        self.value = value


@final
class CounterSlot(StepCounter):
    """One counter, where the program keeps it."""

    def __init__(self, owner: Owner, name: str) -> None:
        self.name = name
        self._held: Any  # the owner itself only if nothing else can be held
        if isinstance(owner, types.FunctionType):
            held = _variables(owner, name)
            self._held = lambda: held
        elif type(owner) is types.SimpleNamespace:  # has no weak references; holds plain values
            self._held = lambda: owner
        else:
            self._held = weakref.ref(owner)

    @staticmethod
    def place(owner: Owner, name: str) -> Any:
        """Return the cell of a closure variable, the dict of the global variables, or the object."""
        return _variables(owner, name) if isinstance(owner, types.FunctionType) else owner

    @staticmethod
    def key(owner: Owner, name: str) -> Hashable:
        """Return what two functions that share a counter have in common."""
        return id(CounterSlot.place(owner, name)), name

    @property
    def is_gone(self) -> bool:
        """True if the object with the counter no longer exists."""
        return self._held() is None

    @override
    def get(self) -> Any:
        """Return the value; None if there is none."""
        held = self._held()
        if isinstance(held, types.CellType):
            try:
                return held.cell_contents
            except ValueError:  # the variable has been deleted
                return None
        return (held if type(held) is dict else getattr(held, "__dict__", {})).get(self.name)

    @override
    def set(self, value: Any) -> None:
        """Set the value."""
        held = self._held()
        if isinstance(held, types.CellType):
            held.cell_contents = value
        elif held is not None:
            (held if type(held) is dict else vars(held))[self.name] = value


@final
class CountedFunction:
    """A function with the places of its counters, as it is sent to workers.

    Args:
        function: the function.
        owners: number, owner and name of each counter; owners are parts of the function, and stay that in a pickle.
        store: rebuilt on a worker as the object with ``run_counted``, which has the values of the counters there.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        owners: Sequence[tuple[int, Owner, str]],
        store: object,
    ) -> None:
        self._function = function
        self._owners = owners
        self._store = store
        self._slots: list[tuple[int, CounterSlot]] | None = None

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return CountedFunction, (self._function, self._owners, self._store)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the present values of its counters."""
        if self._slots is None:
            self._slots = [
                (number, CounterSlot(owner, name)) for number, owner, name in self._owners
            ]
        store: Any = self._store
        return store.run_counted(self._function, self._slots, (args, kwargs))


def counted_in(function: types.FunctionType) -> Iterator[tuple[Owner, str]]:
    """Yield the closure variables and global variables that a function counts with."""
    for name in changes_in(function.__code__).counted:
        if name[0] != "." and is_counter(CounterSlot(function, name).get()):
            yield function, name
