"""``parameter.grad`` in a replica: that replica's gradient, whichever of its tensors is asked.

A step often holds parameters that were taken from the model outside ``run``: ``params = list(model.parameters())`` for
the optimizer, and later ``clip_grad_norm_(params, 1.0)`` in the step. Those are the central parameters; their
``.grad`` is last run's, while this run's is on the replica's leaf. Clipping would act on nothing and nobody would be
told. So in a replica ``.grad`` of a central parameter is the leaf's, read and written; what a leaf or
any other tensor holds is its own.

A parameter without a home is one object for all replicas. torch frees the old gradient before it forgets it and
lets other threads run in between, so that two threads that both say ``p.grad = None`` free it twice and
corrupt memory. In a replica of several they therefore do it one at a time.

`install` puts the property on ``nn.Parameter``: docs/design/0004-wrapped-torch-methods.md says why.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from stratagem._core.context import current_replica
from stratagem._core.managed import managed_by_id
from stratagem._core.replicated_parameters import ReplicatedParameter

_plain: Any = torch.Tensor.grad
_read, _write = _plain.__get__, _plain.__set__

_SHARED = threading.Lock()
"""Held around every access to the gradient of a parameter that replicas share."""


def _leaf(parameter: nn.Parameter, managed: object) -> Tensor:
    """The tensor whose gradient is meant: of a central parameter in a replica, the replica's leaf."""
    if isinstance(managed, ReplicatedParameter) and managed.central is parameter:
        return managed.resolve()  # central itself in a replica of another strategy
    return parameter


def _get(parameter: nn.Parameter) -> Any:
    replica = current_replica()
    if replica is None:
        return _read(parameter)
    managed = managed_by_id(parameter)
    if managed is None and replica.group.size > 1:
        with _SHARED:
            return _read(parameter)
    leaf = _leaf(parameter, managed)
    return _read(parameter) if leaf is parameter else leaf.grad


def _set(parameter: nn.Parameter, value: Tensor | None) -> None:
    replica = current_replica()
    if replica is None:
        _write(parameter, value)
        return
    managed = managed_by_id(parameter)
    if managed is None and replica.group.size > 1:
        with _SHARED:
            _write(parameter, value)
        return
    leaf = _leaf(parameter, managed)
    if leaf is parameter:
        _write(parameter, value)
    else:
        leaf.grad = value


def _delete(parameter: nn.Parameter) -> None:
    _set(parameter, None)


def install() -> None:
    """Put the property in its place; once per process, as soon as there is something to answer for.

    That is a parameter with leaves, or a run of several replicas: reading a gradient through it takes 0.3 µs
    instead of 0.1, twenty times in a small step, which one device and workers need not pay.
    """
    if "grad" not in vars(nn.Parameter):
        nn.Parameter.grad = property(_get, _set, _delete, doc=_plain.__doc__)  # type: ignore[assignment]
