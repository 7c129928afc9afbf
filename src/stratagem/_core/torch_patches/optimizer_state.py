"""``optimizer.state`` over managed parameters: keyed by the central parameters in every context."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stratagem._core.managed import find_managed


class StateKeeper(Protocol):
    """Holder of an optimizer's true state, if that is elsewhere: on parameter servers."""

    def bring(self, optimizer: Optimizer) -> None:
        """Copy the true state to ``optimizer.state``."""

    def step(self, optimizer: Optimizer, real: Callable[[], Any]) -> Any:
        """Run the class's own step here, on the true state."""


_KEEPERS: weakref.WeakKeyDictionary[Optimizer, StateKeeper] = weakref.WeakKeyDictionary()


def keeper_of(optimizer: Optimizer) -> StateKeeper | None:
    """Return the holder of an optimizer's true state; None if that is here."""
    return _KEEPERS.get(optimizer) if _KEEPERS else None


def keep_state_with(optimizer: Optimizer, keeper: StateKeeper) -> None:
    """Let steps, copies and pickles of the optimizer in this process ask the keeper for its state."""
    _KEEPERS[optimizer] = keeper


class CentralState(defaultdict[Any, Any]):
    """``optimizer.state``, keyed by central parameters; a replica's leaf finds the same entry.

    Copies and pickles hold the true state, also if a `StateKeeper` has it.
    """

    __slots__ = ("_optimizer",)

    def __init__(self, plain: Mapping[Any, Any], optimizer: Optimizer) -> None:
        super().__init__(dict, plain)
        self._optimizer = weakref.ref(optimizer)

    @override
    def __missing__(self, key: Any) -> Any:
        central = _central(key)
        return super().__missing__(key) if central is key else self[central]

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_central(key), value)

    @override
    def __contains__(self, key: object) -> bool:
        return super().__contains__(_central(key))

    @override
    def get(self, key: Any, default: Any = None, /) -> Any:
        return super().get(_central(key), default)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        self._bring()
        return defaultdict, (dict, dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        self._bring()
        return copy.deepcopy(defaultdict(dict, self), memo)

    def _bring(self) -> None:
        optimizer = self._optimizer()
        keeper = None if optimizer is None else keeper_of(optimizer)
        if keeper is not None and optimizer is not None and optimizer.state is self:
            keeper.bring(optimizer)


def _central(key: Any) -> Any:
    managed = find_managed(key) if isinstance(key, Tensor) else None
    return key if managed is None else managed.central
