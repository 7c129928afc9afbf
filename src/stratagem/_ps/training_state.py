"""State of schedulers, gradient scalers and optimizer settings, and the advances that scheduled functions make.

A scheduled function may call ``scheduler.step()`` or ``scaler.update()``, or set a learning rate. Its worker makes the
change on the worker's object and reports it as an *advance*. The coordinator makes the same advance on its own object,
once for each closure (`coordinator/advance_ledger.py`, `worker/advance_recorder.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stratagem._core.counters import StepCounter, is_counter
from stratagem._core.fingerprints import PLAIN
from stratagem._core.torch_patches.private_api import update_scale
from stratagem._ps.definitions import Token
from stratagem.errors import MisuseError

Stateful = Optimizer | LRScheduler | GradScaler | StepCounter


class SchedulerStep(NamedTuple):
    """One call of ``scheduler.step``."""

    token: Token
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class ScalerUpdate(NamedTuple):
    """One call of ``scaler.update``: whether the gradients overflowed, or the scale that was set."""

    token: Token
    overflowed: bool
    new_scale: float | None


class SettingWritten(NamedTuple):
    """A new value of one setting in one group. `was_read`: the function read the value `before` first."""

    token: Token
    group: int
    name: str
    before: Any
    value: Any
    was_read: bool


class CounterMoved(NamedTuple):
    """An amount that was added to a counter."""

    token: Token
    by: int


Advance = SchedulerStep | ScalerUpdate | SettingWritten | CounterMoved


class StateSnapshot(NamedTuple):
    """State on the coordinator, which contains a worker's own reports up to number `reported`."""

    reported: int
    states: Mapping[Token, Any]


def state_of(obj: Stateful) -> Any:
    """Return the state of an object as plain data: of an optimizer, the settings of its groups.

    Example:
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> state_of(sgd)[0]["lr"]
        0.5
    """
    if isinstance(obj, Optimizer):
        return [
            {
                name: value if type(value) in PLAIN else as_number(value)
                for name, value in dict.items(group)
                if name not in _NO_SETTING
            }
            for group in obj.param_groups
        ]
    if isinstance(obj, StepCounter):
        return obj.get()
    return _copied(obj.state_dict())


def _copied(value: Any) -> Any:
    """Return a deep copy; faster than `copy.deepcopy` for the numbers, lists and dicts that most states are."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is dict:
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if kind is list else copy.deepcopy(value)


_NO_SETTING = frozenset({"params", "param_names"})


def as_number(value: Any) -> Any:
    """Return the number in a tensor of one element, any other value as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def load_state(obj: Stateful, state: Any) -> None:
    """Give an object the state that `state_of` returned."""
    if isinstance(obj, Optimizer):
        for number, (group, settings) in enumerate(zip(obj.param_groups, state, strict=False)):
            for name in settings.keys() | (group.keys() - _NO_SETTING):
                if name in settings:
                    set_setting(obj, number, name, settings[name])
                else:
                    dict.pop(group, name)
    elif isinstance(obj, StepCounter):
        obj.set(state)
    else:
        obj.load_state_dict(_copied(state))


def set_setting(optimizer: Optimizer, group: int, name: str, value: Any) -> None:
    """Set one setting; a tensor of one element stays the same tensor."""
    held = optimizer.param_groups[group]
    now = dict.get(held, name)
    if isinstance(now, Tensor) and now.numel() == 1:
        now.fill_(value)
    else:
        dict.__setitem__(held, name, value)


def make_advance(obj: Any, advance: Advance) -> None:
    """Make an advance on an object.

    Raises:
        MisuseError: a setting was computed from a value that another worker has changed since.
    """
    if isinstance(advance, SchedulerStep):
        obj.step(*advance.args, **advance.kwargs)
    elif isinstance(advance, ScalerUpdate):
        _update_scaler(obj, advance)
    elif isinstance(advance, CounterMoved):
        if is_counter(obj.get()):  # the program may have deleted it
            obj.set(obj.get() + advance.by)
    else:
        now = as_number(dict.get(obj.param_groups[advance.group], advance.name))
        if advance.was_read and now != advance.before:
            raise MisuseError(
                f"a scheduled function computed the setting {advance.name!r} of {type(obj).__name__} from its "
                f"earlier value {advance.before!r}, but another worker has set it to {now!r} meanwhile, so the "
                "two changes cannot be combined. Compute the setting from a count (a step number in the "
                "arguments, or a torch.optim.lr_scheduler), or change it on the coordinator."
            )
        set_setting(obj, advance.group, advance.name, advance.value)


def _update_scaler(scaler: GradScaler, advance: ScalerUpdate) -> None:
    state = scaler.state_dict()
    if advance.new_scale is not None:
        state["scale"] = advance.new_scale
    else:
        scale = torch.tensor(float(state["scale"]), dtype=torch.float32)
        steps = torch.tensor(int(state["_growth_tracker"]), dtype=torch.int32)
        update_scale(
            scale,
            steps,
            torch.tensor(float(advance.overflowed), dtype=torch.float32),
            state["growth_factor"],
            state["backoff_factor"],
            state["growth_interval"],
        )
        state.update(scale=scale.item(), _growth_tracker=int(steps))
    scaler.load_state_dict(state)
