"""``Tensor.numpy`` on a worker: arrays over the memory of a parameter.

torch counts no writes through such an array (``p.detach().numpy()[0] = 1``), so the worker is told when code gets one, as for
``.data``. The array may come from a view of the parameter, so parameters are found by the address of their storage. Writes
through other libraries that get an address (DLPack, ctypes) are not noticed.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import Tensor, nn

from stratagem._core import torch_patches
from stratagem._core.torch_patches.parameter_attributes import DataWatcher

plain_numpy: Final[Any] = torch.Tensor.numpy
"""torch's own method, for code that only reads."""

_WATCHERS: weakref.WeakValueDictionary[int, DataWatcher] = weakref.WeakValueDictionary()
"""By the address of the storage of the parameter."""


def watch_numpy(watcher: DataWatcher) -> None:
    """Tell a watcher whenever code gets an array over the memory that its parameter has now."""
    torch_patches.install(torch_patches.ARRAYS)
    _WATCHERS[watcher.leaf.untyped_storage().data_ptr()] = watcher


def apply_patch() -> None:
    """Replace ``Tensor.numpy``."""
    kind: Any = torch.Tensor
    _numpy.__doc__ = plain_numpy.__doc__
    kind.numpy = _numpy


def _numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if type(tensor) in (Tensor, nn.Parameter):
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # sparse, or without memory: torch's own method says so
            address = 0
        watcher = _WATCHERS.get(address)
        # The parameter may have moved, and other tensors be where it was.
        if watcher is not None and watcher.leaf.untyped_storage().data_ptr() == address:
            watcher.note_data()
    return plain_numpy(tensor, *args, **kwargs)
