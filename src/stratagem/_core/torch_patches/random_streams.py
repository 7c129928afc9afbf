"""Each replica's own stream of random numbers, whatever the timing of the threads.

torch's default CPU generator is one per process, so replicas side by side would draw from it in an order
that changes from run to run; and most random functions (``F.dropout``, attention, recurrent layers)
take no generator. But every random operator ends in one that does. So replica threads run with one more
dispatch key switched on, `_KEY`, which torch itself leaves unused: operators that take a ``generator``
have a kernel of ours there that fills in the replica's own when none was given; all others fall
through in C++ at no cost. Random numbers inside autograd, vmap or C++ composites come by here too.

A run's streams are seeded from the default generator, once, by the first random operator of the run:
a run after ``torch.manual_seed`` repeats bit for bit. A run that draws nothing leaves it untouched.

``torch.get_rng_state``, ``set_rng_state``, ``fork_rng`` and ``manual_seed`` mean the replica's stream when
called in a replica: activation checkpointing depends on it to draw the same dropout mask twice. They
all go through the module variable ``torch.random.default_generator``, which `install` replaces once by a
stand-in that answers by context (docs/design/0003-randomness.md says why).

Limits: kernels compiled by torch.compile's default backend draw from one seed per call, which does come
from the replica's stream (the call that compiles excepted); NumPy's and Python's generators are not ours.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from typing_extensions import override

from stratagem._core import context
from stratagem._core.context import Replica, current_replica
from stratagem._core.torch_patches import private_api

_KEY = "TESTING_ONLY_GenericMode"
_MASK = (1 << 64) - 1

_installed: list[Any] = []  # what torch must not collect: our kernels, and the key they are under
_installing = _thread.allocate_lock()


class Streams:
    """The random streams of one run: made when first drawn from."""

    __slots__ = ("_base", "_generators", "_lock")

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._base: int | None = None
        self._generators: dict[tuple[int, torch.device], torch.Generator] = {}

    def active(self) -> AbstractContextManager[object]:
        """Held by a replica's thread while its function runs."""
        if not _installed:
            install()
        guard: AbstractContextManager[object] = private_api.IncludeKey(_installed[0])
        return guard

    def generator(self, replica_id: int, device: torch.device) -> torch.Generator:
        """The replica's generator on a device; seeded by the run, the replica and the device."""
        key = (replica_id, device)
        found = self._generators.get(key)
        if found is None:
            with self._lock:
                if self._base is None:
                    self._base = _draw()
                base = self._base
            # The device's number takes part, so that one replica's streams differ between devices.
            turn = replica_id + 1 + ((device.index or 0) << 20) + ((device.type != "cpu") << 40)
            found = torch.Generator(device).manual_seed(_mix(base, turn) & (_MASK >> 1))
            self._generators[key] = found
        return found


def _draw() -> int:
    # Replicas are the only ones here now, and the first to come draws for all.
    with private_api.WithoutTransforms():  # the first draw may come from inside vmap
        number = torch.empty((), dtype=torch.int64, device="cpu")
        return int(number.random_(generator=torch.default_generator))


def _mix(base: int, turn: int) -> int:
    """SplitMix64: neighbouring inputs give unrelated seeds."""
    z = (base + turn * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Drawing:
    """While open, this thread's random operators draw from ``stream(device)`` if it gives a generator.

    For code that runs outside any replica but needs a stream of its own: the input pipeline's
    functions, in threads beside the training step. Torch's own generator is neither read nor moved.

    Example:
        >>> import torch
        >>> from stratagem._core.torch_patches.random_streams import Drawing
        >>> own = torch.Generator().manual_seed(1)
        >>> with Drawing(lambda device: own):
        ...     drawn = torch.nn.functional.dropout(torch.ones(8))
        >>> own.get_state().equal(torch.Generator().manual_seed(1).get_state())
        False
    """

    __slots__ = ("_before", "_guard", "_stream")

    def __init__(self, stream: Callable[[torch.device], torch.Generator | None]) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if not _installed:
            install()
        self._before = context.swap_stream(self._stream)
        self._guard: Any = private_api.IncludeKey(_installed[0])
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)
        context.swap_stream(self._before)


def stream_of(replica: Replica, device: torch.device) -> torch.Generator:
    """The generator a replica draws from on a device."""
    streams: Streams = replica.group.streams
    return streams.generator(replica.id, device)


# ------------------------------------------------------------------ the kernels


def install() -> None:
    """Register the kernels and the stand-in generator; once per process."""
    with _installing:
        if _installed:
            return
        key: Any = private_api.parse_key(_KEY)
        library: Any = torch.library.Library
        others = library("_", "IMPL", _KEY)
        others.fallback(torch.library.fallthrough_kernel, _KEY)
        random = library("aten", "IMPL", _KEY)
        keys = private_api.KeySet(key)
        for schema in private_api.all_schemas():
            place = _generator_place(schema)
            if place is None:
                continue
            name = schema.name.removeprefix("aten::")
            packet = getattr(torch.ops.aten, name)
            operator = getattr(packet, schema.overload_name or "default")
            full = f"{name}.{schema.overload_name}" if schema.overload_name else name
            random.impl(full, _Kernel(operator, place, keys), _KEY)
        vars(torch.random)["default_generator"] = _StandIn()
        _installed.extend((key, others, random))


def _generator_place(schema: Any) -> int | None:
    """Position of an aten operator's generator argument, -1 if by keyword only, None if it has none."""
    if not schema.name.startswith("aten::"):
        return None
    for i, argument in enumerate(schema.arguments):
        if argument.name == "generator":
            return -1 if argument.kwarg_only else i
    return None


class _Kernel:
    """One random operator as replicas see it."""

    __slots__ = ("_keys", "_operator", "_place")

    def __init__(self, operator: Any, place: int, keys: Any) -> None:
        self._operator = operator
        self._place = place
        self._keys = keys

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In a meeting (cross-replica) the default generator is meant. While torch.compile traces,
        # a generator object must not end up in its graph.
        if not private_api.dispatch_modes():
            place = self._place
            if 0 <= place < len(args):
                if args[place] is None:
                    generator = _current_generator(_device_of(args, kwargs))
                    args = (*args[:place], generator, *args[place + 1 :])
            elif kwargs.get("generator") is None:
                kwargs["generator"] = _current_generator(_device_of(args, kwargs))
        with private_api.ExcludeKeys(self._keys):
            return self._operator(*args, **kwargs)


def _current_generator(device: torch.device) -> torch.Generator | None:
    """What this thread draws from: a stream set for it, its replica's, or None for torch's own."""
    stream = context.current_stream()
    if stream is not None:
        return stream(device)
    replica = current_replica()
    return None if replica is None else stream_of(replica, device)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, kwargs.get("out")):
        if isinstance(value, torch.Tensor):
            return value.device
    device = kwargs.get("device")
    return torch.device("cpu") if device is None else torch.device(device)


class _StandIn:
    """Stands where torch keeps its default generator: a replica's own inside one, else the real one."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        replica = current_replica()
        if replica is None or replica.group.size == 1:
            return getattr(torch.default_generator, name)
        return getattr(stream_of(replica, torch.device("cpu")), name)

    @override
    def __repr__(self) -> str:
        return f"<default generator: {self.__getattr__('__repr__')()}>"
