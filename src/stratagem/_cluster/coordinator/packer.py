"""Pack functions, arguments and definitions into messages.

A function is sent to a worker once, and again when something that it sees has changed. The packer knows a
function by its fingerprint (`_core/fingerprints.py`). With a new fingerprint the function is packed, and sent if the digest of its bytes is new. So a worker always sees what the
coordinator had at the time of `schedule`.

Packing collects the tokens of the strategy's objects (`contract.py`): their definitions are sent to a worker
before the first closure that names them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from torch import nn

from stratagem import metrics
from stratagem._cluster.contract import StrategyOnCoordinator
from stratagem._cluster.coordinator.remote_values import PerWorkerValues, RemoteValue
from stratagem._cluster.coordinator.shared_dataset import SharedDataset
from stratagem._cluster.coordinator.worker_numbers import NumbersOnWorkers, unwrapped
from stratagem._cluster.global_random import global_function
from stratagem._core.counters import learn
from stratagem._core.fingerprints import PLAIN, Fingerprint, plain_fingerprint
from stratagem._core.installed import is_installed
from stratagem._wire import messages
from stratagem._wire.codec import Outgoing, digest, digest_of, pack, ship_by_value
from stratagem._wire.frames import Buffer, check_size
from stratagem._wire.messages import Message, Packed
from stratagem._wire.unpicklable import path_to
from stratagem.errors import StratagemError

FUNCTION_LIMIT: Final = 256
"""Functions remembered here and at each worker; a training loop has a handful."""

Encoded = tuple[Message, Sequence[Buffer]]


@dataclass(slots=True, eq=False, weakref_slot=True)
class PackedObject:
    """A packed function, or packed arguments, and the objects whose definitions a worker needs first."""

    packed: Packed
    buffers: Sequence[Buffer]
    tokens: tuple[Hashable, ...]
    holds: tuple[object, ...] = ()
    digest: bytes = b""
    name: str = ""


@final
class Packer:
    """Packs for one coordinator; used by one thread at a time (the sender's packing lock).

    Attributes:
        definitions: by token, the packed parts of a definition, each with the tokens that it names.
        evicted: digests of functions that workers may forget.
        secret: the cluster key, which is never sent.
    """

    def __init__(self, views: StrategyOnCoordinator) -> None:
        self._views = views
        self._recent: OrderedDict[tuple[int, Fingerprint], PackedObject] = OrderedDict()  # by epoch
        # By id of a function: its epoch and fingerprint, and what it is packed as.
        self._unchanged: dict[int, tuple[int, Fingerprint, PackedObject]] = {}
        self._by_digest: OrderedDict[bytes, PackedObject] = OrderedDict()
        # A worker has each class of the user once, as it was sent last. The epoch counts changes of such
        # classes: functions sent in an earlier epoch must be sent again.
        self._classes: weakref.WeakKeyDictionary[type, Hashable] = weakref.WeakKeyDictionary()
        self._epoch = 0
        self._numbers = NumbersOnWorkers()
        self._tokens: list[Hashable] = []
        self._holds: list[object] = []
        # The last arguments that cannot change; weakly, since they keep per-worker values alive.
        self._last_arguments: tuple[Hashable, weakref.ref[PackedObject]] | None = None
        self._holding = False  # whether everything described is kept, for as long as its closure
        self._packed_again = metrics.counter("coordinator.functions_packed_again")
        self.definitions: dict[Hashable, list[tuple[Encoded, tuple[Hashable, ...]]]] = {}
        self.evicted: list[bytes] = []
        self.secret = b""

    def function(self, function: Callable[..., object]) -> tuple[PackedObject, Sequence[Any]]:
        """Return the packed function: the same as before if nothing that it sees has changed.

        The second result are the strategy's objects that the function sees. The caller keeps them until
        the closure is done; nothing here keeps them alive, so that a forgotten model is freed.
        """
        known = self._unchanged.get(id(function))
        if known is not None and known[0] == self._epoch:
            managed = known[1].managed_if_same(function)
            if managed is not None:
                return known[2], managed
        own = not is_installed(
            getattr(unwrapped(function), "__module__", None)
        )  # else it travels by name
        seen = Fingerprint(function, self._token_or_none, self._digest, find_counters=own)
        if own and learn(
            function, seen.attributes
        ):  # objects with counters may have come before the code
            seen = Fingerprint(function, self._token_or_none, self._digest, find_counters=own)
        held, seen.managed = seen.managed, []
        owners, seen.counters = seen.counters, []
        packed = self._recent.get((self._epoch, seen))
        if packed is None:
            if own:
                self._numbers.warn(function, owners)
            packed, held = self._pack_function(function, owners)
            self._recent[self._epoch, seen] = packed
            if len(self._recent) > FUNCTION_LIMIT:
                self._recent.popitem(last=False)
        if len(self._unchanged) >= FUNCTION_LIMIT:
            self._unchanged.clear()
        self._unchanged[id(function)] = self._epoch, seen, packed
        return packed, held

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> PackedObject:
        """Return the packed arguments of one call; the last ones again if they are the same."""
        mark = None if kwargs else _fingerprint_of(args)
        if mark is not None and self._last_arguments is not None:
            known, reference = self._last_arguments
            # While the packed arguments exist, so do the values in them: their ids are not reused.
            if known == mark and (packed := reference()) is not None:
                return packed
        # A model must not be freed on the servers while closures still wait with it.
        self._holding = True
        try:
            packed = self._pack((tuple(args), kwargs))
            if mark is not None:
                self._last_arguments = mark, weakref.ref(packed)
            return packed
        except (ValueError, OSError, StratagemError):  # no file descriptor is left
            raise
        except Exception as error:  # pickling runs the users' own code
            path = self._path_to(kwargs if args == () else (*args, *kwargs.values()), "arguments")
            raise TypeError(
                f"the arguments cannot be sent to the workers: {error}, at {path}. Pass tensors and other "
                "values that can be pickled; make the rest with create_per_worker_resource, or inside "
                "the function."
            ) from error
        finally:
            self._holding = False

    def updates(self, updates: Sequence[object]) -> PackedObject:
        """Return packed updates.

        Raises:
            TypeError: one of them cannot be sent; the error says which.
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
                own.add_note(f"This is about {what} which workers must get.")
                raise own from None
            name = str(getattr(update, "entry", "change"))
            path = self._path_to(getattr(update, "value", update), name)
            raise TypeError(
                f"{what} cannot be sent to the workers: {own}, at {path}. Functions scheduled from now on "
                "would not see it. Set it to something that can be pickled, or delete it; keep objects "
                "that belong to this process outside the module."
            ) from error

    def _path_to(self, root: object, name: str) -> str:
        """Return the path to the object that cannot be pickled. Modules are followed, managed or not."""

        def token_of(obj: object) -> object | None:
            return None if isinstance(obj, nn.Module) else self._token_or_none(obj)

        def can_pack(obj: object) -> bool:
            try:
                pack(obj, Outgoing(), describe=token_of)
            except Exception:  # noqa: BLE001 - the user's own code
                return False
            return True

        return path_to(root, name, can_pack)

    def _pack_function(
        self, function: Callable[..., object], owners: Sequence[tuple[Any, str]]
    ) -> tuple[PackedObject, list[Any]]:
        _ship_user_modules_by_value()
        counted = self._views.counted(function, owners) if owners else function
        self._holding = True
        try:
            packed = self._pack(counted)
        except (ValueError, OSError, StratagemError):  # no file descriptor is left
            raise
        except Exception as error:  # pickling runs the users' own code
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(
                f"{describe_function(function)} cannot be sent to the workers: {error}, at "
                f"{self._path_to(function, name)}. Create that object inside the function, or with "
                "create_per_worker_resource."
            ) from error
        finally:
            self._holding = False
        held, packed.holds = [*packed.holds], ()  # a packed function outlives its closures
        epoch = self._epoch.to_bytes(8, "little")
        packed.digest = digest_of(packed.packed, (*packed.buffers, epoch))
        packed.name = describe_function(function)
        same = self._by_digest.get(packed.digest)
        if same is not None:
            self._by_digest.move_to_end(packed.digest)
            return same, held
        self._by_digest[packed.digest] = packed
        if len(self._by_digest) > FUNCTION_LIMIT:
            self.evicted.append(self._by_digest.popitem(last=False)[0])
        return packed, held

    def _pack(self, obj: object) -> PackedObject:
        self._tokens, self._holds = [], []
        outgoing = Outgoing()
        classes: list[type] = []
        value = pack(obj, outgoing, describe=self.describe, classes=classes)
        self._note_classes(classes)
        # The caller may change its tensors as soon as schedule() has returned.
        buffers = [bytes(buffer) for buffer in outgoing.buffers]
        check_size(buffers)
        pickled = value.payload if value.body < 0 else buffers[value.body]
        if self.secret and self.secret in pickled:
            raise ValueError(
                "a function, an argument or a model contains the cluster key, which is never sent: leave "
                "it out. Workers have the key of their own environment."
            )
        tokens = tuple(dict.fromkeys(self._tokens))
        packed = PackedObject(value, buffers, tokens, tuple(self._holds))
        self._holds, self._holding = [], False  # nothing is kept alive beyond its closure
        for token in tokens:
            self._define(token)
        return packed

    def define_again(self, tokens: Sequence[Hashable]) -> None:
        """Pack these definitions again, for workers that connect later."""
        for token in tokens:
            try:
                parts = self._pack_parts(token)
            except LookupError:
                continue  # the object is gone: nothing will name it
            for _, nested in parts:
                for inner in nested:
                    self._define(inner)
            self.definitions[token] = parts  # at once: other threads are sending

    def _define(self, token: Hashable) -> None:
        if token in self.definitions:
            return
        self.definitions[token] = parts = self._pack_parts(token)
        try:
            for _, nested in parts:
                for inner in nested:
                    self._define(inner)
        except BaseException:  # Ctrl-C too
            del self.definitions[token]  # incomplete: to be tried again
            raise

    def _pack_parts(self, token: Hashable) -> list[tuple[Encoded, tuple[Hashable, ...]]]:
        definitions = self._views.definitions(token)
        count = len(definitions)
        parts = [
            self._pack_part(token, part, stage=stage, last=stage == count - 1)
            for stage, part in enumerate(definitions)
        ]
        self._views.check_definition(token, {inner for _, nested in parts for inner in nested})
        return parts

    def _pack_part(
        self, token: Hashable, part: object, *, stage: int, last: bool
    ) -> tuple[Encoded, tuple[Hashable, ...]]:
        outgoing = Outgoing()
        before, self._tokens = self._tokens, []
        classes: list[type] = []
        value = pack(part, outgoing, describe=self.describe, classes=classes)
        self._note_classes(classes)
        nested = tuple(dict.fromkeys(inner for inner in self._tokens if inner != token))
        self._tokens = before
        name = pack(token, outgoing)
        buffers = [bytes(buffer) for buffer in outgoing.buffers]
        message = messages.Define(value=value, token=name, stage=stage, last=last)
        return (message, buffers), nested

    def _note_classes(self, classes: Sequence[type]) -> None:
        """Begin a new epoch if a class has changed since it was last packed."""
        for kind in classes:
            members = vars(kind).items()
            now = tuple((name, one if type(one) in PLAIN else id(one)) for name, one in members)
            if self._classes.setdefault(kind, now) != now:
                self._classes[kind] = now
                self._epoch += 1

    def _digest(self, value: object) -> tuple[Hashable, Sequence[object]]:
        """Return a digest of something that a function sees, and the strategy's objects inside."""
        self._packed_again.add()
        before = self._tokens, self._holds, self._holding
        self._tokens, self._holds, self._holding = [], [], True
        try:
            return digest(value, self.describe), self._holds
        except Exception:  # noqa: BLE001 - the user's own code; packing the function raises it again
            return id(value), ()
        finally:
            self._tokens, self._holds, self._holding = before

    def _token_or_none(self, obj: object) -> Hashable | None:
        if type(obj) is PerWorkerValues or type(obj) is SharedDataset:
            return "r", obj._resource
        try:
            token = self._views.describe(obj)
            return global_function(obj) if token is None else token
        except (ValueError, StratagemError):
            return None  # packing refuses it

    def describe(self, obj: object) -> tuple[str, Hashable] | None:
        """Return the handle of an object that is sent by token, None for others. The codec calls it."""
        if isinstance(obj, PerWorkerValues | SharedDataset):
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


def _fingerprint_of(args: Sequence[Any]) -> Hashable | None:
    """Return a fingerprint of arguments that are immutable or per-worker values; None for others."""
    found: list[Hashable] = []
    for arg in args:
        if type(arg) in PLAIN:
            found.append(plain_fingerprint(arg))
        elif isinstance(arg, PerWorkerValues | SharedDataset):
            found.append(id(arg))
        else:
            return None
    return tuple(found)


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
    """Return a name for people, with file and line if there is one."""
    if isinstance(function, functools.partial):
        return f"partial of {describe_function(function.func)}"
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        inner = inspect.unwrap(function)  # the step of run_steps, and decorated functions
        if inner is not function:
            return describe_function(inner)
        code = function.__code__
        return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return repr(function)
