"""What a function captured when it was looked at, and whether that is still so.

The quick half of `marks.py`: a function whose checks all hold is the one that was sent, and its mark
need not be made again.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Final, final

import torch

SMALL_BYTES: Final = 4096
"""Tensors up to this size count by value: what is written through NumPy or ``.data`` has no version."""

_AS_ARRAYS: Final = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool})

MISSING: Final = object()


@final
class CaptureCheck:
    """One thing a function captures, as it was when the function was looked at.

    Args:
        holder: a cell, or the globals, or what a class or module has.
        name: of what is in it.
        found: what was there.
        mark: of a tensor; None for everything else.
        is_handle: a tensor or an object of the strategy's, which is not kept alive by this.
    """

    __slots__ = ("_found", "_holder", "_mark", "_name", "is_handle")

    def __init__(
        self,
        holder: Any,
        name: str | None,
        found: Any,
        *,
        mark: tuple[Hashable, ...] | None = None,
        is_handle: bool,
    ) -> None:
        self._holder = holder
        self._name = name
        self._found: Any = weakref.ref(found) if is_handle else found
        self._mark = mark
        self.is_handle = is_handle

    @property
    def key(self) -> tuple[int, str | None]:
        """What it is about; whoever notes it keeps the holder alive."""
        return id(self._holder), self._name

    def now(self) -> Any:
        """What is there now."""
        if self._name is not None:
            return self._holder.get(self._name, MISSING)
        return self._holder.cell_contents

    def is_same(self, now: Any) -> bool:
        """Whether this is what was found, unchanged."""
        found = self._found() if self.is_handle else self._found
        if found is None and self.is_handle:
            return False  # it is gone; None now is another thing
        if now is not found:
            return False
        return self._mark is None or mark_tensor(now) == self._mark


@final
class CaptureCountCheck:
    """How many things there are in a class or module that a function captures."""

    __slots__ = ("_count", "_holder", "is_handle")

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._count = len(holder)
        self.is_handle = False

    @property
    def key(self) -> tuple[int, str | None]:
        """What it is about."""
        return id(self._holder), "number of members"

    def now(self) -> Any:
        """How many there are now."""
        return len(self._holder)

    def is_same(self, now: Any) -> bool:
        """Whether there are as many as before."""
        return bool(now == self._count)


def mark_tensor(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Identity and version of a tensor, and of a small one its bytes.

    Example:
        >>> small = torch.zeros(2)
        >>> before = mark_tensor(small)
        >>> small.numpy()[0] = 1
        >>> mark_tensor(small) == before
        False
    """
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.nbytes > SMALL_BYTES
        or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    ):
        return id(tensor), tensor._version
    if tensor.dtype in _AS_ARRAYS and not tensor.is_neg():
        return id(tensor), tensor._version, tensor.detach().numpy().tobytes()
    content = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return id(tensor), tensor._version, bytes(content.view(torch.uint8).numpy())
