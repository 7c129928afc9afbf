"""Turns functions and arguments into messages, each function once.

Here is decided when a function that is scheduled again is still the same one. A function is known by
its *mark*: its code, and what it captures (closure cells, defaults, the globals its code names). Plain
values count by value; the strategy's own objects, modules, classes and functions by identity; tensors
by identity and version. Anything else it captures (a list, a dictionary, an object of yours) may have
changed inside without a trace: such a function is packed anew at every `schedule`, and sent again if
its bytes changed. So a worker always sees what the coordinator had at the time of `schedule`.

Tokens of the strategy's objects (`views.py`) are collected on the way: their definitions travel once
per worker life, before the first closure that names them.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from stratagem import metrics
from stratagem._cluster.remote import PerWorkerValues, RemoteValue
from stratagem._cluster.views import CoordinatorViews
from stratagem._wire import messages
from stratagem._wire.codec import Outgoing, digest_of, pack, ship_by_value
from stratagem._wire.frames import Buffer, Limits
from stratagem._wire.messages import Message, Packed
from stratagem.errors import StratagemError

FUNCTION_LIMIT: Final = 256
"""Functions remembered here and at each worker; a training loop has a handful."""

Encoded = tuple[Message, Sequence[Buffer]]


@dataclass(slots=True, eq=False)
class Shipment:
    """A packed function, or packed arguments, and what must be at the worker before."""

    packed: Packed
    buffers: Sequence[Buffer]
    tokens: tuple[Hashable, ...]
    holds: tuple[object, ...] = ()
    digest: bytes = b""
    name: str = ""


@dataclass(slots=True, eq=False)
class _Check:
    """One thing a function captures, as it was when the function was packed."""

    holder: Any  # a cell, or the globals
    name: str | None
    found: Any
    version: int  # of a tensor; -1 for everything else

    def holds(self) -> bool:
        """Whether it is still the same."""
        if self.name is not None:
            now = self.holder.get(self.name, _MISSING)
        else:
            now = self.holder.cell_contents
        return now is self.found and (self.version < 0 or self.found._version == self.version)


@dataclass(slots=True, eq=False)
class _Look:
    """What is noted while a function is looked at."""

    alive: list[object]  # the marks hold ids: what they belong to must not be freed meanwhile
    checks: list[_Check]
    quick: bool = True  # whether the checks are all there is to it


@dataclass(slots=True, eq=False)
class _Entry:
    shipment: Shipment
    look: _Look


_MISSING: Final = object()


class _ChangeableError(Exception):
    """The function captures something whose changes cannot be seen."""


@final
class Shipper:
    """Packs for one coordinator; used by one thread at a time (the coordinator's packing lock)."""

    def __init__(self, views: CoordinatorViews) -> None:
        self._views = views
        self._known: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._recent: dict[int, _Entry] = {}
        self._by_digest: OrderedDict[bytes, Shipment] = OrderedDict()
        self._tokens: list[Hashable] = []
        self._holds: list[object] = []
        self._holding = False  # whether everything described is kept, for as long as its closure
        self._packed_again = metrics.counter("coordinator.functions_packed_again")
        self.definitions: dict[Hashable, tuple[Encoded, tuple[Hashable, ...]]] = {}
        self.evicted: list[bytes] = []

    def function(self, function: Callable[..., object]) -> Shipment:
        """The packed function; the same shipment as before if nothing it sees has changed."""
        recent = self._recent.get(id(function))
        if recent is not None and all(check.holds() for check in recent.look.checks):
            return recent.shipment
        look = _Look([function], [])
        try:
            mark = self._mark(function, look, 0)
        except _ChangeableError:
            self._packed_again.add()
            return self._pack_function(function)
        known = self._known.get(mark)
        shipment = known.shipment if known is not None else self._pack_function(function)
        entry = _Entry(shipment, look)
        self._known[mark] = entry
        self._known.move_to_end(mark)
        if len(self._known) > FUNCTION_LIMIT:
            self._known.popitem(last=False)
        if look.quick and type(function) is types.FunctionType:
            if len(self._recent) >= FUNCTION_LIMIT:
                self._recent.clear()
            self._recent[id(function)] = entry  # the look keeps the function, so its id, alive
        return shipment

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Shipment:
        """The packed arguments of one call."""
        # A model its owner forgets while closures still wait with it must not be freed on the servers.
        self._holding = True
        try:
            return self._pack((tuple(args), kwargs))
        except (ValueError, StratagemError):
            raise
        except Exception as error:
            raise TypeError(
                f"the arguments cannot be sent to the workers: {error}. Pass tensors and other values "
                "that can be pickled; make the rest with create_per_worker_resource, or inside the "
                "function."
            ) from error
        finally:
            self._holding = False

    def updates(self, updates: Sequence[object]) -> Shipment:
        """Packed updates."""
        return self._pack(list(updates))

    def _pack_function(self, function: Callable[..., object]) -> Shipment:
        _ship_user_modules_by_value()
        try:
            shipment = self._pack(function)
        except (ValueError, StratagemError):
            raise
        except Exception as error:
            raise TypeError(
                f"{describe_function(function)} cannot be sent to the workers: {error}. It, or "
                "something it captures, cannot be pickled; create that thing inside the function, "
                "or with create_per_worker_resource."
            ) from error
        shipment.digest = digest_of(shipment.packed, shipment.buffers)
        shipment.name = describe_function(function)
        same = self._by_digest.get(shipment.digest)
        if same is not None:
            self._by_digest.move_to_end(shipment.digest)
            return same
        self._by_digest[shipment.digest] = shipment
        if len(self._by_digest) > FUNCTION_LIMIT:
            self.evicted.append(self._by_digest.popitem(last=False)[0])
        return shipment

    def _pack(self, obj: object) -> Shipment:
        self._tokens, self._holds = [], []
        outgoing = Outgoing()
        packed = pack(obj, outgoing, describe=self.describe)
        # The caller may change its tensors as soon as schedule() has returned.
        buffers = [bytes(buffer) for buffer in outgoing.buffers]
        check_size(buffers)
        tokens = tuple(dict.fromkeys(self._tokens))
        shipment = Shipment(packed, buffers, tokens, tuple(self._holds))
        self._holds, self._holding = [], False  # nothing is kept alive beyond its closure
        for token in tokens:
            self._define(token)
        return shipment

    def _define(self, token: Hashable) -> None:
        if token in self.definitions:
            return
        outgoing = Outgoing()
        before, self._tokens = self._tokens, []
        value = pack(self._views.definition(token), outgoing, describe=self.describe)
        nested = tuple(dict.fromkeys(inner for inner in self._tokens if inner != token))
        self._tokens = before
        name = pack(token, outgoing)
        buffers = [bytes(buffer) for buffer in outgoing.buffers]
        self.definitions[token] = (messages.Define(value=value, token=name), buffers), nested
        try:
            for inner in nested:
                self._define(inner)
        except BaseException:
            del self.definitions[token]  # incomplete: to be tried again
            raise

    def describe(self, obj: object) -> tuple[str, Hashable] | None:
        """The codec's handle hook."""
        if isinstance(obj, PerWorkerValues):
            self._holds.append(obj)
            return "r", obj._resource
        if isinstance(obj, RemoteValue):
            raise ValueError(
                f"{obj!r} was passed to a scheduled function: the result of another closure cannot "
                "be an argument. Fetch it first (value.get()), or do both in one function."
            )
        token = self._views.describe(obj)
        if token is None:
            return None
        self._tokens.append(token)
        if self._holding:
            self._holds.append(obj)
        return "v", token

    # ------------------------------------------------------------------ marks

    def _mark(self, obj: Any, look: _Look, depth: int) -> Hashable:
        kind = type(obj)
        if kind in _BY_VALUE:
            return kind, obj
        if kind is types.FunctionType:
            return self._mark_function(obj, look, depth)
        if kind in _BY_IDENTITY or isinstance(obj, type):
            look.alive.append(obj)
            return id(obj)
        if kind is tuple:
            return tuple(self._mark(item, look, depth) for item in obj)
        if kind is functools.partial:
            look.quick = False
            return (
                "partial",
                self._mark(obj.func, look, depth),
                self._mark(obj.args, look, depth),
                self._mark(tuple(sorted(obj.keywords.items())), look, depth),
            )
        if kind is types.MethodType:
            look.quick = False
            return (
                "method",
                self._mark(obj.__func__, look, depth),
                self._mark(obj.__self__, look, depth),
            )
        if kind is PerWorkerValues or self._views.describe(obj) is not None:
            look.alive.append(obj)
            return id(obj)
        if isinstance(obj, torch.Tensor):
            look.alive.append(obj)
            return id(obj), obj._version
        raise _ChangeableError

    def _mark_function(self, function: types.FunctionType, look: _Look, depth: int) -> Hashable:
        look.alive.append(function)
        code = function.__code__
        if is_installed(function.__module__):
            return id(function)
        if depth > 8:  # functions that name each other; their globals are looked at once
            return id(code)
        look.alive.append(code)
        parts: list[Hashable] = [id(code)]
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not yet filled
                look.quick = False
                parts.append(None)
            else:
                parts.append(self._mark_captured(cell, None, content, look, depth))
        if function.__defaults__ or function.__kwdefaults__:
            look.quick = False
            pairs = tuple(sorted((function.__kwdefaults__ or {}).items()))
            parts.append(self._mark((function.__defaults__ or (), pairs), look, depth + 1))
        space = function.__globals__
        for name in names_of(code):
            found = space.get(name, _MISSING)
            if found is not _MISSING:
                parts.append(self._mark_captured(space, name, found, look, depth))
            else:
                look.checks.append(_Check(space, name, _MISSING, -1))
        return tuple(parts)

    def _mark_captured(
        self, holder: Any, name: str | None, obj: Any, look: _Look, depth: int
    ) -> Hashable:
        """Marks what a function captures; a function already being looked at counts by its code."""
        # A captured tensor inside a tuple can change without the tuple being another one.
        if type(obj) is tuple:
            look.quick = False
        tensor = isinstance(obj, torch.Tensor)
        described = tensor and self._views.describe(obj) is not None
        version = obj._version if tensor and not described else -1
        look.checks.append(_Check(holder, name, obj, version))
        if type(obj) is types.FunctionType and any(obj is seen for seen in look.alive):
            return id(obj.__code__)
        return self._mark(obj, look, depth + 1)


_BY_VALUE: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_BY_IDENTITY: Final = frozenset(
    {types.ModuleType, types.BuiltinFunctionType, type, torch.dtype, torch.device, torch.Size}
)


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Global names a function's code, and the functions defined in it, may look up."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_of(constant)))
    return tuple(names)


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(sorted(path + "/" for path in found))


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module is part of the installation, so that every task has it.

    Example:
        >>> is_installed("torch.nn"), is_installed("__main__")
        (True, False)
    """
    if module is None or module == "__main__":
        return False
    if module == "stratagem" or module.startswith("stratagem."):
        return True
    found = sys.modules.get(module)
    if found is None:
        return False
    file = getattr(found, "__file__", None)
    return file is None or str(file).startswith(_installed_roots())


_looked_at: set[str] = set()


def _ship_user_modules_by_value() -> None:
    """Functions and classes of the user's own modules travel by value, with the globals they see.

    A worker that imported the module itself would have that module's initial state instead, and
    perhaps another version of it.
    """
    for name in [name for name in sys.modules if name not in _looked_at]:
        _looked_at.add(name)
        module = sys.modules.get(name)
        if module is not None and name != "__main__" and not is_installed(name):
            ship_by_value(module)


def check_size(buffers: Sequence[Buffer]) -> None:
    """Refuses what no frame can carry, here where it can be said what was too large."""
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    limit = Limits().frame_bytes
    if size > limit:
        raise ValueError(
            f"{size} bytes of tensors in one call or result: at most {limit} bytes can be sent. Use "
            "a variable or a per-worker dataset for data of this size."
        )


def describe_function(function: object) -> str:
    """A name people recognise, with file and line if there is one."""
    if isinstance(function, functools.partial):
        return f"partial of {describe_function(function.func)}"
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        code = function.__code__
        return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return repr(function)
