"""Settings of optimizers as plain data, and their changes.

Servers never unpickle: a setting is a number, a text, a truth value, None or a tuple of numbers. Settings that differ
from those at creation are sent with every step and hold for that step alone. So a change in a function concerns the
steps of its worker, and a change on the coordinator the functions scheduled later.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem._core.row_optimizers import ROW_OPTIMIZERS
from stratagem._wire.codec import dtype_from, dtype_name
from stratagem._wire.messages import Setting
from stratagem.errors import UnsupportedOptimizer

Settings = dict[int, dict[str, Any]]
"""Settings by the number of the group."""

_NOT_SETTINGS = frozenset({"params", "param_names"})

WHOLE_TENSOR_OPTIMIZERS = frozenset({"Adafactor", "Muon", "LBFGS"})
"""Classes that use a whole tensor at once (its norm, rows and columns, or matrix): on a part of the tensor they
would compute other numbers."""


def is_known_class(kind: type[Optimizer]) -> bool:
    """Return whether a class is torch's or ours: it steps every parameter by itself.

    Example:
        >>> is_known_class(torch.optim.Adam), is_known_class(torch.optim.Muon)
        (True, True)
    """
    return kind in ROW_OPTIMIZERS or f"{kind.__module__}.".startswith("torch.optim.")


def rows_suffice(kind: type[Optimizer], group: Mapping[str, Any]) -> bool:
    """Return whether a zero gradient changes nothing, so that updating the rows of a batch is enough.

    Example:
        >>> rows_suffice(torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0})
        False
    """
    if kind is torch.optim.SGD:
        return not group["momentum"] and not group["weight_decay"]
    if kind is torch.optim.Adagrad:
        # Without eps an untouched row with an empty accumulator would be 0/0.
        return not group["weight_decay"] and bool(group["eps"])
    return kind is torch.optim.SparseAdam or kind in ROW_OPTIMIZERS


def settings_of(optimizer: Optimizer) -> dict[int, dict[str, Setting]]:
    """Return the settings of every parameter group, by the number of the group.

    Raises:
        UnsupportedOptimizer: a setting is not plain data.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> settings_of(sgd)[0]["lr"]
        0.5
    """
    return {
        number: {
            key: _plain(optimizer, key, value)
            for key, value in group.items()
            if key not in _NOT_SETTINGS
        }
        for number, group in enumerate(optimizer.param_groups)
    }


def plain_settings(values: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the values that can be sent to servers."""
    return {key: _as_plain(value) for key, value in values.items() if _is_plain(value)}


def changed_settings(optimizer: Optimizer, initial: Settings) -> dict[int, dict[str, Setting]]:
    """Return the settings that differ from `initial`, which servers use by default."""
    changed: dict[int, dict[str, Setting]] = {}
    for number, group in enumerate(optimizer.param_groups):
        known = initial.get(number, {})
        for key, value in group.items():
            if key in _NOT_SETTINGS:
                continue
            if key in known:
                before = known[key]
                if before is value or (type(value) is type(before) and value == before):
                    continue
            plain = _plain(optimizer, key, value)
            if key not in known or plain != known[key]:
                changed.setdefault(number, {})[key] = plain
    return changed


def _plain(optimizer: Optimizer, key: str, value: Any) -> Setting:
    if _is_plain(value):
        return _as_plain(value)
    raise UnsupportedOptimizer(
        f"{type(optimizer).__name__} has the setting {key}={value!r}, which cannot be sent to "
        "parameter servers: expected a number, a text, a truth value, None or a tuple of numbers. Use another optimizer "
        "or another strategy."
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(one is None or isinstance(one, int | float) or _is_number(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str) or _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, np.number):  # np.min(...) of a learning-rate rule
        return not np.iscomplexobj(value)
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _as_plain(value: Any) -> Setting:
    if isinstance(value, Tensor | np.floating):
        return float(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, list | tuple):
        return tuple(None if one is None else float(one) for one in value)
    plain: Setting = value
    return plain


def can_send_state(value: object) -> bool:
    """Return whether servers can save and send a value that an optimizer keeps for a parameter.

    Example:
        >>> can_send_state(torch.zeros(2)), can_send_state(3), can_send_state([torch.zeros(2)])
        (True, True, False)
    """
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return isinstance(value, Tensor | bool | float | None)


def state_refusal(name: str, key: object, value: object) -> UnsupportedOptimizer:
    """Return the error for a value for which `can_send_state` is false."""
    what = "a large number" if type(value) is int else f"a {type(value).__name__}"
    return UnsupportedOptimizer(
        f"{name} keeps {what} as state {key!r} of a parameter. Parameter servers save and send state that is tensors "
        "and numbers. Keep each tensor under its own key, or use another optimizer or another strategy."
    )


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that a class outside torch keeps on the object, beside groups and state.

    Example:
        >>> import torch
        >>> own_attributes(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
        {}
    """
    kind = type(optimizer)
    if is_known_class(kind) or kind.__module__.startswith("torch."):
        return {}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith(("_optimizer_", "_zero_grad_", "_patched_", "_opt_"))
        and name not in KEPT_BY_TORCH
    }


DEFAULT_DTYPE: Final = "_default_dtype"
"""Among the attributes that servers get: the program's default dtype, if it is not float32."""

# Attributes that `Optimizer.__init__`, LR schedulers and we set on every object.
KEPT_BY_TORCH = frozenset(
    {
        *dir(Optimizer), "defaults", "state", "param_groups", "_warned_capturable_if_run_uncaptured", DEFAULT_DTYPE,
    }
)  # fmt: skip


def attributes_for_servers(optimizer: Optimizer) -> dict[str, Setting]:
    """Return what servers must know of an optimizer beside its groups and the arguments of its constructor."""
    found = plain_settings(own_attributes(optimizer))
    if torch.get_default_dtype() is not torch.float32:
        found[DEFAULT_DTYPE] = dtype_name(torch.get_default_dtype())
    return found


@contextmanager
def default_dtype(attributes: Mapping[str, Any]) -> Iterator[None]:
    """Make new tensors with the default dtype of the program that has the optimizer: classes keep numbers in them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_from(attributes.get(DEFAULT_DTYPE, "float32")))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def constructor_arguments(kind: type[Optimizer], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known settings that the class's constructor takes by name, beside its parameters."""
    taken = [
        one.name
        for one in inspect.signature(kind).parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    return sequences_as_tuples({name: known[name] for name in taken[1:] if name in known})


def sequences_as_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as torch expects them: sequences (betas, etas) are tuples."""
    return {
        key: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in values.items()
    }
