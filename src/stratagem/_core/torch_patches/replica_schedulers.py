"""LR schedulers and gradient scalers called by every replica: their state moves once.

Both keep Python state (an epoch counter, per-optimizer stages) that R replicas running the same step
would change R times. So ``scheduler.step()`` and ``scaler.update()`` in a replica let the replicas meet
and are done once; ``scaler.unscale_`` and ``scaler.step`` work on a shadow of the scaler, one per replica,
since each replica unscales its own gradients. Outside replicas they are torch's own methods.

torch offers no hook here either, so `install` wraps the methods: see docs/design/0004-wrapped-torch-methods.md.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import LRScheduler

from stratagem._core.context import Replica, current_replica
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._core.torch_patches.private_api import refresh_scaler_state

# ------------------------------------------------------------------ schedulers


def _once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``scheduler.step`` that replicas call together."""

    @eagerly
    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current_replica()
        if replica is None or replica.group.size == 1:
            return plain(self, *args, **kwargs)
        weights = replica.group.row_weights

        def combine(brought: list[Any]) -> Sequence[Any]:
            given_args, given_kwargs = mean_arguments(brought, weights)
            return [plain(self, *given_args, **given_kwargs)] * len(brought)

        return replica.group.meet(replica.id, "scheduler.step()", (args, kwargs), combine)

    return step


def _move_once(kind: type[LRScheduler]) -> None:
    """Have replicas call the class's own ``step``, if it has one, together."""
    plain = vars(kind).get("step")
    if isinstance(plain, types.FunctionType):
        kind.step = _once(plain)  # type: ignore[method-assign]  # design note 0004


def mean_arguments(
    brought: list[Any], weights: Sequence[float]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of one call: a metric is the row-weighted mean of the replicas'."""
    present = [(each, weights[i]) for i, each in enumerate(brought) if each is not None]
    live = [(each, weight) for each, weight in present if weight > 0] or present
    (args, kwargs), _ = live[0]
    total = sum(weight for _, weight in live)

    def mean(values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, bool | int) or not isinstance(first, float | torch.Tensor):
            return first
        if isinstance(first, torch.Tensor) and first.numel() != 1:
            return first
        if total <= 0 or all(value is first for value in values):
            return first
        numbers = [float(value) for value in values]
        return sum(n * w for n, (_, w) in zip(numbers, live, strict=True)) / total

    return (
        [mean([each[0][k] for each, _ in live]) for k in range(len(args))],
        {key: mean([each[1][key] for each, _ in live]) for key in kwargs},
    )


# ------------------------------------------------------------------ scalers

_PLAIN = {name: getattr(GradScaler, name) for name in ("unscale_", "step", "update")}


class _Shadow(GradScaler):
    """One replica's view of a scaler: shares scale and growth tracker, has its own stages."""

    unscale_ = _PLAIN["unscale_"]
    update = _PLAIN["update"]

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As torch's, without handing the scale to fused optimizers: they are shared by replicas."""
        state = self._per_optimizer_states[id(optimizer)]
        if not self._enabled or state["stage"] is OptState.STEPPED or "closure" in kwargs:
            return _PLAIN["step"](self, optimizer, *args, **kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result


def _shadow(scaler: GradScaler, replica: Replica) -> _Shadow:
    key = ("scaler", id(scaler), replica.id)
    notes = replica.group.notes
    shadow = notes.get(key)
    if shadow is None:
        shadow = object.__new__(_Shadow)  # not copy.copy: a scaler's copy forgets its scale
        shadow.__dict__.update(scaler.__dict__)
        shadow._per_optimizer_states = defaultdict(
            refresh_scaler_state, copy.deepcopy(dict(scaler._per_optimizer_states))
        )
        notes[key] = shadow
        # After the run the scaler knows what a replica with rows knew, for an update() outside.
        lead = next((i for i, w in enumerate(replica.group.row_weights) if w > 0), 0)
        if replica.id == lead:

            def return_to_central() -> None:
                scaler._per_optimizer_states = shadow._per_optimizer_states

            replica.group.at_end(key, return_to_central)
    return shadow


def _unscale(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    replica = current_replica()
    if replica is None or replica.group.size == 1 or not self._enabled:
        _PLAIN["unscale_"](self, optimizer)
    else:
        _shadow(self, replica).unscale_(optimizer)


def _step(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    replica = current_replica()
    if replica is None or replica.group.size == 1 or not self._enabled:
        return _PLAIN["step"](self, optimizer, *args, **kwargs)
    return _shadow(self, replica).step(optimizer, *args, **kwargs)


def _update(self: GradScaler, new_scale: Any = None) -> None:
    replica = current_replica()
    if replica is None or replica.group.size == 1 or not self._enabled:
        _PLAIN["update"](self, new_scale)
        return
    group = replica.group

    def combine(brought: list[Any]) -> list[Any]:
        here = [i for i, each in enumerate(brought) if each is not None]
        lead = next((i for i in here if group.row_weights[i] > 0), here[0])
        brought[lead].update(new_scale)
        for i in here:
            brought[i]._per_optimizer_states = defaultdict(refresh_scaler_state)
        return [None] * len(brought)

    group.meet(replica.id, "scaler.update()", _shadow(self, replica), combine)


# ------------------------------------------------------------------ installing

_INSTALLED: list[Any] = []


def install() -> None:
    """Wrap the methods, once per process; the first strategy calls it."""
    if _INSTALLED:
        return
    _INSTALLED.append(True)
    base = LRScheduler
    waiting, seen = [base], {base}
    while waiting:
        kind = waiting.pop()
        _move_once(kind)
        more = set(kind.__subclasses__()) - seen
        seen |= more
        waiting.extend(more)

    def later(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _move_once(cls)

    base.__init_subclass__ = classmethod(later)  # type: ignore[assignment]  # design note 0004
    for name, ours in (("unscale_", _unscale), ("step", _step), ("update", _update)):
        setattr(GradScaler, name, eagerly(functools.wraps(_PLAIN[name])(ours)))
