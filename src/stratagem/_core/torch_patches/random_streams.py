"""A separate random stream for each replica, independent of thread timing.

torch's default CPU generator is one per process, so concurrent replicas would draw from it in an order that changes
from run to run; and most random functions (``F.dropout``, attention, recurrent layers) take no generator. But every
random operator ends in one that does. So replica threads run with one more dispatch key switched on, `_KEY`, which
torch leaves unused. On that key, operators that take a ``generator`` have a kernel of ours that fills in the replica's
own if none was given; all others fall through in C++ at no cost. This covers random numbers inside autograd, vmap and
C++ composites.

The first random operator of a run draws one number from the default generator to seed the run's streams. So a run
after ``torch.manual_seed`` repeats bit for bit, and a run that draws nothing leaves the default generator untouched, also if
it reads or sets the state of a stream, as torch.compile and activation checkpointing do.

In a replica, ``torch.get_rng_state``, ``set_rng_state``, ``fork_rng`` and ``manual_seed`` mean the replica's stream.
Activation checkpointing depends on it to draw the same dropout mask twice. These functions all read the module variable
``torch.random.default_generator``, which a proxy replaces (docs/design/0003-randomness.md).

Limits: kernels compiled by torch.compile's default backend draw from one seed per call, which comes from the replica's
stream (except in the call that compiles). NumPy's and Python's generators stay process-wide.
"""

from __future__ import annotations

import _thread
from contextlib import AbstractContextManager
from typing import Any

import torch
from typing_extensions import override

from stratagem._core import context, torch_patches
from stratagem._core.context import RandomStream, current_replica
from stratagem._core.torch_patches import private_api

_KEY = "TESTING_ONLY_GenericMode"
_MASK = (1 << 64) - 1

_installed: list[Any] = []  # the dispatch key, and the libraries that torch must not collect


class Streams:
    """The random streams of one run; created when first used."""

    __slots__ = ("_generators", "_is_drawn", "_lock", "_seed")

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._seed: int | None = None
        self._is_drawn = False  # whether the default generator has moved past the seed
        self._generators: dict[tuple[int, torch.device], torch.Generator] = {}

    def active(self) -> AbstractContextManager[object]:
        """Return the guard that a replica's thread holds while its function runs."""
        return private_api.IncludeKey(_installed[0])

    def generator(self, replica_id: int, device: torch.device) -> torch.Generator:
        """Return the replica's generator on a device, to draw from."""
        if not self._is_drawn:
            with self._lock:
                if not self._is_drawn:
                    number = _next_number(torch.default_generator)
                    self._seed = number if self._seed is None else self._seed
                    self._is_drawn = True
        return self.unmoved(replica_id, device)

    def unmoved(self, replica_id: int, device: torch.device) -> torch.Generator:
        """Return the replica's generator, seeded by the run, the replica and the device, to read or set its state."""
        key = (replica_id, device)
        found = self._generators.get(key)
        if found is None:
            with self._lock:
                if self._seed is None:
                    self._seed = _next_number(torch.default_generator.clone_state())
            # The device takes part, so that one replica's streams differ between devices.
            turn = replica_id + 1 + ((device.index or 0) << 20) + ((device.type != "cpu") << 40)
            found = torch.Generator(device).manual_seed(_mix(self._seed, turn) & (_MASK >> 1))
            self._generators[key] = found
        return found


def _next_number(generator: torch.Generator) -> int:
    with private_api.WithoutTransforms():  # the first draw may come from inside vmap
        number = torch.empty((), dtype=torch.int64, device="cpu")
        return int(number.random_(generator=generator))


def _mix(seed: int, turn: int) -> int:
    """Compute SplitMix64: neighbouring inputs give unrelated seeds."""
    z = (seed + turn * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Drawing:
    """Context manager: this thread's random operators draw from ``stream(device)``, unless that is None.

    For code outside replicas that needs a stream of its own, such as input functions in background threads. Torch's
    own generator is neither read nor moved.
    """

    __slots__ = ("_before", "_guard", "_stream")

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        torch_patches.install(torch_patches.RANDOM)
        self._before = context.swap_stream(self._stream)
        self._guard: Any = private_api.IncludeKey(_installed[0])
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)
        context.swap_stream(self._before)


# ------------------------------------------------------------------ the kernels


class _Kernel:
    """One random operator as replicas see it."""

    __slots__ = ("_keys", "_operator", "_place")

    def __init__(self, operator: Any, place: int, keys: Any) -> None:
        self._operator = operator
        self._place = place
        self._keys = keys

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # While torch.compile traces, a generator object must not end up in its graph.
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
    """Return the generator of this thread or of its replica; None for torch's own.

    In cross-replica context (a rendezvous) torch's own generator is meant.
    """
    stream = context.current_stream()
    if stream is not None:
        return stream(device)
    replica = current_replica()
    return None if replica is None else replica.group.streams.generator(replica.id, device)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, kwargs.get("out")):
        if isinstance(value, torch.Tensor):
            return value.device
    device = kwargs.get("device")
    return torch.device("cpu") if device is None else torch.device(device)


class _GeneratorProxy:
    """Replacement of ``torch.random.default_generator``: the replica's own stream in a replica of several."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        replica = current_replica()
        if replica is None or replica.group.size == 1:
            return getattr(torch.default_generator, name)
        return getattr(replica.group.streams.unmoved(replica.id, torch.device("cpu")), name)

    @override
    def __repr__(self) -> str:
        return f"<default generator: {self.__getattr__('__repr__')()}>"


def _generator_place(schema: Any) -> int | None:
    """Return the position of an operator's generator argument: -1 if keyword only, None if it has none."""
    if not schema.name.startswith("aten::"):
        return None
    for i, argument in enumerate(schema.arguments):
        if argument.name == "generator":
            return -1 if argument.kwarg_only else i
    return None


def apply_patch() -> None:
    """Register the kernels and replace the default generator; takes about 60 ms."""
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
        operator = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
        full = f"{name}.{schema.overload_name}" if schema.overload_name else name
        random.impl(full, _Kernel(operator, place, keys), _KEY)
    vars(torch.random)["default_generator"] = _GeneratorProxy()
    _installed.extend((key, others, random))
