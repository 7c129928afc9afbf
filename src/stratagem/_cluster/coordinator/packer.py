"""Turns functions and arguments into messages, each function once.

A function that is scheduled again is known by its *mark* (`marks.py`). One that has none, because it
captures what may have changed without a trace, is packed anew at every `schedule`, and sent again if its
bytes changed. So a worker always sees what the coordinator had at the time of `schedule`.

Tokens of the strategy's objects (`views.py`) are collected on the way: their definitions travel once
per worker life, before the first closure that names them.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from stratagem import metrics
from stratagem._cluster.contract import StrategyOnCoordinator
from stratagem._cluster.coordinator.capture_check import CaptureCheck, CaptureCountCheck
from stratagem._cluster.coordinator.function_identity import (
    BY_VALUE,
    CaptureScan,
    ChangeableError,
    FunctionIdentifier,
    is_installed,
    mark_value,
)
from stratagem._cluster.coordinator.remote_values import PerWorkerValues, RemoteValue
from stratagem._cluster.global_random import global_function
from stratagem._cluster.size_limit import check_size
from stratagem._wire import messages
from stratagem._wire.codec import Outgoing, digest_of, pack, ship_by_value
from stratagem._wire.frames import Buffer
from stratagem._wire.messages import Message, Packed
from stratagem.errors import StratagemError

FUNCTION_LIMIT: Final = 256
"""Functions remembered here and at each worker; a training loop has a handful."""

Encoded = tuple[Message, Sequence[Buffer]]


@dataclass(slots=True, eq=False, weakref_slot=True)
class PackedObject:
    """A packed function, or packed arguments, and what must be at the worker before."""

    packed: Packed
    buffers: Sequence[Buffer]
    tokens: tuple[Hashable, ...]
    holds: tuple[object, ...] = ()
    digest: bytes = b""
    name: str = ""


@dataclass(slots=True, eq=False)
class _Recent:
    """A function scheduled before: known by itself, as long as its checks hold."""

    function: weakref.ref[Any]
    shipment: PackedObject
    checks: list[CaptureCheck | CaptureCountCheck]
    epoch: int  # of the marker

    def still_holds(self) -> list[object] | None:
        """What it captures that must live as long as its closure; None if something changed."""
        held: list[object] = []
        for check in self.checks:
            now = check.now()
            if not check.is_same(now):
                return None
            if check.is_handle:
                held.append(now)
        return held


@final
class Packer:
    """Packs for one coordinator; used by one thread at a time (the coordinator's packing lock)."""

    def __init__(self, views: StrategyOnCoordinator) -> None:
        self._views = views
        self._marker = FunctionIdentifier(views.describe)
        # By mark: the shipment, its captured objects watched, and what else the mark's ids stand for.
        self._known: OrderedDict[
            Hashable, tuple[PackedObject, Sequence[object], Sequence[object]]
        ] = OrderedDict()
        self._stale: deque[Hashable] = deque()
        self._recent: dict[int, _Recent] = {}
        self._by_digest: OrderedDict[bytes, PackedObject] = OrderedDict()
        self._tokens: list[Hashable] = []
        self._holds: list[object] = []
        # The last arguments that cannot change; weakly, since they keep per-worker values alive.
        self._last_arguments: tuple[Hashable, weakref.ref[PackedObject]] | None = None
        self._holding = False  # whether everything described is kept, for as long as its closure
        self._packed_again = metrics.counter("coordinator.functions_packed_again")
        # By token: what is to be told, in order, each with the tokens it names.
        self.definitions: dict[Hashable, list[tuple[Encoded, tuple[Hashable, ...]]]] = {}
        self.evicted: list[bytes] = []

    def function(self, function: Callable[..., object]) -> tuple[PackedObject, Sequence[object]]:
        """The packed function, the same shipment as before if nothing it sees has changed.

        Beside it, what the function captures of the strategy's objects: to be kept until its closure
        is done. Nothing here keeps them alive, so that a model nobody has any more is freed.
        """
        recent = self._recent.get(id(function))
        if (
            recent is not None
            and recent.function() is function
            and recent.epoch == self._marker.epoch
        ):
            held = recent.still_holds()
            if held is not None:
                return recent.shipment, held
        while self._stale:
            self._known.pop(self._stale.popleft(), None)
        look = CaptureScan()
        try:
            mark: Hashable = self._marker.mark(function, look)
        except ChangeableError:
            self._packed_again.add()
            return self._pack_function(function)
        mark = mark, self._marker.epoch
        known = self._known.get(mark)
        if known is not None:
            shipment = known[0]
            self._known.move_to_end(mark)
        else:
            shipment = self._pack_function(function)[0]
            # A mark is made of ids: with one of the objects it goes, too (maybe in another thread).
            note = functools.partial(_note, self._stale, mark)
            watched = [weakref.ref(obj, note) for obj in look.handles]
            self._known[mark] = (shipment, watched, look.kept)
            if len(self._known) > FUNCTION_LIMIT:
                self._known.popitem(last=False)
        if look.is_quick and type(function) is types.FunctionType:
            if len(self._recent) >= FUNCTION_LIMIT:
                self._recent.clear()
            forget = functools.partial(_pop, self._recent, id(function))
            reference = weakref.ref(function, forget)
            epoch = self._marker.epoch
            self._recent[id(function)] = _Recent(reference, shipment, look.checks, epoch)
        return shipment, look.handles

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> PackedObject:
        """The packed arguments of one call; the last ones again if they are the same."""
        mark = None if kwargs else _mark_unchangeable(args)
        if mark is not None and self._last_arguments is not None:
            known, reference = self._last_arguments
            # While the shipment lives, so do the values in it: their ids are still theirs.
            if known == mark and (shipment := reference()) is not None:
                return shipment
        # A model its owner forgets while closures still wait with it must not be freed on the servers.
        self._holding = True
        try:
            shipment = self._pack((tuple(args), kwargs))
            if mark is not None:
                self._last_arguments = mark, weakref.ref(shipment)
            return shipment
        except (ValueError, OSError, StratagemError):  # no descriptor left, say
            raise
        except Exception as error:  # pickling runs the users' own code
            raise TypeError(
                f"the arguments cannot be sent to the workers: {error}. Pass tensors and other values "
                "that can be pickled; make the rest with create_per_worker_resource, or inside the "
                "function."
            ) from error
        finally:
            self._holding = False

    def updates(self, updates: Sequence[object]) -> PackedObject:
        """Packed updates.

        Raises:
            TypeError: one of them cannot be sent; it is said which.
        """
        try:
            return self._pack(list(updates))
        except Exception as error:  # pickling runs the users' own code
            for update in updates:
                self._refuse(update, error)
            raise

    def _refuse(self, update: object, error: Exception) -> None:
        """Raise if this is the update that cannot be packed."""
        try:
            self._pack([update])
        except Exception as own:
            what = self._views.explain(update)
            if isinstance(own, ValueError | OSError | StratagemError):
                own.add_note(f"This is about {what} which workers must be told of.")
                raise own from None
            raise TypeError(
                f"{what} cannot be sent to the workers: {own}. Functions scheduled from now on would "
                "not see it. Set it to something that can be pickled, or delete it; what belongs to "
                "this process alone is better kept outside the module."
            ) from error

    def _pack_function(
        self, function: Callable[..., object]
    ) -> tuple[PackedObject, Sequence[object]]:
        _ship_user_modules_by_value()
        self._holding = True
        try:
            shipment = self._pack(function)
        except (ValueError, OSError, StratagemError):  # no descriptor left, say
            raise
        except Exception as error:  # pickling runs the users' own code
            raise TypeError(
                f"{describe_function(function)} cannot be sent to the workers: {error}. It, or "
                "something it captures, cannot be pickled; create that thing inside the function, "
                "or with create_per_worker_resource."
            ) from error
        finally:
            self._holding = False
        held, shipment.holds = shipment.holds, ()  # the shipment may outlive the closure by far
        # Told of its classes in this state, whatever it was told of before.
        epoch = self._marker.epoch.to_bytes(8, "little")
        shipment.digest = digest_of(shipment.packed, (*shipment.buffers, epoch))
        shipment.name = describe_function(function)
        same = self._by_digest.get(shipment.digest)
        if same is not None:
            self._by_digest.move_to_end(shipment.digest)
            return same, held
        self._by_digest[shipment.digest] = shipment
        if len(self._by_digest) > FUNCTION_LIMIT:
            self.evicted.append(self._by_digest.popitem(last=False)[0])
        return shipment, held

    def _pack(self, obj: object) -> PackedObject:
        self._tokens, self._holds = [], []
        outgoing = Outgoing()
        packed = pack(obj, outgoing, describe=self.describe)
        # The caller may change its tensors as soon as schedule() has returned.
        buffers = [bytes(buffer) for buffer in outgoing.buffers]
        check_size(buffers)
        tokens = tuple(dict.fromkeys(self._tokens))
        shipment = PackedObject(packed, buffers, tokens, tuple(self._holds))
        self._holds, self._holding = [], False  # nothing is kept alive beyond its closure
        for token in tokens:
            self._define(token)
        return shipment

    def define_again(self, tokens: Sequence[Hashable]) -> None:
        """These are no longer what they were: lives that come later are told what they are now."""
        for token in tokens:
            try:
                told = self._views.definitions(token)
            except LookupError:
                continue  # gone meanwhile: nothing will name it
            stages = self._pack_stages(token, told)
            for _, nested in stages:
                for inner in nested:
                    self._define(inner)
            self.definitions[token] = stages  # at once: other threads are sending

    def _define(self, token: Hashable) -> None:
        if token in self.definitions:
            return
        self.definitions[token] = stages = self._pack_stages(token, self._views.definitions(token))
        try:
            for _, nested in stages:
                for inner in nested:
                    self._define(inner)
        except BaseException:  # Ctrl-C too
            del self.definitions[token]  # incomplete: to be tried again
            raise

    def _pack_stages(
        self, token: Hashable, told: Sequence[object]
    ) -> list[tuple[Encoded, tuple[Hashable, ...]]]:
        return [
            self._pack_definition(token, one, stage=stage, last=stage == len(told) - 1)
            for stage, one in enumerate(told)
        ]

    def _pack_definition(
        self, token: Hashable, definition: object, *, stage: int, last: bool
    ) -> tuple[Encoded, tuple[Hashable, ...]]:
        outgoing = Outgoing()
        before, self._tokens = self._tokens, []
        value = pack(definition, outgoing, describe=self.describe)
        nested = tuple(dict.fromkeys(inner for inner in self._tokens if inner != token))
        self._tokens = before
        name = pack(token, outgoing)
        buffers = [bytes(buffer) for buffer in outgoing.buffers]
        message = messages.Define(value=value, token=name, stage=stage, last=last)
        return (message, buffers), nested

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
            name = global_function(obj)  # `from random import shuffle`: the worker's own
            return None if name is None else ("g", name)
        self._tokens.append(token)
        if self._holding:
            self._holds.append(obj)
        return "v", token


def _note(stale: deque[Hashable], mark: Hashable, _: object) -> None:
    stale.append(mark)


def _pop(recent: dict[int, _Recent], key: int, _: object) -> None:
    recent.pop(key, None)


def _mark_unchangeable(args: Sequence[Any]) -> Hashable | None:
    """A mark for arguments that are all numbers, texts and per-worker values; None for others."""
    marks: list[Hashable] = []
    for arg in args:
        if type(arg) in BY_VALUE:
            marks.append(mark_value(arg))
        elif isinstance(arg, PerWorkerValues):
            marks.append(id(arg))
        else:
            return None
    return tuple(marks)


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
