"""Parameters and buffers under a strategy: their interface, their registry, and the record of a run.

A `ManagedParameter` or `ManagedBuffer` manages one parameter or buffer of a module. Code outside replicas
works with its ``central`` tensor. Code in replica *i* gets its own tensor: a parameter's leaf (`replicated_parameters`)
or a buffer's copy (`replicated_buffers`). The parameter-server package has its own implementations.

A replica updates a tensor once per run, at its first lookup, and records it in its `RunRecord`. After a
successful run, `finish_run` copies gradients, ``requires_grad`` and buffers to the central tensors.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor, nn

from stratagem._core.context import Replica
from stratagem._core.torch_patches.private_api import (
    graph_nodes,
    outside_all_transforms,
    version,
    version_of,
    versions_of,
)

if TYPE_CHECKING:
    from stratagem._core.replicated_buffers import BufferCopy, ReplicatedBuffer
    from stratagem._core.replicated_parameters import Leaf, ReplicatedParameter
    from stratagem._core.strategy_hooks import StrategyHooks
    from stratagem._core.torch_patches.module_members import BuffersByReplica


class RunRecord:
    """Tensors that one replica touched in one run, and the state of its backward pass.

    A tensor is up to date while its record is its replica's. A record that was never closed belongs to a run
    that is still active or has failed.
    """

    __slots__ = (
        "accumulated", "arrived", "closed", "copies", "extra", "leaves", "nodes", "put_aside", "queued", "replica",
    )  # fmt: skip

    def __init__(self, replica: Replica | None) -> None:
        self.replica = replica
        self.leaves: list[Leaf] = []
        self.copies: list[BufferCopy] = []
        self.accumulated: dict[ReplicatedParameter, Leaf] = {}  # got a gradient in this pass
        self.extra: list[tuple[Leaf, Tensor]] = []  # gradients of central tensors in this pass
        self.arrived = 0  # leaves that got a gradient in the last pass, for `autograd_engine`
        self.nodes = (
            graph_nodes()
        )  # of the replica's thread, before this run or at the end of its last pass
        self.put_aside: list[Leaf] = []  # leaves whose earlier gradients wait for the pass to end
        self.queued = False  # whether the engine will call us at the end of this pass
        self.closed = False

    def close(self) -> None:
        """Mark the run as finished and drop all references: tensors still refer to this record."""
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
"""The record of a tensor that no run has used yet."""
BLANK.close()


def run_record(replica: Replica) -> RunRecord:
    """Return the replica's record of this run; create it when first needed."""
    record = replica.record
    if record is None:
        record = replica.record = RunRecord(replica)
        group = replica.group
        group.after_success(finish_run, lambda: finish_run(group.replicas))
    return record


class ManagedParameter(abc.ABC):
    """A parameter that belongs to a strategy.

    Attributes:
        central: the parameter that code outside replicas works with; always the same object.

    A strategy creates it in its hook ``_adopt_parameter``. If `resolve` returns another tensor than ``central``,
    pass that tensor to `register_alias` and let `owns` recognise it, so that optimizers find the parameter by it.
    """

    __slots__ = ("__weakref__", "central")

    central: nn.Parameter

    def __init__(self, central: nn.Parameter) -> None:
        self.central = central
        _BY_ID[id(central)] = self

    @abc.abstractmethod
    def resolve(self) -> Tensor:
        """Return the tensor for the calling context. Every attribute lookup calls this: be quick."""

    def owns(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is central or a tensor that `resolve` returned."""
        return tensor is self.central

    def register_alias(self, tensor: Tensor) -> None:
        """Let `find_managed` find this by ``tensor``, which must exist as long as this object."""
        _BY_ID[id(tensor)] = self

    def note_write(self, *, assigned: bool) -> bool:
        """Handle an access to ``data`` of ``central``; return whether writes through it must count a version."""
        return False

    @property
    def strategy(self) -> StrategyHooks | None:
        """The strategy of this parameter; None if it was collected or does not matter."""
        return None

    @abc.abstractmethod
    def adopt_copy(self, parameter: nn.Parameter) -> ManagedParameter | None:
        """Take over a deep copy of central; None leaves the copy an ordinary parameter."""


class ManagedBuffer(Protocol):
    """A buffer that belongs to a strategy."""

    @property
    def central(self) -> Tensor:
        """The buffer that code outside replicas works with."""

    @property
    def strategy(self) -> StrategyHooks | None:
        """The strategy of this buffer; None if it was collected."""

    def resolve(self) -> Tensor:
        """Return the tensor for the calling context."""

    def bound_to(self, buffers: BuffersByReplica, name: str) -> None:
        """Note that a module's dict now holds the buffer under ``name``."""

    def put(self, replica: Replica, tensor: Tensor) -> None:
        """Handle an assignment to the buffer's name in a replica of this strategy."""

    def adopt_copy(self, buffer: Tensor) -> ManagedBuffer:
        """Take over a deep copy of central."""

    def replaced_by(self, buffer: Tensor) -> ManagedBuffer:
        """Take over a tensor that was assigned to the buffer's name outside replicas."""


# id(central) and id(leaf) -> managed parameter. It keeps both tensors alive, so an id cannot be reused while its
# entry exists. The entries vanish with the last module or optimizer that refers to the managed parameter.
_BY_ID: weakref.WeakValueDictionary[int, ManagedParameter] = weakref.WeakValueDictionary()
_REFERENCES: dict[int, weakref.ref[ManagedParameter]] = _BY_ID.data  # type: ignore[attr-defined]


def find_managed(parameter: Tensor) -> ManagedParameter | None:
    """Return the managed parameter of a central parameter or of a replica's leaf; None if there is none."""
    managed = _BY_ID.get(id(parameter))
    return managed if managed is not None and managed.owns(parameter) else None


def find_registered(tensor: Tensor) -> ManagedParameter | None:
    """Return the managed parameter registered under a tensor's id, without asking `owns`. Hot path."""
    reference = _REFERENCES.get(id(tensor))
    return None if reference is None else reference()


def outside_transforms(refresh: Callable[[Replica], Tensor], replica: Replica) -> Tensor:
    """Call ``refresh`` outside ``torch.func.grad``, ``vmap`` and the like.

    A tensor made inside a transform would be a wrapper that is invalid after the transform ends.
    """
    with outside_all_transforms():
        return refresh(replica)


# torch's own ``.grad``. In a replica, the patched ``.grad`` of a central parameter means the leaf's.
read_grad: Callable[[Tensor], Tensor | None] = cast("Any", Tensor.grad).__get__
write_grad: Callable[[Tensor, Tensor | None], None] = cast("Any", Tensor.grad).__set__


def finish_run(replicas: Sequence[Replica]) -> None:
    """Bring the parameters and buffers that the replicas touched back to the central tensors.

    Runs in cross-replica context: once after all replicas have succeeded, and before a merge function. After a failed
    run nothing calls it, and tensors of unclosed records start again from central.
    """
    weights = replicas[0].group.row_weights
    some_idle = 0.0 in weights  # replicas without rows may have missed an aggregation
    if some_idle:
        replicas = sorted(replicas, key=lambda replica: weights[replica.id] <= 0)  # rows first
    records = [replica.record for replica in replicas if replica.record is not None]
    for record in records:
        centrals = [leaf.managed.central for leaf in record.leaves]
        for leaf, now in zip(record.leaves, versions_of(centrals), strict=True):
            if (
                leaf.has_own_memory
                or now != leaf.central_version
                or version(leaf.tensor) != leaf.version
            ):
                if leaf.has_own_memory:
                    leaf.managed.settle()
                if leaf.is_written(version_of(leaf.managed.central)):
                    leaf.refuse_write()
    copies: dict[ReplicatedBuffer, list[BufferCopy]] = {}
    seen: dict[ReplicatedParameter, Any] = {}
    for record in records:
        for leaf in record.leaves:
            managed = leaf.managed
            if managed not in seen:  # the first replica with rows decides
                seen[managed] = managed.take_over(leaf, apart=some_idle)
            leaf.synced_with = None if some_idle else seen[managed]
        for copy in record.copies:
            copies.setdefault(copy.managed, []).append(copy)
    for buffer, used in copies.items():
        buffer.merge_copies(used, weights)
    for record in records:
        record.close()
    for replica in replicas:
        replica.record = None
