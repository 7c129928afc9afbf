"""Seeds per element and epoch, and shuffled orders.

Every seed is a pure function of (base seed, place in the pipeline, epoch, element number). So the same seed gives
the same elements with any number of threads, and a position is a few integers.
"""

from __future__ import annotations

import random
from functools import cached_property
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Return a 64-bit hash of integers (the finalizer of splitmix64, once per part)."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


def fresh_seed() -> int:
    """Draw a base seed from torch's generator, so that `torch.manual_seed` makes runs repeat."""
    return int(torch.randint(0, 2**62, (), dtype=torch.int64).item())


class ElementRng:
    """Random generators of one element, passed to a map function as ``rng``.

    Each generator is made when it is first used. Two epochs, or two elements, never share one.

    Attributes:
        seed: 64-bit seed of the element.

    Example:
        >>> import torch, stratagem as sg
        >>> def jitter(x, rng):
        ...     return x + torch.rand((), generator=rng.torch)
        >>> a = [float(x) for x in sg.data.Dataset.range(3).map(jitter, seed=1)]
        >>> b = [float(x) for x in sg.data.Dataset.range(3).map(jitter, 2, seed=1)]
        >>> a == b
        True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @cached_property
    def torch(self) -> torch.Generator:
        """CPU generator of torch."""
        generator = torch.Generator()
        generator.manual_seed(self.seed & (_MASK >> 1))
        return generator

    @cached_property
    def numpy(self) -> np.random.Generator:
        """Generator of NumPy."""
        return np.random.Generator(np.random.PCG64(self.seed))

    @cached_property
    def python(self) -> random.Random:
        """Generator of Python."""
        return random.Random(self.seed)

    def __repr__(self) -> str:
        return f"ElementRng(seed={self.seed:#x})"


def permutation(seed: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the order of a full shuffle."""
    return np.random.Generator(np.random.PCG64(seed)).permutation(size)


class BufferDraws:
    """Places of a shuffle buffer that elements leave from.

    Draws come in blocks seeded by their number, so that draw k does not need the draws before it.
    """

    _BLOCK = 4096  # one seeding of PCG64 takes about 10 µs

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._number = -1
        self._block: list[float] = []

    def place(self, k: int, filled: int) -> int:
        """Return a place in ``range(filled)`` for draw `k`."""
        number, offset = divmod(k, self._BLOCK)
        if number != self._number:
            generator = np.random.Generator(np.random.PCG64(mix(self._seed, number)))
            self._block = generator.random(self._BLOCK).tolist()
            self._number = number
        return int(self._block[offset] * filled)
