"""``nn.Parameter.grad`` and ``nn.Parameter.data`` in a replica.

``grad`` of a central parameter means the gradient of the replica's leaf. A step often uses parameters that were taken
from the model outside ``run`` (``params = list(model.parameters())``, then ``clip_grad_norm_(params, 1.0)`` in the step).
Those are the central parameters. Without the patch, clipping would act on the gradient of the last run.

``grad`` of a parameter that no strategy manages is one tensor for all replicas. torch frees the old gradient before it
clears the pointer and releases the interpreter lock in between: two threads that both run ``p.grad = None`` free it
twice and corrupt memory. So replicas access it one at a time.

``data`` in a replica is a copy that belongs to the replica, and so is the leaf from then on: ``p.data.add_(p.grad, alpha=-lr)`` would
otherwise change the central parameter once per replica. `ReplicatedParameter.settle` writes the replicas' common result once. A
``grad`` that is read under ``no_grad`` announces a write, too (``p -= lr * p.grad``). Tables have rows, and refuse writes.

``data`` of a parameter that is on parameter servers, on the coordinator, is ``.detach()``, by whose version counter writes are
noticed: ``target.weight.data.copy_(…)`` must reach the servers. On a worker, ``data`` is torch's own, and the worker is told
first (`watch_data`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stratagem._core.context import Replica, current_replica
from stratagem._core.gradients import wait_for_gradients
from stratagem._core.managed import find_managed, find_registered, read_grad, write_grad
from stratagem._core.replicated_parameters import WRITE_ONCE, ReplicatedParameter
from stratagem.errors import ReplicaError

_plain_data: Any = torch.Tensor.data

_SHARED = threading.Lock()
"""Held while a replica of several accesses the gradient of a parameter that replicas share."""


class DataWatcher(Protocol):
    """Object that is told before code gets ``.data`` of its parameter."""

    leaf: nn.Parameter

    def note_data(self) -> None:
        """Note that ``.data`` is about to be read, and may be written."""


_WATCHERS: weakref.WeakValueDictionary[int, DataWatcher] = weakref.WeakValueDictionary()
"""By the id of the parameter, which its watcher keeps alive."""


def watch_data(watcher: DataWatcher) -> None:
    """Tell a watcher whenever code gets ``.data`` of its parameter, as long as the watcher exists.

    In a process without replicas, this is the only patch that it needs.
    """
    _patch_data()
    _WATCHERS[id(watcher.leaf)] = watcher


def _own(parameter: nn.Parameter, managed: object) -> Tensor:
    """Return the tensor whose gradient is meant: the replica's leaf of a central parameter."""
    if isinstance(managed, ReplicatedParameter) and managed.central is parameter:
        return managed.resolve()  # central itself in a replica of another strategy
    return parameter


def _get_grad(parameter: nn.Parameter) -> Tensor | None:
    replica = current_replica()
    if replica is None:
        return read_grad(parameter)
    if replica.is_ahead:
        wait_for_gradients(replica)
    managed = find_registered(parameter)
    if managed is None and replica.group.size > 1:
        with _SHARED:
            return read_grad(parameter)
    if type(managed) is ReplicatedParameter and not torch.is_grad_enabled():
        _expect_write(parameter, managed, replica)
    return read_grad(_own(parameter, managed))


def _expect_write(parameter: nn.Parameter, managed: ReplicatedParameter, replica: Replica) -> None:
    """Let the replica write its leaf, whose gradient is read without grad mode.

    Not in torch's own functions (``clip_grad_norm_``), which write gradients only.
    """
    leaf = managed.by_replica.get(replica.id)
    if leaf is None or leaf.tensor is not parameter or replica.group.size == 1:
        return
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if not caller.startswith("torch.") and leaf.record is replica.record:
        leaf.take_own_memory()


def _set_grad(parameter: nn.Parameter, value: Tensor | None) -> None:
    replica = current_replica()
    if replica is None:
        write_grad(parameter, value)
        return
    if replica.is_ahead:
        wait_for_gradients(replica)
    managed = find_registered(parameter)
    if managed is None and replica.group.size > 1:
        with _SHARED:
            write_grad(parameter, value)
    else:
        write_grad(_own(parameter, managed), value)


def _delete_grad(parameter: nn.Parameter) -> None:
    _set_grad(parameter, None)


def _managed_here(tensor: Tensor) -> ReplicatedParameter | None:
    """Return the managed parameter of a tensor if this is one of several replicas of its strategy."""
    replica = current_replica()
    if replica is None or replica.group.size == 1:
        return None
    managed = find_managed(tensor)
    own = isinstance(managed, ReplicatedParameter) and managed.strategy is replica.strategy
    return managed if own else None  # type: ignore[return-value]  # checked in `own`


def _get_data(tensor: nn.Parameter) -> Tensor:
    replica = current_replica()
    if replica is not None and replica.group.size > 1:
        known = find_registered(tensor)
        leaf = known.by_replica.get(replica.id) if type(known) is ReplicatedParameter else None
        if (
            leaf is not None
            and leaf.has_own_memory
            and leaf.record is replica.record
            and (leaf.tensor is tensor or leaf.managed.central is tensor)
        ):  # asked for before in this run
            again: Tensor = _plain_data.__get__(leaf.tensor)
            return again
    managed = _managed_here(tensor)
    if managed is None:
        if _note_write(tensor, assigned=False):
            return Tensor.detach(tensor)
        plain: Tensor = _plain_data.__get__(tensor)
        return plain
    if type(managed) is not ReplicatedParameter:  # a table
        return Tensor.detach(managed.resolve() if tensor is managed.central else tensor)
    own: Tensor = _plain_data.__get__(_writable(managed))
    return own


def _writable(managed: ReplicatedParameter) -> Tensor:
    """Return the replica's leaf with memory of its own."""
    replica, tensor = current_replica(), managed.resolve()
    leaf = None if replica is None else managed.by_replica.get(replica.id)
    if leaf is not None and leaf.tensor is tensor:
        leaf.take_own_memory()
    return tensor


def _set_data(tensor: nn.Parameter, value: Tensor) -> None:
    managed = _managed_here(tensor)
    if type(managed) is ReplicatedParameter:
        _plain_data.__set__(_writable(managed), value)
        return
    if managed is not None:
        raise ReplicaError(
            f"the .data of {managed.describe()} was assigned inside {current_replica()!r}. {WRITE_ONCE}"
        )
    _plain_data.__set__(tensor, value)
    _note_write(tensor, assigned=True)


def _note_write(tensor: nn.Parameter, *, assigned: bool) -> bool:
    if _WATCHERS and not assigned:
        watcher = _WATCHERS.get(id(tensor))
        if watcher is not None and watcher.leaf is tensor:
            watcher.note_data()
    managed = find_registered(tensor)
    return managed is not None and managed.note_write(assigned=assigned)


def apply_patch() -> None:
    """Put both properties on ``nn.Parameter``."""
    kind: Any = nn.Parameter
    kind.grad = property(_get_grad, _set_grad, _delete_grad, doc=torch.Tensor.grad.__doc__)
    _patch_data()


def _patch_data() -> None:
    kind: Any = nn.Parameter
    if "data" not in vars(kind):
        kind.data = property(_get_data, _set_data, doc=_plain_data.__doc__)
