"""Memory for large optimizer state: pages of its own, apart from the allocator's heap.

Some classes make their state when they are built (Adagrad's sums). Made by the allocator, all of it would be
written at once, in small pages. Used by `shard_optimizer.py`; knows torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from stratagem._wire.shm import LARGE_PAGE_BYTES, zeros_apart

_ZEROS = (torch.zeros_like, torch.full_like)


@final
class StateApart(TorchFunctionMode):
    """Context in which large tensors "like another one" come from `zeros_apart`.

    Zeros cost memory only where something is written later: table rows that are never trained have no sums.

    Example:
        >>> with StateApart():
        ...     made = torch.full_like(torch.empty(1 << 20), 0.5)
        >>> made.sum()
        tensor(524288.)
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = {} if kwargs is None else dict(kwargs)
        if func in _ZEROS and args and _is_plain(args[0], options):
            like = args[0]
            value = 0.0 if func is torch.zeros_like else options.get("fill_value", args[-1])
            made = zeros_apart(tuple(like.shape), like.dtype)
            return made.fill_(value) if value else made
        return func(*args, **options)


def _is_plain(like: Any, options: Mapping[str, Any]) -> bool:
    return (
        isinstance(like, Tensor)
        and like.device.type == "cpu"
        and like.layout is torch.strided
        and like.nbytes >= LARGE_PAGE_BYTES
        and like.is_contiguous()
        and set(options) <= {"fill_value", "memory_format"}
    )
