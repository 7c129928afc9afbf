"""Random numbers of closures, derived from the job's seed and the closure's number.

A closure that is repeated on another worker draws the same numbers as before. This covers the global generators
of torch, Python's `random` and NumPy (docs/design/0003), in processes that a worker owns. All of them are seeded before each
closure, in 6 µs.
"""

from __future__ import annotations

import random
from typing import Final, final

import numpy as np
import torch

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, and with irregular bits in both halves: distinct closures get distinct, unrelated seeds."""


@final
class ClosureRandom:
    """The random streams of one job on one worker."""

    def __init__(self, seed: int) -> None:
        self._base = _mix(seed)
        self._has_cuda = torch.cuda.is_available()
        self._seed_torch = torch.default_generator.manual_seed

    def begin(self, number: int) -> None:
        """Let the generators continue with the stream of closure `number`."""
        seed = (self._base + number * _STEP) & _MASK
        self._seed_torch(seed)
        if self._has_cuda:
            torch.cuda.manual_seed_all(seed)
        seed = _mix(seed)
        random.seed(seed)
        np.random.seed(_mix(seed) >> 32)  # noqa: NPY002 - the global state; an array as seed would take 90 µs


def _mix(seed: int) -> int:
    """SplitMix64: return unrelated numbers for neighbouring seeds."""
    z = (seed + _STEP) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
