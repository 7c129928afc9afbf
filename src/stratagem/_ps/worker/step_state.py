"""State of the optimizers of a worker.

State and groups of an ordinary optimizer are on the servers and on the coordinator. Its object here would show an empty
state, and keep a group or a state that a function gives it. So both are refused.

Of a wrapping optimizer (SAM), its own code runs here, and its state lasts for one function. The step of the optimizer inside goes to the parameter servers. A worker may be lost, and another one may run the next
function: state that such an optimizer keeps from one function to the next would be lost or differ without a sign. So a
class that asks for such state gets an error.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, NoReturn, final

from torch.optim import Optimizer
from typing_extensions import override

from stratagem._core.torch_patches.optimizer_state import CentralState
from stratagem._wire import codec
from stratagem.errors import MisuseError, UnsupportedOptimizer


def _refuse_to_keep(owner: str, what: str) -> NoReturn:
    raise UnsupportedOptimizer(
        f"{owner} keeps {what} from one step to the next. Its code runs on workers, because it wraps another "
        "optimizer, and a worker's state is lost with the worker and not part of checkpoints. Give functions the "
        "optimizer inside it, and do the rest on the coordinator between two steps (after join(), writes to "
        "parameters there reach the servers); or use another strategy."
    )


class _ParameterState(dict[str, Any]):
    """State of one parameter: what the function has put there. Other keys are asked for in vain, and refused."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, key: object) -> NoReturn:
        _refuse_to_keep(self._owner, f"state[parameter][{key!r}]")

    @override
    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self.__missing__(key)

    @override
    def get(self, key: str, default: Any = None, /) -> Any:
        return self[key]

    @override
    def setdefault(self, key: str, default: Any = None, /) -> Any:
        return self[key]

    @override
    def __len__(self) -> int:
        return dict.__len__(self) or _refuse_to_keep(self._owner, "the state of parameters")


@final
class WrapperStates:
    """The optimizers around others of one worker, and what they keep."""

    def __init__(self) -> None:
        self._with_state: list[Optimizer] = []  # for one function
        self._attributes: dict[Optimizer, tuple[dict[str, Any], bytes]] = {}  # with their digest

    def add(self, wrapper: Optimizer, inner: Optimizer, attributes: dict[str, Any]) -> None:
        """Give a wrapper its attributes, and both optimizers a state that lasts for one function."""
        owner = type(wrapper).__name__
        for one in (wrapper, inner):
            one.state = defaultdict(lambda: _ParameterState(owner))
            self._with_state.append(one)
        self.set(wrapper, attributes)

    def set(self, wrapper: Optimizer, attributes: dict[str, Any]) -> None:
        """Take over attributes of the coordinator's object."""
        vars(wrapper).update(attributes)
        held = self._attributes.get(wrapper, ({}, b""))[0] | attributes
        self._attributes[wrapper] = held, _digest(held)

    def forget(self, optimizer: Optimizer) -> None:
        """Release an optimizer."""
        self._attributes.pop(optimizer, None)
        self._with_state = [one for one in self._with_state if one is not optimizer]

    def begin(self) -> None:
        """Begin a function."""
        for one in self._with_state:
            one.state.clear()

    def check(self) -> None:
        """Raise at the function's end if a wrapper changed an attribute, such as a counter of steps."""
        for wrapper, (attributes, before) in self._attributes.items():
            held = vars(wrapper)
            if attributes and _digest({name: held.get(name) for name in attributes}) != before:
                held.update(attributes)
                _refuse_to_keep(type(wrapper).__name__, "values in its attributes")


def _digest(attributes: dict[str, Any]) -> bytes:
    def describe(obj: object) -> tuple[str, int] | None:
        return ("optimizer", id(obj)) if isinstance(obj, Optimizer) else None

    return codec.digest(attributes, describe)[0] if attributes else b""


@final
class StateOnServers(CentralState):
    """``optimizer.state`` of an optimizer whose state is on the parameter servers."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self._optimizer(), "state")


for _name in vars(dict).keys() - vars(object).keys() - {"__class_getitem__"}:
    setattr(StateOnServers, _name, StateOnServers._refuse)


def refuse_changes(optimizer: Optimizer) -> None:
    """Let an optimizer of a worker refuse other groups and a whole state."""
    reference = weakref.ref(optimizer)
    for name in ("add_param_group", "load_state_dict", "state_dict"):
        vars(optimizer)[name] = lambda *_, what=f"{name}()", **__: _refuse(reference(), what)


def _refuse(optimizer: Optimizer | None, what: str) -> NoReturn:
    name = type(optimizer).__name__
    raise MisuseError(
        f"{name}.{what} was used in a scheduled function. The optimizer's state is on the parameter servers, and its "
        f"parameter groups belong to the coordinator: a worker has neither. Use it on the coordinator, after join(): "
        "optimizer.state_dict() there fetches the state, load_state_dict() sends it, and add_param_group() adds "
        "parameters for the functions that follow."
    )
