"""Each replica's view of one parameter: a leaf of its own over the one central parameter.

`ReplicatedParameter` is the home central storage and mirrored strategies give their parameters. What happens
to the leaves' gradients is `gradients`' business.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stratagem._core import gradients
from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import (
    BLANK,
    ManagedParameter,
    RunRecord,
    central_gradient,
    outside_transforms,
    run_record,
    version_of,
)
from stratagem._core.torch_patches.private_api import in_transform
from stratagem.errors import ReplicaError

_Agreed = tuple["weakref.ref[Tensor]", int] | None
"""A gradient of central, and its version, that a leaf's own gradient is equal to."""


class Leaf:
    """One replica's view of a parameter."""

    __slots__ = (
        "__weakref__",
        "aggregated",
        "base",
        "central_version",
        "has_base_hook",
        "managed",
        "met",
        "record",
        "replica_id",
        "shares",
        "synced_with",
        "tensor",
        "version",
    )  # fmt: skip

    def __init__(
        self, managed: ReplicatedParameter, replica_id: int, tensor: nn.Parameter, *, shares: bool
    ) -> None:
        self.managed = managed
        self.replica_id = replica_id
        self.tensor = tensor
        self.shares = shares  # central's memory, rather than a copy on another device
        self.record: RunRecord = BLANK
        self.version = tensor._version
        self.central_version = version_of(managed.central)
        self.met: Any = None  # the record of the run in which its gradient was last aggregated
        self.aggregated: weakref.ref[Tensor] | None = None  # the gradient the replicas agreed on
        self.synced_with: _Agreed = None
        self.base: Tensor | None = None  # gradient of earlier passes, kept apart during this one
        self.has_base_hook = False  # whether ``base`` is in use (see gradients)

    def fits(self, central: Tensor) -> bool:
        """Whether this still is a view of central, which may have been moved or given other data."""
        tensor = self.tensor
        if tensor.dtype != central.dtype or tensor.shape != central.shape:
            return False
        if self.shares:
            return tensor.data_ptr() == central.data_ptr() and tensor.stride() == central.stride()
        return tensor.device != central.device

    def refresh(self, central: Tensor) -> None:
        """Take central's values, for a leaf on another device."""
        _memory(self.tensor).copy_(_memory(central), non_blocking=True)
        self.central_version = version_of(central)

    def is_aggregated(self) -> bool:
        """Whether the gradient is the one that came out of the replicas' last meeting."""
        grad = self.tensor.grad
        return grad is None or (self.aggregated is not None and self.aggregated() is grad)

    def was_written(self) -> None:
        """The replica wrote the parameter in place: raise, unless torch.nn itself does so."""
        if not self.managed.may_be_written:
            self.version = self.tensor._version
            raise ReplicaError(
                f"{self.managed.describe()} was written in place inside replica {self.replica_id}. "
                "Every replica runs the same code, so such a write would be applied once per replica "
                "to the one parameter behind them. Let optimizer.step() update it, or write it "
                "outside the function given to run()."
            )


class ReplicatedParameter(ManagedParameter):
    """One central parameter and one leaf per replica (central storage, mirrored).

    Attributes:
        adds_up: whether the replicas' gradients are summed, not averaged.
        by_replica: the leaf of every replica that ever asked, by its number.
        may_be_written: whether torch.nn itself writes the parameter during forward.
        name: for messages.
    """

    __slots__ = ("_published", "_strategy", "adds_up", "by_replica", "may_be_written", "name")

    def __init__(self, central: nn.Parameter, strategy: Any, name: str = "") -> None:
        super().__init__(central)
        self._strategy = weakref.ref(strategy)
        self.adds_up: bool = strategy.gradient_aggregation == "sum"
        self.by_replica: dict[int, Leaf] = {}  # the leaves of all replicas that ever asked
        self._published: weakref.ref[Tensor] | None = None  # the leaf's gradient that central shows
        self.name = name
        self.may_be_written = False  # True for an Embedding with max_norm

    def resolve(self) -> Tensor:
        """Central outside replicas; in a replica of our strategy, that replica's leaf."""
        replica = current_replica()
        if replica is None:
            return self.central
        leaf = self.by_replica.get(replica.id)
        if leaf is not None and leaf.record is replica.record:
            return leaf.tensor
        return self._refresh(replica)

    def adopt_copy(self, parameter: nn.Parameter) -> ManagedParameter | None:
        """The copy belongs to the same strategy (VAR-18), while that still exists."""
        strategy = self._strategy()
        if strategy is None:
            return None
        return ReplicatedParameter(parameter, strategy, self.name)

    @property
    def strategy(self) -> Any:
        """The strategy that looks after this parameter; None when it is gone."""
        return self._strategy()

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is central or one of the leaves."""
        # A list, made at once: another replica may be adding its leaf.
        return tensor is self.central or any(
            leaf.tensor is tensor for leaf in list(self.by_replica.values())
        )

    def describe(self) -> str:
        """The parameter in words, for messages."""
        name = f"parameter {self.name!r}" if self.name else "a parameter"
        return f"{name} of shape {tuple(self.central.shape)}"

    def _refresh(self, replica: Replica) -> Tensor:
        # On the path of every parameter in every run: what usually has not changed is asked in few words.
        central = self.central
        leaf = self.by_replica.get(replica.id)
        if replica.strategy is not self._strategy() or (leaf is None and is_lazy(central)):
            return central
        if in_transform() is not None:
            return outside_transforms(self._refresh, replica)
        replica.group.check_unbroken()
        if leaf is None or not leaf.fits(central):
            leaf = self._new_leaf(replica)
        elif not leaf.record.closed:  # its last run failed
            before = leaf.record.replica
            if before is not None and before.group.has_broken_up:
                # A replica that was left behind may still put a gradient on the old one.
                leaf = self._new_leaf(replica)
            leaf.aggregated = leaf.synced_with = leaf.base = None
        if not leaf.shares and leaf.central_version != version_of(central):
            leaf.refresh(central)
        tensor = leaf.tensor
        if tensor.requires_grad != central.requires_grad:
            tensor.requires_grad_(central.requires_grad)
        if central.__dict__:
            tensor.__dict__.update(central.__dict__)  # marks that users put on parameters
        grad, agreed = central_gradient(central), leaf.synced_with
        if (
            grad is None
            or agreed is None
            or agreed[0]() is not grad
            or agreed[1] != version_of(grad)
            or tensor.grad is None
        ):
            _follow_gradient(leaf, grad)
        if not leaf.has_base_hook and (self.adds_up or gradients.has_hooks(central)):
            gradients.add_base_hook(leaf)
        leaf.version = tensor._version
        leaf.record = record = replica.record or run_record(replica)
        record.leaves.append(leaf)
        return tensor

    def gradient_of(self, leaf: Leaf) -> Tensor | None:
        """A leaf's gradient in a form that can be added to other leaves'."""
        return leaf.tensor.grad

    def gradient_device(self, replica: Replica) -> torch.device:
        """Where a replica's gradient is put together from all replicas' gradients."""
        return replica.device

    def add_pre_gradient_hook(self, leaf: Leaf, hook: Callable[[Tensor], None]) -> None:
        """Have `hook` called in a backward pass before a gradient is added to the leaf's."""
        leaf.tensor.register_hook(hook)

    def _new_leaf(self, replica: Replica) -> Leaf:
        central = self.central
        with torch.inference_mode(False), torch.no_grad():
            data = _memory(central)
            shares = data.device == replica.device
            if not shares:
                data = data.to(replica.device, copy=True)
            tensor = torch.Tensor._make_subclass(type(central), data, central.requires_grad)
            leaf = Leaf(self, replica.id, tensor, shares=shares)
            self.by_replica[replica.id] = leaf
            self.register_alias(tensor)
            gradients.watch(leaf)
        return leaf

    def refuse_writes(self) -> None:
        """Raise if any replica wrote the parameter in place."""
        for leaf in self.by_replica.values():
            if leaf.tensor._version != leaf.version:
                leaf.was_written()

    def stepped(self) -> None:
        """Central was updated during a run: leaves on other devices follow."""
        for leaf in self.by_replica.values():
            if not leaf.shares:
                leaf.refresh(self.central)

    def expose_gradient(self, leaf: Leaf) -> None:
        """Let code at home see the gradient of a leaf.

        Central gets an alias with its own version counter: a write by code outside replicas is
        told apart from the leaf's accumulating in place, which other replicas must not copy half done.
        """
        grad, central = leaf.tensor.grad, self.central
        if grad is None:
            central.grad = None
        elif self._published is None or self._published() is not grad or central.grad is None:
            self._published = weakref.ref(grad)
            central.grad = grad.data if leaf.shares else grad.to(central.device)

    def settle(self, lead: Leaf) -> _Agreed:
        """The run succeeded: central takes over what the replicas agree on, as ``lead`` has it."""
        central, tensor = self.central, lead.tensor
        if central.requires_grad != tensor.requires_grad:
            central.requires_grad_(tensor.requires_grad)
        self.expose_gradient(lead)
        grad = central.grad
        return None if grad is None else (weakref.ref(grad), version_of(grad))

    def __repr__(self) -> str:
        return f"<ReplicatedParameter of {self.describe()}, {len(self.by_replica)} leaves>"


_memory: Callable[[Tensor], Tensor] = cast("Any", torch.Tensor.data).__get__
"""torch's own ``.data``: shares memory but not the version counter, so that writes stay apart
(Leaf.version). Not by its name, which means something else in a replica (`data_attribute`)."""


def _follow_gradient(leaf: Leaf, grad: Tensor | None) -> None:
    """At the start of a run the leaf's gradient is central's (zeroed, scaled or set outside, perhaps)."""
    tensor = leaf.tensor
    if grad is None:
        if tensor.grad is not None:
            tensor.grad = None
        return
    with torch.inference_mode(False), torch.no_grad():
        own = grad.to(tensor.device) if grad.device != tensor.device else grad.clone()
    tensor.grad = own
    leaf.aggregated = weakref.ref(own)
