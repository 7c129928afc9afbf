"""State and groups of a worker's optimizers, which are on the servers and on the coordinator.

A worker's optimizer would show an empty state, and keep a group or a state that a function gives it. So both are refused.
"""

from __future__ import annotations

import types
from typing import Any, Final, NoReturn, final

from torch.optim import Optimizer

from stratagem._core.torch_patches.optimizer_state import CentralState
from stratagem.errors import MisuseError

_METHODS: Final = ("add_param_group", "load_state_dict", "state_dict")
_READS_AND_WRITES: Final = (
    "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__", "clear", "get", "items", "keys",
    "pop", "popitem", "setdefault", "update", "values",
)  # fmt: skip


@final
class StateOnServers(CentralState):
    """``optimizer.state`` of an optimizer whose state is on the parameter servers."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self._optimizer(), "state")


for _name in _READS_AND_WRITES:
    setattr(StateOnServers, _name, StateOnServers._refuse)


def refuse_changes(optimizer: Optimizer) -> None:
    """Let an optimizer of a worker refuse other groups and a whole state."""
    for name in _METHODS:
        vars(optimizer)[name] = types.MethodType(_refusing(name), optimizer)


def _refusing(name: str) -> Any:
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, f"{name}()")

    return method


def _refuse(optimizer: Optimizer | None, what: str) -> NoReturn:
    name = type(optimizer).__name__
    raise MisuseError(
        f"{name}.{what} was used in a scheduled function. The optimizer's state is on the parameter servers, and its "
        f"parameter groups belong to the coordinator: a worker has neither. Use it on the coordinator, after join(): "
        "optimizer.state_dict() there fetches the state, load_state_dict() sends it, and add_param_group() adds "
        "parameters for the functions that follow."
    )
