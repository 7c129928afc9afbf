"""``torch.amp.GradScaler`` in a replica.

A scaler keeps one stage per optimizer ("unscaled", "stepped"), not per replica: the second replica that calls
``unscale_`` would get "already called". So each replica works with a copy of the scaler that shares scale and growth
tracker but has its own stages, and ``update`` runs once for all replicas. torch has no hooks here, and a scaler may exist
before any strategy does; so the three methods are wrapped.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from stratagem._core.context import Replica, current_replica
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._core.torch_patches.private_api import (
    refresh_scaler_state,
    set_stages,
    stages_of,
)

_PLAIN: dict[str, Callable[..., Any]] = {
    name: getattr(GradScaler, name) for name in ("unscale_", "step", "update")
}


class _ReplicaScaler(GradScaler):
    """One replica's copy of a scaler."""

    unscale_ = _PLAIN["unscale_"]
    update = _PLAIN["update"]

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step as torch does, without passing the scale to fused optimizers, which replicas share."""
        state = stages_of(self)[id(optimizer)]
        if not self.is_enabled() or state["stage"] is OptState.STEPPED or "closure" in kwargs:
            return _PLAIN["step"](self, optimizer, *args, **kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result


def _copy_for(replica: Replica, scaler: GradScaler) -> _ReplicaScaler:
    """Return the replica's copy of a scaler; create it at the first use in a run."""
    group = replica.group
    key = ("scaler", id(scaler), replica.id)
    found: _ReplicaScaler | None = group.shared.get(key)
    if found is None:
        found = object.__new__(_ReplicaScaler)  # not copy.copy, which loses the scale
        found.__dict__.update(scaler.__dict__)
        stages = copy.deepcopy(dict(stages_of(scaler)))
        set_stages(found, defaultdict(refresh_scaler_state, stages))
        group.shared[key] = made = found
        # After the run the scaler has the stages of a replica with rows, for an update() outside.
        if replica.id == next((i for i, w in enumerate(group.row_weights) if w > 0), 0):

            def return_stages() -> None:
                set_stages(scaler, stages_of(made))

            group.after_success(key, return_stages)
    return found


def _in_several(scaler: GradScaler) -> Replica | None:
    replica = current_replica()
    several = replica is not None and replica.group.size > 1 and scaler.is_enabled()
    return replica if several else None


def _unscale(self: GradScaler, optimizer: Optimizer) -> None:
    replica = _in_several(self)
    _PLAIN["unscale_"](self if replica is None else _copy_for(replica, self), optimizer)


def _step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    replica = _in_several(self)
    if replica is None:
        return _PLAIN["step"](self, optimizer, *args, **kwargs)
    return _copy_for(replica, self).step(optimizer, *args, **kwargs)


def _update(self: GradScaler, new_scale: Any = None) -> None:
    replica = _in_several(self)
    if replica is None:
        _PLAIN["update"](self, new_scale)
        return
    group = replica.group

    def combine(brought: list[Any]) -> list[Any]:
        here = [i for i, each in enumerate(brought) if each is not None]
        lead = next((i for i in here if group.row_weights[i] > 0), here[0])
        brought[lead].update(new_scale)
        for i in here:
            set_stages(brought[i], defaultdict(refresh_scaler_state))
        return [None] * len(brought)

    group.rendezvous(replica.id, "scaler.update()", _copy_for(replica, self), combine)


def apply_patch() -> None:
    """Wrap ``unscale_``, ``step`` and ``update`` of ``GradScaler``."""
    for name, ours in (("unscale_", _unscale), ("step", _step), ("update", _update)):
        setattr(GradScaler, name, eagerly(functools.wraps(_PLAIN[name])(ours)))
