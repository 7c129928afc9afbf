"""A clock of what modules are made of: it moves when one gets another parameter, buffer, part or hook.

Who must know (parameter servers tell workers) compares the clock with the last reading, and looks at the
modules only when it moved.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

from torch import Tensor
from typing_extensions import override

_ticks = itertools.count(1)
_time = 0


def note() -> None:
    """Something was registered, replaced or removed. From any thread."""
    global _time
    # Two threads may write in either order: whatever was read before, it is another number now.
    _time = next(_ticks)


def now() -> int:
    """The clock's reading.

    Example:
        >>> before = now()
        >>> note()
        >>> now() == before
        False
    """
    return _time


class _NotedHooks(OrderedDict[int, Any]):
    """A tensor's hooks, as torch keeps them: tells when one comes or goes."""

    @override
    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        note()

    @override
    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        note()


def note_hooks(tensor: Tensor) -> bool:
    """Let the clock move when a hook is put on a tensor, or taken away.

    Returns:
        False if it cannot: there are hooks already, and torch's handles know only the dict they are in.

    Example:
        >>> import torch
        >>> weight = torch.zeros(1, requires_grad=True)
        >>> note_hooks(weight)
        True
        >>> before = now()
        >>> handle = weight.register_hook(lambda gradient: gradient / 2)
        >>> now() == before
        False
    """
    # torch fills these dicts if they are there, and makes them if not.
    kept: Any = tensor  # torch's own annotations know one of the two attributes, and not as None
    if kept._backward_hooks is None:
        kept._backward_hooks = _NotedHooks()
    if kept._post_accumulate_grad_hooks is None:
        kept._post_accumulate_grad_hooks = _NotedHooks()
    both = (kept._backward_hooks, kept._post_accumulate_grad_hooks)
    return all(isinstance(hooks, _NotedHooks) for hooks in both)
