"""``parameter.data`` in a replica: a view whose writes are noticed.

torch's ``.data`` shares a tensor's memory but counts no version, so that ``p.data.mul_(0.9)`` in a replica
would reach the one central parameter once per replica and nobody could tell. In a replica of several,
``.data`` of a leaf therefore is ``.detach()``: the same memory and the leaf's own version counter,
by which writes are known (`Leaf.was_written`). Assigning to ``.data`` there is refused at once: it would change one
replica's view and be gone with the next run. Everywhere else ``.data`` is torch's.

`install` puts the property on ``nn.Parameter``: docs/design/0004-wrapped-torch-methods.md says why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stratagem._core.context import current_replica
from stratagem._core.managed import find_managed
from stratagem._core.replicated_parameters import ReplicatedParameter
from stratagem.errors import ReplicaError

_plain: Any = torch.Tensor.data


def _managed_of_leaf(tensor: Tensor) -> ReplicatedParameter | None:
    """The home of a leaf that a replica of several looks at; None for any other tensor or asker."""
    replica = current_replica()
    if replica is None or replica.group.size == 1:
        return None
    managed = find_managed(tensor)
    if isinstance(managed, ReplicatedParameter) and tensor is not managed.central:
        return managed
    return None


def _get(tensor: nn.Parameter) -> Tensor:
    seen: Tensor = (
        _plain.__get__(tensor) if _managed_of_leaf(tensor) is None else Tensor.detach(tensor)
    )
    return seen


def _set(tensor: nn.Parameter, value: Tensor) -> None:
    managed = _managed_of_leaf(tensor)
    if managed is not None:
        raise ReplicaError(
            f"the .data of {managed.describe()} was assigned inside {current_replica()!r}. It would change "
            "this replica's view of the one central parameter, until the next run. Let "
            "optimizer.step() update it, or write it outside the function given to run()."
        )
    _plain.__set__(tensor, value)


def install() -> None:
    """Put the property in its place; once per process, by the first strategy."""
    if "data" not in vars(nn.Parameter):
        nn.Parameter.data = property(_get, _set, doc=_plain.__doc__)  # type: ignore[assignment]  # note 0004
