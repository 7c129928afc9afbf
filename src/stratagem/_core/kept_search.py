"""Find what a function keeps between its calls and replicas share: tensors, and the numbers that it changes.

They lie in closure variables, globals, attributes of objects and modules, lists and dicts. Parameters and buffers of
modules are left out: the strategy manages them. `kept_values` uses the result.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from stratagem._core.fingerprints import PLAIN, names_of
from stratagem._core.installed import is_installed
from stratagem._core.instructions import instructions_of
from stratagem._core.kept_places import NUMBERS, Place
from stratagem._core.managed import find_managed
from stratagem._core.step_code import (
    ANY,
    LOCAL,
    Changes,
    Kinds,
    changes_in,
    may_be_called,
)

MOST_OBJECTS: Final = 20_000
"""Objects that one search visits."""
MOST_ITEMS: Final = 4096
"""Items of a list or dict that is searched; larger ones are data."""

MOST_UNNAMED: Final = 256
"""Items of a list or dict whose numbers are watched because code changes items of a local variable."""

_DICTS: Final = (dict, OrderedDict, defaultdict)
_LEFT_OUT: Final = (
    Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    Dataset,
    DataLoader,
    torch.Generator,
)
"""Optimizers, schedulers and scalers work once for all replicas; data is not written."""
_OF_MODULES: Final = frozenset(
    {*vars(nn.Module()), "_parameters", "_buffers", "_modules"} - {"training"}
)
_SETUP: Final = ("init", "reset", "load", "setstate")
"""How the names of methods begin that prepare an object; a step does not call them."""
_FUNCTION: Final = types.FunctionType
_OTHERS: Final = frozenset({"builtins", "collections", "keras", "numpy", "stratagem", "torch"})
"""Packages whose classes count nothing that concerns a step."""
_OF_BATCHES: Final = (Tensor, list, tuple, dict, np.ndarray)
_NOTHING: Final[Kinds] = frozenset()
_MOVES: Final[Kinds] = frozenset({"moves"})


@final
class Search:
    """Find what a function keeps.

    Args:
        function: the function, perhaps with objects that it gets as arguments (``functools.partial``).
        only_numbers: find no tensors, and find sums of numbers, too.

    Attributes:
        places: where the tensors are.
        changing: where the numbers are that the user's code changes, other than by adding up, and results of a graph that it
            carries to the next step.
        writes: whether any code that was found writes in place.
    """

    def __init__(self, function: Callable[..., Any], *, only_numbers: bool = False) -> None:
        self._only_numbers = only_numbers
        self.places: list[Place] = []
        self.changing: list[Place] = []
        self._with_number: list[Place] = []
        self._with_results: list[Place] = []
        self._containers: list[Place] = []
        self._codes: set[types.CodeType] = set()
        self._own_codes: set[types.CodeType] = set()
        self._seen: set[Any] = set()
        self._todo: deque[Callable[[], None]] = deque()
        self._step = _code_of(function)
        self._visit(function, "the step", LOCAL)
        while self._todo and len(self._seen) < MOST_OBJECTS:
            self._todo.popleft()()
        self._todo.clear()
        self._own = Changes(changes_in(one) for one in self._own_codes if may_be_called(one))
        self._find_writes()
        self._find_changes()

    def _find_writes(self) -> None:
        """Find out how the tensors are written."""
        writing = [
            (_values_named(code), table)
            for code in self._codes
            if (table := changes_in(code).tensors)
        ]
        self.writes = bool(writing)
        anything = frozenset(kind for _, table in writing for kind in table.get(LOCAL, ()))
        for place in self.places:
            name, plain = place.name, place.name.lstrip(".")
            naming = [(names, table) for names, table in writing if plain in names]
            found = [table.get(name, table.get(LOCAL, _NOTHING)) for _, table in naming]
            place.kinds = frozenset().union(*found) or anything - {"binds"}
            is_cell = isinstance(place.holder, types.CellType)
            holds = not (is_cell or place.key) or any(map(holds_tensors, place.values()))
            named = found if holds else [table.get(name, _NOTHING) for _, table in writing]
            place.is_moved = any("moves" in kinds for kinds in named)
            place.by_memory = any("data" in names for names, _ in naming)
            if "binds" in place.kinds and self._is_carried(place):
                place.kinds |= {"moves"}

    def _is_carried(self, place: Place) -> bool:
        """Return whether code reads a place and then replaces it; of a sum, code that other code names."""
        if place.name not in self._own.carried or place.kinds.isdisjoint({"adds", "grows"}):
            return place.name in self._own.carried
        return any(
            self._is_named(one) for one in self._own_codes if place.name in changes_in(one).carried
        )

    def _numbers(self, name: str) -> Kinds:
        """Return how code changes a number; of a sum, code that other code names."""
        kinds = self._own.numbers.get(name, _NOTHING)
        if "adds" not in kinds or kinds == {"adds"}:
            return kinds
        each = [(code, changes_in(code).numbers.get(name, _NOTHING)) for code in self._own_codes]
        counts = [one for code, one in each if "adds" in one or (one and self._is_named(code))]
        return _NOTHING.union(*counts)

    def _is_named(self, code: types.CodeType) -> bool:
        """Return whether a step may call a function of a sum: no method for several processes, as meters have."""
        others = (one for one in self._own_codes if one is not code)
        return code is self._step or any(code.co_name in _names(one) for one in others)

    def _find_changes(self) -> None:
        """Find the numbers that the user's code changes, and the results that it carries to the next step."""
        own = self._own
        # The step's own code counts more than methods that it may never call, such as a loop over all batches.
        step = changes_in(self._step) if self._step else Changes()
        for place in self._with_number:
            kinds = self._numbers(place.name)
            if step.numbers.get(place.name, _NOTHING) == _MOVES:
                kinds -= {"adds", "varies"}
            # A flag is shared: ``if not self.is_built: self.build(); self.is_built = True``.
            is_carried = place.name in own.carried and not any(
                isinstance(one, bool) for one in place.values()
            )
            if self._is_wanted(kinds) or (is_carried and not kinds and not self._only_numbers):
                place.kinds |= kinds
                place.is_used = place.name in own.used
                self.changing.append(place)
        wanted = {at: self._is_wanted(kinds) for at, kinds in own.items.items()}
        named = {name for (name, _), is_wanted in wanted.items() if is_wanted}
        for place in self._containers:
            small = len(place.holder) <= MOST_UNNAMED and not self._only_numbers
            place.wanted = functools.partial(_changes_item, wanted, place.name, small)
            if place.name in named or place.read():
                place.kinds |= {"moves"}
                place.is_used = place.name in own.used or place.name == LOCAL
                self.changing.append(place)
        for place in self._with_results:
            if place.name in own.carried:
                place.kinds = frozenset({"moves", "binds"})
                self.changing.append(place)

    def _is_wanted(self, kinds: Kinds) -> bool:
        """Return whether numbers of these kinds are found: not if code only adds up."""
        wanted = {"moves", "varies", "adds"} if self._only_numbers else {"moves", "varies"}
        return not kinds.isdisjoint(wanted)

    def _visit(self, value: Any, path: str, name: str) -> None:
        """Search a value, later: the order is by distance from the function."""
        kind = type(value)
        if kind in PLAIN or isinstance(value, (Tensor, *_LEFT_OUT)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if kind is _FUNCTION:
            self._todo.append(lambda: self._function(value, path))
        elif kind is types.MethodType:
            self._visit(value.__func__, path, name)
            self._visit(value.__self__, path, name)
        elif kind is functools.partial:
            for one in (value.func, *value.args, *value.keywords.values()):
                self._visit(one, path, name)
        elif isinstance(value, (*_DICTS, list, tuple, deque)):
            if len(value) <= MOST_ITEMS:
                self._todo.append(lambda: self._held(Place(value, None, path, name), items=True))
        elif isinstance(value, type):
            self._todo.append(lambda: self._class(value))
        elif not isinstance(value, types.ModuleType) and not _is_ours(kind):
            self._todo.append(lambda: self._object(value, path))

    def _function(self, function: types.FunctionType, path: str) -> None:
        code, held = function.__code__, function.__globals__
        self._codes.add(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._held(Place(cell, None, f"variable {name!r}", name))
        if is_installed(function.__module__):
            return
        self._own_codes.add(code)
        names = names_of(code)
        for name in names:
            value = held.get(name)
            if isinstance(value, types.ModuleType):
                self._module(value, names, name)
            elif value is not None:
                self._global(Place(held, name, f"variable {name!r}", name))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(default, path, LOCAL)

    def _module(self, module: types.ModuleType, names: Sequence[str], path: str) -> None:
        """Search these names in a module of the user; only look at the code of functions in installed ones."""
        held = vars(module)
        if not is_installed(module.__name__):
            for name in names:
                self._global(Place(held, name, f"{path}.{name}", f".{name}"))
        elif module.__name__.partition(".")[0] != "torch":
            found = [held.get(name) for name in names]
            self._codes.update(one.__code__ for one in found if type(one) is _FUNCTION)

    def _global(self, place: Place) -> None:
        mark = id(place.holder), place.key
        if place.key in place.holder and mark not in self._seen:
            self._seen.add(mark)
            self._held(place)

    def _class(self, kind: type[Any]) -> None:
        for base in kind.__mro__[:-1]:
            if base is nn.Module or base.__module__.startswith("torch.nn.modules."):
                continue
            own = not is_installed(base.__module__)
            for name, member in vars(base).items():
                if own and isinstance(member, NUMBERS):
                    path = f"{base.__qualname__}.{name}"
                    self._with_number.append(Place(base, name, path, f".{name}"))
                if name.lstrip("_").startswith(_SETUP):
                    continue
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if type(function) is not _FUNCTION:
                    continue
                if own:
                    self._visit(function, base.__qualname__, LOCAL)
                else:
                    inner = getattr(function, "__wrapped__", function)
                    # Methods of torch.Tensor are Python functions around builtin ones, which have no code.
                    self._codes.add((inner if type(inner) is _FUNCTION else function).__code__)

    def _object(self, value: Any, path: str) -> None:
        kind = type(value)
        self._visit(kind, path, LOCAL)
        held = getattr(value, "__dict__", None)
        where = f"{path} → {kind.__qualname__}"
        for name, member in _members(kind):
            is_default = type(held) is dict and isinstance(member, NUMBERS) and name not in held
            if is_default or type(member) is types.MemberDescriptorType:
                holder = held if is_default else value
                self._with_number.append(Place(holder, name, f"{where}.{name}", f".{name}"))
        if type(held) is not dict:
            return
        for name in _counted_by_packages(kind):  # type: ignore[arg-type]
            if type(held.get(name)) is int:
                self.changing.append(Place(held, name, f"{where}.{name}", f".{name}"))
        if isinstance(value, nn.Module):
            for name, part in list(value._modules.items()):
                self._visit(part, f"{where}.{name}", LOCAL)
        for name in list(held):
            if not (isinstance(value, nn.Module) and name in _OF_MODULES):
                self._held(Place(held, name, f"{where}.{name}", f".{name}"))

    def _held(self, place: Place, *, items: bool = False) -> None:
        """Note a place with tensors or numbers; search the other values in it."""
        values = place.values()
        if not self._only_numbers and any(is_kept(one) or holds_tensors(one) for one in values):
            self.places.append(place)
        elif items and isinstance(place.holder, (dict, list)):
            self._containers.append(place)
        elif not items and any(isinstance(one, NUMBERS) for one in values):
            self._with_number.append(place)
        elif not items and any(map(_is_result, values)):
            self._with_results.append(place)
        for number, value in enumerate(values):
            self._visit(value, f"{place.path}[{number}]" if items else place.path, place.name)


def _changes_item(
    wanted: Mapping[tuple[str, Hashable], bool], name: str, small: bool, key: Hashable
) -> bool:
    """Return whether code changes an item of a container; code that names the container decides, if there is any."""
    for place in ((name, key), (name, ANY), (LOCAL, key), *([(LOCAL, ANY)] if small else ())):
        if place in wanted:
            return wanted[place]
    return False


def _code_of(function: Any) -> types.CodeType | None:
    """Return the code of a function, of a method, or of what a partial calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__code__", None)


@functools.lru_cache(maxsize=1024)
def _counted_by_packages(kind: type[Any]) -> frozenset[str]:
    """Return the attributes that methods of installed classes move, which count calls of a module or object."""
    bases = [base for base in kind.__mro__[:-1] if is_installed(base.__module__)]
    parts = [vars(base) for base in bases if base.__module__.partition(".")[0] not in _OTHERS]
    found = Changes(
        changes_in(member.__code__)
        for members in parts
        for name, member in members.items()
        if type(member) is _FUNCTION
        and not name.lstrip("_").startswith(_SETUP)
        and may_be_called(member.__code__)
    )
    return frozenset(name[1:] for name, kinds in found.numbers.items() if kinds == _MOVES)


def _members(kind: type[Any]) -> list[tuple[str, Any]]:
    """Return the members of the classes of the user that an object's class is made of."""
    bases = [base for base in kind.__mro__[:-1] if not is_installed(base.__module__)]
    return [member for base in bases for member in vars(base).items()]


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names of attributes, globals and closure variables in code."""
    inner = (_names(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset({*names_of(code), *code.co_freevars}).union(*inner)


@functools.lru_cache(maxsize=4096)
def _values_named(code: types.CodeType) -> frozenset[str]:
    """Return the names of attributes, globals and closure variables in code, without those of methods that it calls."""
    read = {one.argval for one in instructions_of(code) if one.opname != "LOAD_METHOD"}
    inner = (_values_named(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return (_names(code) & read).union(*inner)


def _is_ours(kind: type[Any]) -> bool:
    return kind.__module__.partition(".")[0] in ("stratagem", "builtins", "threading", "_thread")


def _is_result(value: Any) -> bool:
    """Return whether a value is a result of a graph, or a tuple of such (the state of an LSTM)."""
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_result, value))
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a list, tuple or dict of tensors, which code may replace."""
    if isinstance(value, (list, tuple, *_DICTS)) and 0 < len(value) <= MOST_ITEMS:
        return any(map(is_kept, value.values() if isinstance(value, dict) else value))
    return False


def is_kept(value: Any) -> bool:
    """Return whether a value is a tensor that replicas may write: no result of a graph, no replica's own view."""
    if not isinstance(value, Tensor) or value.is_inference() or value.layout is not torch.strided:
        return False
    if value.requires_grad and not value.is_leaf:
        return False
    managed = find_managed(value)
    return managed is None or managed.central is value


# ------------------------------------------------------------------ functions


def with_objects(call: functools.partial[Any]) -> Callable[..., Any]:
    """Return a function with those of its arguments that may count or keep something: not the batch."""
    given = [one for one in (*call.args, *call.keywords.values()) if _is_object(one)]
    return functools.partial(call.func, *given) if given else call.func


def _is_object(value: object) -> bool:
    return type(value) not in PLAIN and not isinstance(value, _OF_BATCHES)


def function_key(function: Any) -> Hashable:
    """Return the code of a function and the identities of the objects that it refers to or gets."""
    given: list[int] = []
    while isinstance(function, functools.partial):
        given += [_identity(one) for one in function.args]
        function = function.func
    owner = id(getattr(function, "__self__", None))
    inner = getattr(function, "__func__", function)
    if type(inner) is not types.FunctionType:
        return type(function), id(function), *given
    held = inner.__globals__
    found = [*given, owner, *[_identity(held.get(name)) for name in names_of(inner.__code__)]]
    for cell in inner.__closure__ or ():
        try:
            found.append(_identity(cell.cell_contents))
        except ValueError:  # the variable has no value yet
            found.append(0)
    return inner.__code__, *found


def _identity(value: object) -> int:
    """Return the id of an object that may have counters; numbers and tensors are other ones in every step."""
    return 0 if type(value) in PLAIN or isinstance(value, Tensor) else id(value)
