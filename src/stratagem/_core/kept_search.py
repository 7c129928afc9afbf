"""Find the tensors that a function keeps between its calls and that replicas share.

They lie in closure variables, globals, attributes of objects and modules, lists and dicts. Parameters and buffers of
modules are left out: the strategy manages them. `kept_values` uses the result.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from stratagem._core.installed import is_installed
from stratagem._core.kept_numbers import KeptNumbers, is_number
from stratagem._core.managed import find_managed
from stratagem._core.number_writes import ANY, Numbers, key_name, numbers_in, numbers_of
from stratagem._core.same_code import PLAIN, names_of
from stratagem._core.write_kinds import LOCAL, Kinds, writes_of

MOST_OBJECTS: Final = 20_000
"""Objects that one search visits."""
MOST_ITEMS: Final = 4096
"""Items of a list or dict that is searched; larger ones are data."""

MOST_UNNAMED: Final = 256
"""Items of a list or dict whose numbers are watched because code moves items of a local variable."""

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
_KINDS: Final = ("moved", "varying", "added")
_OTHERS: Final = frozenset({"builtins", "collections", "keras", "numpy", "stratagem", "torch"})
"""Packages whose classes count nothing that concerns a step."""
_OF_BATCHES: Final = (Tensor, list, tuple, dict, np.ndarray)


@final
class Place:
    """Place in which a program keeps tensors: a dict, list, closure cell, or the attributes of an object.

    Args:
        holder: the object that holds the tensors: a dict (also of attributes or globals), list, deque, tuple or cell; for
            numbers also a class, or an object with slots.
        keys: the keys of the tensors in a dict of attributes or globals; None: everything in the holder.
        path: the place in words, for errors.
        name: the variable or attribute by which code refers to it.

    Attributes:
        kinds: how the code that was found writes it; empty: no code that was found does.
        by_memory: whether code may write it through ``.data``, which counts no version.
        is_moved: whether code that names it computes its tensors from their own values.
    """

    __slots__ = ("by_memory", "holder", "is_moved", "keys", "kinds", "name", "path")

    def __init__(self, holder: Any, keys: tuple[str, ...] | None, path: str, name: str) -> None:
        self.holder, self.keys, self.path, self.name = holder, keys, path, name
        self.kinds: Kinds = frozenset()
        self.by_memory = self.is_moved = False

    def values(self) -> list[Any]:
        """Return what the place holds now."""
        holder = self.holder
        if self.keys is not None:
            if not isinstance(holder, dict):
                return [getattr(holder, key, None) for key in self.keys]
            return [holder.get(key) for key in self.keys]
        if isinstance(holder, types.CellType):
            try:
                return [holder.cell_contents]
            except ValueError:  # the variable has been deleted
                return [None]
        return list(holder.values()) if isinstance(holder, dict) else list(holder)

    def within(self, value: Any) -> Place:
        """Return the place of a list or dict that this place holds."""
        found = Place(value, None, self.path, self.name)
        found.kinds, found.by_memory = self.kinds, self.by_memory
        return found

    def contents(self) -> Any:
        """Return what `put` needs to bring back what the place holds now."""
        holder = self.holder
        if self.keys is None and isinstance(holder, dict):
            return dict(holder)
        return self.values()

    def put(self, contents: Any) -> None:
        """Bring back contents."""
        holder = self.holder
        if self.keys is not None:
            for key, value in zip(self.keys, contents, strict=True):
                holder[key] = value
        elif isinstance(holder, types.CellType):
            holder.cell_contents = contents[0]
        elif isinstance(holder, dict):
            holder.clear()
            holder.update(contents)
        elif isinstance(holder, list):
            holder[:] = contents


@final
class Search:
    """Find the tensors that a function keeps.

    Args:
        function: the function, perhaps with objects that it gets as arguments (``functools.partial``).
        only_numbers: find no tensors, and find sums of numbers, too.

    Attributes:
        places: where the tensors are.
        numbers: the Python numbers that the user's code moves.
        carried: where results of a graph are that the user's code carries to the next step.
        writes: whether any code that was found writes in place.
    """

    def __init__(self, function: Callable[..., Any], *, only_numbers: bool = False) -> None:
        self._only_numbers = only_numbers
        self.places: list[Place] = []
        self.numbers: list[KeptNumbers] = []
        self._number_places: list[Place] = []
        self._containers: list[Place] = []
        self.carried: list[Place] = []
        self._codes: set[types.CodeType] = set()
        self._own_codes: set[types.CodeType] = set()
        self._seen: set[Any] = set()
        self._todo: deque[Callable[[], None]] = deque()
        self._step = _code_of(function)
        self._visit(function, "the step", LOCAL)
        while self._todo and len(self._seen) < MOST_OBJECTS:
            self._todo.popleft()()
        writing = [(_names(code), table) for code in self._codes if (table := writes_of(code))]
        self.writes = bool(writing)
        anything = frozenset(kind for _, table in writing for kind in table.get(LOCAL, ()))
        for place in self.places:
            found = [table.get(place.name, table.get(LOCAL, frozenset()))
                     for names, table in writing if place.name in names]  # fmt: skip
            place.kinds = frozenset().union(*found) or anything - {"binds"}
            is_cell = isinstance(place.holder, types.CellType)
            holds = not (is_cell or place.keys) or any(map(holds_tensors, place.values()))
            named = found if holds else [table.get(place.name, ()) for _, table in writing]
            place.is_moved = any("moves" in kinds for kinds in named)
            place.by_memory = any("data" in names for names, _ in writing if place.name in names)
        self._keep_what_moves()
        self._todo.clear()

    def _keep_what_moves(self) -> None:
        """Find the numbers that the user's code moves, and the results that it carries to the next step."""
        found = numbers_of(self._own_codes)
        # The step's own code counts more than methods that it may never call, such as a loop over all batches.
        step = None if self._step is None else numbers_in(self._step)
        counted = frozenset() if step is None else step.moved - step.varying
        changed = found.moved | (found.varying if self._only_numbers else frozenset())
        for place in self._number_places:
            name = place.name
            is_variable = place.path == f"variable {name!r}"
            is_set_aside = (
                not (self._only_numbers or is_variable)
                and name in found.carried & found.fixed
                and not any(isinstance(one, bool) for one in place.values())
            )
            if is_set_aside or (
                name in changed and name in (found.variables if is_variable else found.attributes)
            ):
                is_sum = name in found.varying - counted and not self._only_numbers
                moves = functools.partial(_constantly, "varying" if is_sum else True)
                uses = functools.partial(_constantly, name in found.used)
                self.numbers.append(
                    KeptNumbers(place.holder, moves, place.path, uses, place.keys or ())
                )
        self._number_places = []
        names = {name for name, _, _ in found.items}
        local = {key for name, key, _ in found.items if name == LOCAL}
        for place in self._containers:
            is_small = ANY in local and len(place.holder) <= MOST_UNNAMED and not self._only_numbers
            if place.name in names or is_small or not local.isdisjoint(_keys_of(place.holder)):
                self.numbers.append(_kept_items(place, found, with_sums=self._only_numbers))
        self._containers = []
        self.carried = [place for place in self.carried if place.name in found.carried]
        for place in self.carried:
            place.kinds = frozenset({"moves", "binds"})
        for place in self.places:
            if place.name in found.carried and "binds" in place.kinds:
                place.kinds |= {"moves"}

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
                self._todo.append(lambda: self._container(value, path, name))
        elif isinstance(value, type):
            self._todo.append(lambda: self._class(value))
        elif not isinstance(value, types.ModuleType) and not _is_ours(kind):
            self._todo.append(lambda: self._object(value, path))

    def _function(self, function: types.FunctionType, path: str) -> None:
        code, held = function.__code__, function.__globals__
        installed = is_installed(function.__module__)
        self._codes.add(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._held(Place(cell, None, f"variable {name!r}", name))
        if installed:
            return
        self._own_codes.add(code)
        names = names_of(code)
        for name in names:
            value = held.get(name)
            if isinstance(value, types.ModuleType):
                self._module(value, names, name)
            elif value is not None:
                self._global(held, name, f"variable {name!r}")
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(default, path, LOCAL)

    def _module(self, module: types.ModuleType, names: Sequence[str], path: str) -> None:
        """Search these names in a module of the user; only look at the code of functions in installed ones."""
        held = vars(module)
        if not is_installed(module.__name__):
            for name in names:
                self._global(held, name, f"{path}.{name}")
        elif module.__name__.partition(".")[0] != "torch":
            found = [held.get(name) for name in names]
            self._codes.update(one.__code__ for one in found if type(one) is _FUNCTION)

    def _global(self, held: dict[str, Any], name: str, path: str) -> None:
        if name in held and (id(held), name) not in self._seen:
            self._seen.add((id(held), name))
            self._held(Place(held, (name,), path, name))

    def _container(self, value: Any, path: str, name: str) -> None:
        self._held(Place(value, None, path, name), items=True)

    def _class(self, kind: type[Any]) -> None:
        for base in kind.__mro__[:-1]:
            if base is nn.Module or base.__module__.startswith("torch.nn.modules."):
                continue
            own = not is_installed(base.__module__)
            for name, member in vars(base).items():
                if own and is_number(member):
                    path = f"{base.__qualname__}.{name}"
                    self._number_places.append(Place(base, (name,), path, name))
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
            is_default = type(held) is dict and is_number(member) and name not in held
            if is_default or type(member) is types.MemberDescriptorType:
                holder = held if is_default else value
                self._number_places.append(Place(holder, (name,), f"{where}.{name}", name))
        if type(held) is not dict:
            return
        for name in _counted_by_packages(kind):  # type: ignore[arg-type]
            if type(held.get(name)) is int:
                self.numbers.append(
                    KeptNumbers(held, lambda _: True, f"{where}.{name}", lambda _: False, (name,))
                )
        if isinstance(value, nn.Module):
            for name, part in list(value._modules.items()):
                self._visit(part, f"{where}.{name}", LOCAL)
        for name in list(held):
            if not (isinstance(value, nn.Module) and name in _OF_MODULES):
                self._held(Place(held, (name,), f"{where}.{name}", name))

    def _held(self, place: Place, *, items: bool = False) -> None:
        """Note a place with tensors; search the other values in it."""
        values = place.values()
        if not self._only_numbers and any(is_kept(one) or holds_tensors(one) for one in values):
            self.places.append(place)
        elif not items and len(values) == 1 and is_number(values[0]):
            self._number_places.append(place)
        elif items and isinstance(place.holder, (dict, list)):
            self._containers.append(place)
        elif not items and any(map(_is_result, values)):
            self.carried.append(place)
        for number, value in enumerate(values):
            self._visit(value, f"{place.path}[{number}]" if items else place.path, place.name)


def _code_of(function: Any) -> types.CodeType | None:
    """Return the code of a function, of a method, or of what a partial calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _constantly(value: bool | str, key: Hashable) -> Any:
    return value


def _keys_of(holder: dict[Hashable, Any] | list[Any]) -> Iterable[Hashable]:
    return holder if isinstance(holder, dict) else range(len(holder))


def _kept_items(place: Place, found: Numbers, *, with_sums: bool) -> KeptNumbers:
    """Return the numbers of a dict or list that code moves; code that names it counts more than other code."""
    kinds: dict[tuple[str, Hashable], str] = {}
    for name, key, kind in sorted(found.items, key=lambda each: _KINDS.index(each[2])):
        kinds[name, key] = kind  # the last one counts

    def moves(key: Hashable) -> bool | str:
        for name in (place.name, LOCAL):
            for each in (key, ANY):
                if name == LOCAL and each is ANY and with_sums:
                    continue  # it may concern any container
                if (kind := kinds.get((name, each))) is not None:
                    return with_sums or {"moved": True, "added": False}.get(kind, kind)
        return False

    def uses(key: Hashable) -> bool:
        return key_name(key) in found.used or (
            (place.name, ANY) in kinds and place.name in found.used
        )

    return KeptNumbers(place.holder, moves, place.path, uses)


@functools.lru_cache(maxsize=1024)
def _counted_by_packages(kind: type[Any]) -> frozenset[str]:
    """Return the attributes that methods of installed classes move, which count calls of a module or object."""
    bases = [base for base in kind.__mro__[:-1] if is_installed(base.__module__)]
    parts = [vars(base) for base in bases if base.__module__.partition(".")[0] not in _OTHERS]
    found = numbers_of(
        member.__code__
        for members in parts
        for name, member in members.items()
        if type(member) is _FUNCTION and not name.lstrip("_").startswith(_SETUP)
    )
    return found.moved - found.varying


def _members(kind: type[Any]) -> list[tuple[str, Any]]:
    """Return the members of the classes of the user that an object's class is made of."""
    bases = [base for base in kind.__mro__[:-1] if not is_installed(base.__module__)]
    return [member for base in bases for member in vars(base).items()]


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names of attributes, globals and closure variables in code."""
    inner = (_names(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset({*names_of(code), *code.co_freevars}).union(*inner)


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
