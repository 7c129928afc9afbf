"""Random numbers of closures, derived from the job's seed and the closure's number.

A closure that is repeated on another worker draws the same numbers as before. This covers the global generators
of torch, Python's `random` and NumPy (docs/design/0003), in processes that a worker owns.

Torch's generator is seeded before each closure, in 1.3 µs. The other two take 7 µs, so they are seeded at the
first draw of a closure: `install` wraps the functions of the modules `random` and `numpy.random`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
import torch

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, and with irregular bits in both halves: distinct closures get distinct, unrelated seeds."""

_pending: list[int] = []  # the seed of the running closure, until it first draws
_installed: list[bool] = []


@final
class ClosureRandom:
    """The random streams of one job on one worker."""

    def __init__(self, seed: int) -> None:
        self._base = _mix(seed)
        self._has_cuda = torch.cuda.is_available()
        self._seed_torch = torch.default_generator.manual_seed

    def begin(self, number: int) -> None:
        """Let the generators continue with the stream of closure `number`."""
        if not _installed:
            install()
        seed = (self._base + number * _STEP) & _MASK
        self._seed_torch(seed)
        if self._has_cuda:
            torch.cuda.manual_seed_all(seed)
        _pending[:] = (seed,)


def install() -> None:
    """Wrap the functions of `random` and `numpy.random`."""
    _installed.append(True)
    for module in (random, np.random):
        for name in module.__all__:
            function = getattr(module, name)
            if not isinstance(function, type):
                setattr(module, name, _seeding(function))


def _seeding(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if _pending:
            seed = _mix(_pending.pop())
            _seed_python(seed)
            _seed_numpy(_mix(seed) >> 32)  # an integer of 32 bits; an array would take 90 µs
        return function(*args, **kwargs)

    return draw


def _mix(seed: int) -> int:
    """SplitMix64: return unrelated numbers for neighbouring seeds."""
    z = (seed + _STEP) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


_seed_python: Final[Callable[..., None]] = random.seed  # the functions before they are wrapped
_seed_numpy: Final[Callable[..., None]] = np.random.seed
