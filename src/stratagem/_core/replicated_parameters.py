"""One central parameter and a leaf of it per replica, for central storage and mirrored strategies.

A leaf is a plain ``nn.Parameter``. On the central device it shares the central memory, so nothing is copied and
every optimizer step is visible at once; on another device it is a copy that is refreshed when central changed. A
leaf has its own gradient and its own version counter, by which writes in a replica are noticed. `gradients`
aggregates the leaves' gradients.

A replica that asks for ``.data``, or for ``.grad`` under ``no_grad``, may be about to write the parameter (an update by hand,
clipping of weights). Its leaf then gets memory of its own. If all replicas wrote the same value, `settle` writes it once to central.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stratagem._core import gradients
from stratagem._core.context import Replica, current_replica
from stratagem._core.kept_places import is_equal
from stratagem._core.managed import (
    BLANK,
    ManagedParameter,
    RunRecord,
    outside_transforms,
    read_grad,
    run_record,
    write_grad,
)
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches import private_api
from stratagem._core.torch_patches.private_api import (
    has_hooks,
    in_transform,
    make_subclass,
    version,
    version_of,
    versions_of,
)
from stratagem.errors import ReplicaError

WRITE_ONCE = (
    "Every replica runs the same code, so the one parameter behind the replicas would be written once per replica. "
    "Let optimizer.step() update it, keep running statistics in buffers (register_buffer), write it through "
    "parameter.data if all replicas write the same value, or write it once for all replicas, in a function in which "
    ".grad is the aggregated gradient:\n"
    "    def update(strategy):\n"
    "        with torch.no_grad(): parameter.add_(parameter.grad, alpha=-lr)\n"
    "    sg.get_replica_context().merge_call(update)"
)
"""Reason and remedy in errors about writes to a parameter in a replica."""

GradientState = tuple["weakref.ref[Tensor]", int] | None
"""A gradient of the central parameter, and its version."""

_memory: Callable[[Tensor], Tensor] = cast("Any", Tensor.data).__get__
"""Return torch's own ``.data``: the same memory with another version counter. In a replica, the patched ``.data``
keeps the version counter."""


_set_memory: Callable[[Tensor, Tensor], None] = cast("Any", Tensor.data).__set__


class Leaf:
    """One replica's view of a parameter.

    Attributes:
        shares: whether the leaf uses the central memory, rather than a copy on another device.
        version: version of the tensor at the start of the run; another version means a write.
        central_version: version of central that the leaf follows; another version means a write.
        aggregated: the gradient that the last aggregation produced.
        aggregated_in: the record of the run in which the gradient was last aggregated.
        synced_with: the central gradient that the leaf's own gradient is equal to.
        base: gradient of earlier passes, kept apart during this one (see `gradients`).
        has_base_hook: whether ``base`` is in use.
        has_own_memory: whether the replica may write the leaf, until `ReplicatedParameter.settle`.
    """

    __slots__ = (
        "__weakref__", "aggregated", "aggregated_in", "base", "central_version", "has_base_hook",
        "has_own_memory", "managed", "record", "replica_id", "shares", "synced_with", "tensor", "version",
    )  # fmt: skip

    def __init__(
        self, managed: ReplicatedParameter, replica_id: int, tensor: nn.Parameter, *, shares: bool
    ) -> None:
        self.managed = managed
        self.replica_id = replica_id
        self.tensor = tensor
        self.shares = shares
        self.record: RunRecord = BLANK
        self.version = version(tensor)
        self.central_version = version_of(managed.central)
        self.aggregated: weakref.ref[Tensor] | None = None
        self.aggregated_in: RunRecord | None = None
        self.synced_with: GradientState = None
        self.base: Tensor | None = None
        self.has_base_hook = False
        self.has_own_memory = False

    def take_own_memory(self) -> None:
        """Give the replica a copy of the parameter that it may write."""
        if not self.has_own_memory:
            self.has_own_memory = True
            if self.shares:
                _set_memory(self.tensor, _memory(self.managed.central).clone())

    def follow(self, central: Tensor) -> None:
        """Show central's value again."""
        self.has_own_memory = False
        if self.shares:
            _set_memory(self.tensor, _memory(central))
        self.refresh(central)
        self.version = version(self.tensor)

    def keep_write(self) -> None:
        """Keep what the replica has written in place, for itself; bring central back."""
        managed = self.managed
        managed.is_written = self.has_own_memory = True
        if self.shares:
            own = _memory(self.tensor).clone()
            assert managed.saved is not None, "the caller has checked it"
            _memory(managed.central).copy_(managed.saved)
            _set_memory(self.tensor, own)

    def fits(self, central: Tensor) -> bool:
        """Return whether this is still a view of central, which may have been moved or replaced."""
        tensor = self.tensor
        if tensor.dtype != central.dtype:
            return False
        if self.shares:
            return tensor.is_set_to(central)  # memory, shape and strides in one call
        return tensor.device != central.device and tensor.shape == central.shape

    def refresh(self, central: Tensor) -> None:
        """Note central's version; copy its values to a leaf on another device."""
        if self.has_own_memory:
            return
        if not self.shares:
            _memory(self.tensor).copy_(_memory(central), non_blocking=True)
        self.central_version = version_of(central)

    def is_synced_with(self, grad: Tensor) -> bool:
        """Return whether the leaf's gradient is equal to this gradient of central."""
        seen = self.synced_with
        return seen is not None and seen[0]() is grad and seen[1] == version_of(grad)

    def refuse_write(self, why: str = "") -> None:
        """Raise: the replica wrote the parameter in place."""
        self.version = version(self.tensor)
        self.central_version = -2  # copied again at the next use
        raise ReplicaError(
            f"{self.managed.describe()} was written in place inside replica {self.replica_id}{why}. {WRITE_ONCE}"
        )

    def is_written(self, central_version: int) -> bool:
        """Return whether the replica, or another one, has written the parameter in place."""
        if central_version != self.central_version:
            return True
        return not self.has_own_memory and version(self.tensor) != self.version


class ReplicatedParameter(ManagedParameter):
    """One central parameter and one leaf per replica.

    Attributes:
        adds_up: whether the replicas' gradients are summed, not averaged.
        by_replica: the leaf of every replica that ever asked, by replica number.
        name: for error messages.
        is_written: whether replicas have written it in place.
        saved: copy of central, from which a write in place can be undone; None: there is none.
    """

    __slots__ = (
        "_exposed", "_saved_version", "_strategy", "adds_up", "by_replica", "is_written", "name", "saved",
    )  # fmt: skip

    has_rows: ClassVar[bool] = False
    """True for a table, whose gradient consists of rows."""

    def __init__(self, central: nn.Parameter, strategy: StrategyHooks, name: str = "") -> None:
        super().__init__(central)
        self._strategy = weakref.ref(strategy)
        self.adds_up = strategy.gradient_aggregation == "sum"
        self.by_replica: dict[int, Leaf] = {}
        self._exposed: weakref.ref[Tensor] | None = None  # the leaf's gradient that central shows
        self.name = name
        self.is_written = False
        self.saved: Tensor | None = None
        self._saved_version = -1
        _OF_STRATEGY.setdefault(strategy, weakref.WeakSet()).add(self)

    def resolve(self) -> Tensor:
        """Return central outside replicas, and the replica's leaf in a replica of our strategy."""
        replica = current_replica()
        if replica is None:
            return self.central
        leaf = self.by_replica.get(replica.id)
        if leaf is not None and leaf.record is replica.record:
            return leaf.tensor
        return self._refresh(replica)

    def adopt_copy(self, parameter: nn.Parameter) -> ManagedParameter | None:
        """Take over a deep copy for the same strategy (VAR-18), unless that was collected."""
        strategy = self._strategy()
        return None if strategy is None else ReplicatedParameter(parameter, strategy, self.name)

    @property
    def strategy(self) -> StrategyHooks | None:
        """The strategy of this parameter; None if it was collected."""
        return self._strategy()

    def owns(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is central or one of the leaves."""
        # Iterate over a list: another replica may be adding its leaf.
        return tensor is self.central or any(
            leaf.tensor is tensor for leaf in list(self.by_replica.values())
        )

    def describe(self) -> str:
        """Return the parameter's name and shape, for error messages."""
        name = f"parameter {self.name!r}" if self.name else "a parameter"
        return f"{name} of shape {tuple(self.central.shape)}"

    def _refresh(self, replica: Replica) -> Tensor:
        """Bring the replica's leaf up to date, once per run, if the replica is one of ours."""
        if replica.strategy is not self._strategy():
            return self.central
        if (read := replica.group.read_central) is not None:
            return read(replica, self.central)
        if in_transform() is not None:
            return outside_transforms(self._refresh, replica)
        replica.group.check_running()
        return self._join(replica)

    def _join(self, replica: Replica) -> Tensor:
        """Bring the replica's leaf up to date. Hot path: check the unchanged case first."""
        central, group = self.central, replica.group
        leaf = self.by_replica.get(replica.id)
        is_unmade = leaf is None and is_lazy(central)
        if is_unmade:
            return central
        if leaf is None or not leaf.fits(central):
            leaf = self._new_leaf(replica)
        elif not leaf.record.closed:  # its last run failed
            before = leaf.record.replica
            if before is not None and before.group.aborted:
                # A replica thread of that run may still put a gradient on the old leaf.
                leaf = self._new_leaf(replica)
            leaf.aggregated = leaf.synced_with = leaf.base = None
        if leaf.central_version != version_of(central):
            leaf.refresh(central)
        tensor = leaf.tensor
        if tensor.requires_grad != central.requires_grad:
            tensor.requires_grad_(central.requires_grad)
        if central.__dict__:
            tensor.__dict__.update(central.__dict__)  # attributes that users set on parameters
        grad = read_grad(central)
        if grad is None or read_grad(tensor) is None or not leaf.is_synced_with(grad):
            _follow_gradient(leaf, grad)
        if not leaf.has_base_hook and (self.adds_up or has_hooks(central)):
            gradients.add_base_hook(leaf)
        if group.saves_parameters:
            self.save(always=group.saves_parameters == "always")
        leaf.version = version(tensor)
        leaf.record = record = replica.record or run_record(replica)
        record.leaves.append(leaf)
        return tensor

    def leaf_of(self, replica: Replica) -> Leaf:
        """Return the leaf of any replica of the running group, up to date."""
        leaf = self.by_replica.get(replica.id)
        if leaf is None or leaf.record is not replica.record:
            self._join(replica)
            leaf = self.by_replica[replica.id]
        return leaf

    def save(self, *, always: bool) -> None:
        """Keep a copy of central if replicas may write it in place."""
        now = version_of(self.central)
        if self._saved_version == now:
            return
        is_first, self._saved_version = self._saved_version == -1, now
        if not (always or is_first or self.is_written):
            self.saved = None
        elif self.saved is None or self.saved.shape != self.central.shape:
            self.saved = _memory(self.central).clone()
        else:
            self.saved.copy_(_memory(self.central))

    @property
    def can_undo(self) -> bool:
        """True if a copy of central's present value exists."""
        return self.saved is not None and self._saved_version == version_of(self.central)

    def gradient_of(self, leaf: Leaf) -> Tensor | None:
        """Return a leaf's gradient in a form that can be added to other leaves'."""
        return read_grad(leaf.tensor)

    def gradient_device(self, replica: Replica) -> torch.device:
        """Return the device on which a replica's aggregated gradient is computed."""
        return replica.device

    def add_pre_gradient_hook(self, leaf: Leaf, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook`` in every backward pass before a gradient is added to the leaf's."""
        leaf.tensor.register_hook(hook)

    def _new_leaf(self, replica: Replica) -> Leaf:
        central = self.central
        with torch.inference_mode(False), torch.no_grad():
            data = _memory(central)
            shares = data.device == replica.device
            if not shares:
                data = data.to(replica.device, copy=True)
            tensor = make_subclass(type(central), data, central.requires_grad)
            leaf = Leaf(self, replica.id, tensor, shares=shares)
            self.by_replica[replica.id] = leaf
            self.register_alias(tensor)
            gradients.add_accumulation_hook(leaf)
        return leaf

    def refuse_writes(self) -> None:
        """Raise if any replica wrote the parameter in place."""
        now = version_of(self.central)
        for leaf in self.by_replica.values():
            if not leaf.record.closed and leaf.is_written(now):
                leaf.refuse_write()

    def settle(self) -> None:
        """Write to central, once, what the replicas wrote into memory of their own.

        Raises:
            ReplicaError: the replicas with rows did not all write the same value.
        """
        for leaf in self.by_replica.values():
            if leaf.has_own_memory:
                break
        else:
            return
        active = [leaf for leaf in self.by_replica.values() if not leaf.record.closed]
        own = [leaf for leaf in active if leaf.has_own_memory]
        if not own:
            return
        central, first = self.central, own[0]
        if any(not is_equal(leaf.tensor, central) for leaf in own):
            replica = first.record.replica
            assert replica is not None, "its run is active"
            for number, weight in enumerate(replica.group.row_weights):
                other = self.by_replica.get(number)
                wrote = other in own and is_equal(other.tensor, first.tensor)
                written = first.is_written(version_of(central))
                if written or (not wrote and (weight > 0 or other in own)):
                    first.refuse_write(
                        f", and replica {number} has another value (the value depends on a replica's rows, or "
                        "not every replica wrote)"
                    )
            with torch.no_grad():
                central.detach().copy_(first.tensor.detach())
        for leaf in active:
            leaf.follow(central)

    def stepped(self) -> None:
        """Let the leaves follow central, which was updated once for all replicas during a run."""
        follow_centrals([self])

    def expose_gradient(self, leaf: Leaf | None, *, apart: bool = False) -> None:
        """Make the gradient of a leaf visible in ``central.grad``.

        Central gets an alias with its own version counter. So a write outside replicas can be distinguished from the
        leaf's in-place accumulation.

        Args:
            leaf: the leaf; None removes central's gradient.
            apart: copy the gradient, because other replicas will read it after this one has accumulated again.
        """
        grad = None if leaf is None else read_grad(leaf.tensor)
        central = self.central
        if leaf is None or grad is None:
            write_grad(central, None)
        elif (
            apart
            or grad.is_sparse
            or self._exposed is None
            or self._exposed() is not grad
            or read_grad(central) is None
        ):
            # Torch replaces the memory of a sparse gradient, so an alias would keep the earlier value.
            self._exposed = None if apart else weakref.ref(grad)
            alias = _memory(grad) if leaf.shares else grad.to(central.device)
            write_grad(central, alias.clone() if apart else alias)

    def take_over(self, lead: Leaf, *, apart: bool) -> GradientState:
        """Copy ``requires_grad`` and the gradient of a leaf to central after a run that succeeded."""
        central, tensor = self.central, lead.tensor
        if central.requires_grad != tensor.requires_grad:
            central.requires_grad_(tensor.requires_grad)
        self.expose_gradient(lead, apart=apart)
        grad = read_grad(central)
        return None if grad is None else (weakref.ref(grad), version_of(grad))

    def __repr__(self) -> str:
        return f"<ReplicatedParameter of {self.describe()}, {len(self.by_replica)} leaves>"


def resolve_all(parameters: Sequence[ReplicatedParameter], replica: Replica) -> list[Tensor]:
    """Return the replica's leaves of parameters of its strategy."""
    me, group = replica.id, replica.group
    if group.read_central is not None or in_transform() is not None:
        return [managed.resolve() for managed in parameters]
    group.check_running()
    return [
        leaf.tensor
        if (leaf := managed.by_replica.get(me)) is not None and leaf.record is replica.record
        else managed._join(replica)
        for managed in parameters
    ]


def is_any_written(parameters: Sequence[ReplicatedParameter]) -> bool:
    """Return whether a replica may have written one of the parameters in this run. Quick if none has."""
    versions = versions_of([managed.central for managed in parameters])
    for managed, now in zip(parameters, versions, strict=True):
        for leaf in managed.by_replica.values():
            if not leaf.record.closed and (
                leaf.has_own_memory
                or leaf.central_version != now
                or version(leaf.tensor) != leaf.version
            ):
                return True
    return False


def follow_centrals(parameters: Sequence[ReplicatedParameter]) -> None:
    """Let the leaves follow their central parameters, which were updated once for all replicas."""
    versions = versions_of([managed.central for managed in parameters])
    for managed, now in zip(parameters, versions, strict=True):
        saves = ""
        for leaf in managed.by_replica.values():
            if leaf.shares and not leaf.has_own_memory:
                leaf.central_version = now
            else:
                leaf.refresh(managed.central)
            if (replica := leaf.record.replica) is not None:
                saves = replica.group.saves_parameters
        if saves:
            managed.save(always=saves == "always")


_OF_STRATEGY: weakref.WeakKeyDictionary[StrategyHooks, weakref.WeakSet[ReplicatedParameter]] = (
    weakref.WeakKeyDictionary()
)


def join_run(replica: Replica) -> None:
    """Bring all leaves of a replica up to date at the start of a run, for code of ``torch.compile``.

    Compiled code uses the tensors it was compiled with and asks no module for them.
    """
    if private_api.compiler_used():
        for managed in list(_OF_STRATEGY.get(replica.strategy, ())):
            if replica.id in managed.by_replica:
                managed.resolve()


def _follow_gradient(leaf: Leaf, grad: Tensor | None) -> None:
    """Give the leaf central's gradient, which code outside replicas may have changed since."""
    tensor = leaf.tensor
    if grad is None:
        write_grad(tensor, None)
        return
    with torch.inference_mode(False), torch.no_grad():
        own = grad.to(tensor.device) if grad.device != tensor.device else grad.clone()
    write_grad(tensor, own)
    leaf.aggregated = weakref.ref(own)
