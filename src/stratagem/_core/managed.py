"""Where parameters and buffers live, and what each replica sees of them.

A *home* stands behind one parameter or buffer of a module. Code outside any replica works with
``central``; code inside replica *i* gets that replica's own tensor:

- a parameter's *leaf*: a plain ``nn.Parameter`` over central's memory when the device is the same (so
  nothing is copied, and an optimizer step at home is seen at once), over a refreshed copy elsewhere.
  It has its own gradient and its own version counter, which is how a write inside a replica is noticed.
- a buffer's *copy*: replicas run side by side and BatchNorm writes its buffers in place, so each
  replica writes its own; `settle` merges them into central when the run has succeeded.

Within a run a tensor is brought up to date once, when the replica first asks for it; what was touched
is noted in the replica's `RunRecord`, so the end of a run looks at nothing else. Modules meet homes in
`modules`, gradients in `gradients`, optimizers in `optimizers`; parameter servers bring homes of their
own (`ManagedParameter`). The leaves are in `leaves`, the copies in `buffers`; here is what they share.
Nothing here knows a process or a thread.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from stratagem._core.context import Replica
from stratagem._core.torch_patches.private_api import outside_all_transforms

if TYPE_CHECKING:
    from stratagem._core.replicated_buffers import BufferCopy, ReplicatedBuffer
    from stratagem._core.replicated_parameters import Leaf, ReplicatedParameter


class RunRecord:
    """What one replica touched in one run, and the gradients of the backward pass in progress.

    A tensor is up to date while its record is its replica's; a record that was never settled belongs
    to a run that is under way, or failed.
    """

    __slots__ = (
        "accumulated",
        "arrived",
        "closed",
        "copies",
        "leaves",
        "put_aside",
        "queued",
        "replica",
    )  # fmt: skip

    def __init__(self, replica: Replica | None) -> None:
        self.replica = replica
        self.leaves: list[Leaf] = []
        self.copies: list[BufferCopy] = []
        self.accumulated: dict[ReplicatedParameter, Leaf] = {}
        self.arrived = 0  # leaves that got a gradient in the last pass, until `foreign` has asked
        self.put_aside: list[
            Leaf
        ] = []  # leaves whose earlier gradients wait for the end of the pass
        self.queued = False  # the engine already knows that the replicas meet after this backward
        self.closed = False

    def close(self) -> None:
        """What it tells has come home; the tensors that still point here keep nothing alive."""
        self.closed = True
        self.replica = None
        self.leaves = []
        self.copies = []

    def __repr__(self) -> str:
        return (
            f"<RunRecord of {self.replica!r}: {len(self.leaves)} parameters, "
            f"{len(self.copies)} buffers>"
        )


BLANK = RunRecord(None)
"""The record of a tensor no run has used yet."""
BLANK.close()


def run_record(replica: Replica) -> RunRecord:
    """The replica's record, opened when first needed."""
    record: RunRecord | None = replica.record
    if record is None:
        record = replica.record = RunRecord(replica)
        group = replica.group
        group.at_end("homes.settle", lambda: settle(group.replicas))
    return record


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written in place."""
    # Inference tensors count no versions: nobody may write them outside inference mode anyway.
    return -1 if tensor.is_inference() else tensor._version


class ManagedParameter(abc.ABC):
    """Where one parameter lives.

    Attributes:
        central: the parameter that code outside any replica works with; its identity is stable.

    A strategy makes homes in its hook ``_adopt_parameter(module, name, parameter)``. Subclass this to
    keep parameters elsewhere. A tensor ``resolve`` hands out in central's place should be told to
    `register_alias`, and `owns` should know it, so that an optimizer given it finds the home.
    """

    __slots__ = ("__weakref__", "central")

    central: nn.Parameter

    def __init__(self, central: nn.Parameter) -> None:
        self.central = central
        _HOMES[id(central)] = self

    @abc.abstractmethod
    def resolve(self) -> Tensor:
        """What code that asks now, in this context, gets. On the path of every lookup: be quick."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is central or something we hand out in its place."""
        return tensor is self.central

    def register_alias(self, tensor: Tensor) -> None:
        """Let `find_managed` find us by ``tensor`` too; we must keep it alive as long as ourselves."""
        _HOMES[id(tensor)] = self

    @property
    def strategy(self) -> Any:
        """The strategy that looks after this parameter; None when it is gone, or does not matter."""
        return None

    @abc.abstractmethod
    def adopt_copy(self, parameter: nn.Parameter) -> ManagedParameter | None:
        """A home for ``parameter``, a deep copy of central; None leaves the copy an ordinary one."""


# id(central) and id(leaf) -> home. A home keeps both tensors alive, so an id cannot be used again
# while its entry exists; when the last module and optimizer let go of the home, the entries vanish.
_HOMES: weakref.WeakValueDictionary[int, ManagedParameter] = weakref.WeakValueDictionary()
_REFERENCES: dict[int, weakref.ref[ManagedParameter]] = _HOMES.data  # type: ignore[attr-defined]


def find_managed(parameter: Tensor) -> ManagedParameter | None:
    """The home behind a parameter (or behind a replica's leaf of it), by identity; None if it has none.

    Example:
        >>> import torch
        >>> from stratagem._core.managed import find_managed
        >>> find_managed(torch.nn.Parameter(torch.zeros(1))) is None
        True
    """
    managed = _HOMES.get(id(parameter))
    return managed if managed is not None and managed.owns(parameter) else None


def managed_by_id(tensor: Tensor) -> ManagedParameter | None:
    """The home registered for a tensor, in few steps: the caller checks that it still owns it."""
    reference = _REFERENCES.get(id(tensor))
    return None if reference is None else reference()


def outside_transforms(ask: Callable[[Replica], Tensor], replica: Replica) -> Tensor:
    """Have a tensor brought up to date as it would be outside ``torch.func.grad``, ``vmap`` and the like.

    What a replica is given stays after the transform has ended; made inside, it would be a wrapper of it.
    """
    with outside_all_transforms():
        return ask(replica)


central_gradient: Callable[[Tensor], Tensor | None] = cast("Any", Tensor.grad).__get__
"""The gradient a central parameter itself holds. Not by its name, which in a replica means the
leaf's (`grad_attribute`)."""


def settle(replicas: Sequence[Replica]) -> None:
    """A run has succeeded: parameters and buffers the replicas touched come home.

    Runs once, after every replica has returned, in cross-replica context. After a failed run nothing
    is called: a tensor whose last record was never settled starts again from central.
    """
    weights = replicas[0].group.row_weights
    if 0.0 in weights:
        replicas = sorted(replicas, key=lambda replica: weights[replica.id] <= 0)  # rows first
    records = [replica.record for replica in replicas if replica.record is not None]
    for record in records:
        for leaf in record.leaves:
            if leaf.tensor._version != leaf.version:
                leaf.was_written()
    agreed: dict[ReplicatedParameter, Any] = {}
    copies: dict[ReplicatedBuffer, list[BufferCopy]] = {}
    for record in records:
        for leaf in record.leaves:
            managed = leaf.managed
            if managed not in agreed:  # the first replica speaks for all
                agreed[managed] = managed.settle(leaf)
            leaf.synced_with = agreed[managed]
        for copy in record.copies:
            copies.setdefault(copy.managed, []).append(copy)
    for buffer, written in copies.items():
        buffer.settle(written, weights)
    for record in records:
        record.close()
    for replica in replicas:
        replica.record = None
