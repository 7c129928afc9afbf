"""Warn about numbers and tensors that a scheduled function changes and that stay on the worker.

Integers in attributes, global and nonlocal variables are counters, which the coordinator keeps in step (`_core/counters.py`). Any
other number or plain tensor that a function computes from its own value changes on the worker that runs the function. So does a tensor that
requires a gradient and belongs to no strategy, if the function updates it by hand; `torch.optim` optimizers of such tensors are refused.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from torch import Tensor, nn

from stratagem._core.counters import CounterSlot
from stratagem._core.kept_places import NUMBERS, Place
from stratagem._core.kept_search import Search
from stratagem._core.managed import find_managed

_log = logging.getLogger("stratagem.cluster")

MOST_NAMED: Final = 8
"""Places that one warning names."""


@final
class NumbersOnWorkers:
    """The functions of one coordinator that were checked."""

    def __init__(self) -> None:
        self._checked: weakref.WeakSet[types.CodeType] = weakref.WeakSet()

    def warn(self, function: Callable[..., object], owners: Sequence[tuple[Any, str]]) -> None:
        """Warn, once for each function, about values that only a worker will see.

        Args:
            function: the function, when it is packed.
            owners: owner and name of the counters that the coordinator keeps in step.
        """
        inner = unwrapped(function)
        code = getattr(getattr(inner, "__func__", inner), "__code__", None)
        if not isinstance(code, types.CodeType) or code in self._checked:
            return
        self._checked.add(code)
        places = Search(function).places
        self._warn_of_tensors(function, inner, places)
        kept = {_place(owner, name) for owner, name in owners}
        found = [
            place.words(key)
            for place in Search(function, only_numbers=True).changing
            for key, value in place.read().items()
            if isinstance(value, NUMBERS) and (id(place.holder), key) not in kept
        ]
        found += dict.fromkeys(
            f"the tensor in {place.path}"
            for place in places
            if place.is_moved and any(map(_is_plain, _tensors_of(place.values())))
        )
        if found:
            more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            _log.warning(
                "%s changes values that stay on the worker which runs it: %s%s. The coordinator and other workers do not "
                "see the change, and it is lost with the worker. Only integers in attributes, global and nonlocal "
                "variables move everywhere. Return the value from the function and add it up on the coordinator, pass it as "
                "an argument, or keep it in a buffer, a frozen copy of the model (moving averages) or an sg.Variable.",
                getattr(inner, "__qualname__", function), ", ".join(found[:MOST_NAMED]), more,
            )  # fmt: skip

    def _warn_of_tensors(
        self, function: Callable[..., object], inner: Any, places: Sequence[Place]
    ) -> None:
        found = {
            one.path: None
            for one in places
            if one.kinds and any(map(_is_trained_copy, _tensors_of(one.values())))
        }
        if found:
            _log.warning(
                "%s writes to tensors that require a gradient and do not belong to the strategy: %s. The worker which runs "
                "it trains its own copies, and the tensors here stay as they are. Make each an nn.Parameter of an "
                "nn.Module that is created under strategy.scope().",
                getattr(inner, "__qualname__", function), ", ".join([*found][:MOST_NAMED]),
            )  # fmt: skip


def _tensors_of(values: Sequence[Any]) -> Iterator[Any]:
    """Yield what a place holds, and what is in its lists and dicts."""
    for value in values:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _is_trained_copy(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and find_managed(value) is None


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and not value.requires_grad
        and not isinstance(value, nn.Parameter)
        and find_managed(value) is None
    )


def unwrapped(function: Any) -> Any:
    """Return the function inside a ``functools.partial`` or a wrapper (``functools.wraps``, `run_steps`)."""
    inner = function
    while inner is not None:
        function = inner
        is_partial = isinstance(function, functools.partial)
        inner = function.func if is_partial else getattr(function, "__wrapped__", None)
    return function


def _place(owner: Any, name: str) -> tuple[int, str]:
    """Return the identity of the dict or cell with a counter, and its key there."""
    if not isinstance(owner, types.FunctionType):
        return id(getattr(owner, "__dict__", None)), name
    place = CounterSlot.place(owner, name)
    return id(place), "" if isinstance(place, types.CellType) else name
