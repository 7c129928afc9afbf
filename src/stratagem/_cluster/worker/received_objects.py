"""Functions, per-worker values and objects of the strategy that a worker has received from its coordinator.

Code of the user runs while they are unpacked, and may fail. The error of a definition is kept and raised by the
closures that need the object; that of an update, or of a message that cannot be read, by the next closure. Such a closure
reports that it `lacks` something. The coordinator then ends the session, and sends everything to the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast, final

from stratagem._cluster.contract import StrategyOnWorker
from stratagem._cluster.global_random import find_function
from stratagem._cluster.timed_iterator import TimedIterator
from stratagem._core.fingerprints import PLAIN
from stratagem._data.shared_parts import LeasedReader
from stratagem._wire import messages
from stratagem._wire.codec import Rebuild, unpack
from stratagem._wire.messages import Frame
from stratagem.errors import ClosureInputError


@final
class ReceivedObjects:
    """Objects that one incarnation of a worker has received."""

    def __init__(self, views: StrategyOnWorker, task: str) -> None:
        self.lacks = False
        """True if the closure being prepared needs something that could not be unpacked."""
        self._views = views
        self._task = task
        self._functions: dict[bytes, Frame | Callable[..., object]] = {}
        self._resources: dict[int, object] = {}
        self._definition_errors: dict[Hashable, Exception] = {}
        self._unreadable: Exception | None = None  # a message that may concern any object
        self._last_arguments: _KnownArguments | None = None
        self._reads: list[TimedIterator] = []  # of the present closure

    def receive(self, frame: Frame) -> None:
        """Store the content of a Define, Update or Forget message; keep the error if that fails."""
        self._last_arguments = None
        try:
            self._receive(frame)
        except Exception as error:  # noqa: BLE001 - a worker survives any message
            self._unreadable = error

    def function(self, digest: bytes) -> Callable[..., object]:
        """Return the function of the closure that begins, unpacked at its first use."""
        self.lacks = False
        self._reads.clear()
        if self._unreadable is not None:
            raise self._lacking(self._unreadable)
        function = self._functions[digest]
        if isinstance(function, Frame):
            assert isinstance(function.message, messages.Define)
            self.lacks = True
            function = self._unpack(function.message.value, function)
            self.lacks = False
            self._functions[digest] = function
        return function

    def arguments(
        self, frame: Frame, message: messages.Run
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unpack the arguments of a call; the last ones again if they are only this worker's objects and immutable values."""
        packed = message.arguments
        if packed is None:
            return (), {}
        known = self._last_arguments
        if known is not None and known.payload == packed.payload:
            return known.args, {}
        rebuilt: list[object] = []

        def rebuild(token: tuple[str, Hashable]) -> object:
            rebuilt.append(self._rebuild(token))
            return rebuilt[-1]

        args, kwargs = self._unpack(packed, frame, rebuild)
        is_plain = not (kwargs or packed.tensors or packed.raw) and packed.body < 0
        own = {id(one) for one in rebuilt}
        if is_plain and all(id(one) in own or type(one) in PLAIN for one in args):
            self._last_arguments = _KnownArguments(packed.payload, args)
        return args, kwargs

    def keep_resource(self, number: int, value: object) -> None:
        """Keep the result of a resource closure."""
        self._last_arguments = None
        if isinstance(value, TimedIterator):
            value.reads = self._reads
        self._resources[number] = value

    def fail_resource(self, number: int, error: BaseException) -> None:
        """Keep the error of a resource closure, for the closures that use it."""
        self._last_arguments = None
        self._resources[number] = _FailedResource(error)

    def ended_input(self) -> int:
        """Return the dataset that was used up when the closure began, 0 if none was. The closure has read nothing else."""
        reads = self._reads
        if len(reads) != 1 or not reads[0].at_end:
            return 0
        return next((n for n, one in self._resources.items() if one is reads[0]), 0)

    def begin_leases(self, leases: Sequence[messages.LeasedElements]) -> list[LeasedReader]:
        """Let the closure that begins read these elements; return the readers."""
        readers: list[LeasedReader] = []
        for lease in leases:
            reader = self._rebuild(("r", lease.resource))
            assert isinstance(reader, LeasedReader)
            reader.begin(
                seed=lease.seed,
                epoch=lease.epoch,
                part=lease.part,
                first=lease.first,
                count=lease.count,
                size=lease.size,
            )
            readers.append(reader)
        return readers

    def clear(self) -> None:
        """Drop everything."""
        self._last_arguments = None
        self._resources.clear()
        self._functions.clear()

    @property
    def resources(self) -> int:
        """Number of per-worker values."""
        return len(self._resources)

    # ------------------------------------------------------------------ inside

    def _receive(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, messages.Define):
            if message.token is None:
                self._functions[message.function] = frame
            else:
                self._define(cast("Hashable", unpack(message.token, frame)), frame, message)
        elif isinstance(message, messages.Update):
            failures, _ = self._views.apply(self._unpack(message.updates, frame))
            for error in failures.values():
                raise error
        elif isinstance(message, messages.Forget):
            for digest in message.functions:
                self._functions.pop(digest, None)
            for resource in message.resources:
                self._resources.pop(resource, None)

    def _define(self, token: Hashable, frame: Frame, message: messages.Define) -> None:
        if token in self._definition_errors:
            return  # an earlier stage failed
        try:
            definition = self._unpack(message.value, frame)
            self._views.define(token, definition, last=message.last)
        except Exception as error:  # noqa: BLE001 - code of the user runs in unpacking
            self._definition_errors[token] = error

    def _unpack(self, packed: messages.Packed, frame: Frame, rebuild: Rebuild | None = None) -> Any:
        try:
            return unpack(packed, frame, rebuild=rebuild or self._rebuild)
        except SystemExit as error:  # a script that parses its command line where it is imported
            raise ImportError(
                f"code that was imported on {self._task} ended the program (SystemExit({error.code!r})). The command line "
                f"there is {sys.argv!r}. Parse the arguments in a function, or under `if __name__ == '__main__':`."
            ) from error

    def _rebuild(self, token: tuple[str, Hashable]) -> object:
        """Return the object that a token in a packed object stands for."""
        kind, value = token
        if kind == "r":
            found = self._resources[cast("int", value)]
            if isinstance(found, _FailedResource):
                raise ClosureInputError(
                    f"an input of the closure failed to build on {self._task}: {found.error!r}",
                    original_exception=found.error,
                )
            return found
        if kind == "g":
            return find_function(cast("str", value))
        failed = self._definition_errors.get(value)
        if failed is not None:
            raise self._lacking(failed)
        return self._views.rebuild(value)

    def _lacking(self, error: Exception) -> Exception:
        """Return the error of an object that only a new session can have."""
        self.lacks = True
        return error.with_traceback(None)  # or it would grow with every closure


class _KnownArguments(NamedTuple):
    """Arguments that are the same objects in every call with this payload."""

    payload: bytes
    args: tuple[Any, ...]


class _FailedResource:
    """Stands for a per-worker value that failed to build."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
