"""Each replica's copy of one buffer, and the rule that merges the copies.

Replicas run side by side and modules such as BatchNorm write their buffers in place, so each replica
writes a copy of its own; when the run has succeeded, `ReplicatedBuffer.settle` merges them into the central
buffer. A buffer nobody writes is copied once and never again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import (
    BLANK,
    RunRecord,
    outside_transforms,
    run_record,
    version_of,
)
from stratagem._core.torch_patches.private_api import in_transform


class BufferCopy:
    """One replica's copy of a buffer."""

    __slots__ = (
        "managed",
        "own",
        "record",
        "replica_id",
        "source",
        "source_version",
        "tensor",
        "version",
    )

    def __init__(self, managed: ReplicatedBuffer, replica_id: int) -> None:
        self.managed = managed
        self.replica_id = replica_id
        self.record: RunRecord = BLANK
        self.own: Tensor | None = None  # the copy made from central
        self.tensor: Tensor | None = None  # what the replica sees: ``own``, or what it put there
        self.version = -1
        self.source: Tensor | None = None  # what ``own`` was made from
        self.source_version = -1

    def refill(self, central: Tensor, device: torch.device) -> None:
        """Take central's values."""
        with torch.inference_mode(False), torch.no_grad():
            own = central.detach().to(device, copy=True)
        if central.requires_grad:
            own.requires_grad_()
        self._is_now(own, version_of(own), central)

    def share(self, twin: BufferCopy, central: Tensor) -> None:
        """Take the copy another name of the same central tensor has in this replica."""
        assert twin.own is not None
        self._is_now(twin.own, twin.version, central)

    def _is_now(self, own: Tensor, version: int, central: Tensor) -> None:
        self.own = self.tensor = own
        self.version = version
        self.source = central
        self.source_version = version_of(central)

    def is_of(self, central: Tensor, record: RunRecord | None) -> bool:
        """Whether the copy was made from central as it is, and no failed run has been at it."""
        return (
            self.own is not None
            and self.source is central
            and self.source_version == version_of(central)
            and (self.record.closed or self.record is record)
        )

    def written(self) -> bool:
        """Whether the replica changed the buffer, in place or by putting another tensor there."""
        own, source = self.own, self.source
        if self.tensor is not own or own is None or version_of(own) != self.version:
            return True
        # batch_norm and instance_norm write running statistics without counting a version.
        if source is None or own.numel() > COMPARED_ELEMENTS or not own.is_floating_point():
            return False
        return not torch.equal(
            own, source if source.device == own.device else source.to(own.device)
        )


COMPARED_ELEMENTS = 65_536
"""Buffers up to this size are compared by value: more than any layer's channels, 10 µs at most."""


class ReplicatedBuffer:
    """One central buffer and one copy per replica.

    Attributes:
        central: the buffer code outside any replica works with.
    """

    __slots__ = ("__weakref__", "_copies", "_replace", "_strategy", "central")

    def __init__(self, central: Tensor, strategy: Any) -> None:
        self.central = central
        self._strategy = weakref.ref(strategy)
        self._copies: dict[int, BufferCopy] = {}
        # Puts another tensor where central stands in the module.
        self._replace: Callable[[Tensor], None] | None = None
        _register(self)

    def resolve(self) -> Tensor:
        """Central outside replicas; in a replica of our strategy, that replica's copy."""
        replica = current_replica()
        if replica is None:
            return self.central
        copy = self._copies.get(replica.id)
        if copy is not None and copy.record is replica.record:
            return copy.tensor  # type: ignore[return-value]  # set with the record; on the hot path
        return self._refresh(replica)

    @property
    def strategy(self) -> Any:
        """The strategy that looks after this buffer; None when it is gone."""
        return self._strategy()

    def on_replace(self, replace: Callable[[Tensor], None]) -> None:
        """Tell how another tensor is put where central stands in the module."""
        self._replace = replace

    def adopt_copy(self, buffer: Tensor) -> ReplicatedBuffer:
        """The home of a deep copy of central."""
        return ReplicatedBuffer(buffer, self.strategy)

    def replaced_by(self, buffer: Tensor) -> ReplicatedBuffer:
        """Code outside replicas assigned another tensor to the buffer's name: its home."""
        return ReplicatedBuffer(buffer, self.strategy)

    def put(self, replica: Replica, tensor: Tensor) -> None:
        """Code inside a replica of ours assigned another tensor to the buffer's name."""
        self.resolve()
        self._copies[replica.id].tensor = tensor

    def _refresh(self, replica: Replica) -> Tensor:
        central = self.central
        if replica.strategy is not self._strategy() or is_lazy(central):
            return central
        if in_transform() is not None:
            return outside_transforms(self._refresh, replica)
        replica.group.check_unbroken()
        copy = self._copies.get(replica.id)
        if copy is None:
            copy = self._copies[replica.id] = BufferCopy(self, replica.id)
        if not copy.is_of(central, None):
            twin = self._twin(replica)
            if twin is None:
                copy.refill(central, replica.device)
            else:
                copy.share(twin, central)
        copy.record = record = run_record(replica)
        record.copies.append(copy)
        assert copy.tensor is not None
        return copy.tensor

    def _twin(self, replica: Replica) -> BufferCopy | None:
        """This replica's copy under another name: one tensor registered twice stays one tensor."""
        central = self.central
        names = _HOMES.get(id(central), ())
        if len(names) < 2:
            return None
        for managed in [reference() for reference in names]:
            if managed is None or managed is self or managed.central is not central:
                continue
            copy = managed._copies.get(replica.id)
            if copy is not None and copy.is_of(central, replica.record):
                return copy
        return None

    def settle(self, copies: Sequence[BufferCopy], weights: Sequence[float]) -> None:
        """The run succeeded: merge what the replicas wrote into central.

        Floating-point buffers become the row-weighted mean over the replicas with rows; any other
        buffer (counters, masks), and one whose replicas disagree in shape or dtype, becomes that of the
        first replica with rows. See docs/same-numbers.md.

        Args:
            copies: those used in the run, of replicas with rows first.
            weights: share of the rows by replica number.
        """
        if not any(copy.written() for copy in copies):
            return
        live = [copy for copy in copies if weights[copy.replica_id] > 0] or copies[:1]
        central = self.central
        with torch.inference_mode(False), torch.no_grad():
            merged = _merge(live, weights, central.device)
            alike = merged.shape == central.shape and merged.dtype == central.dtype
            if alike and (live[0].tensor is live[0].own or len(_HOMES.get(id(central), ())) < 2):
                central.copy_(merged)
            elif self._replace is not None:  # also if another name still means the old tensor
                self.central = merged
                _register(self)
                self._replace(merged)
        for copy in copies:
            copy.source = copy.own = copy.tensor = (
                None  # made anew from central when next asked for
            )

    def __repr__(self) -> str:
        return (
            f"<ReplicatedBuffer of shape {tuple(self.central.shape)}, {len(self._copies)} copies>"
        )


# id(central) -> homes of that tensor, nearly always one. An id may come to mean another tensor after its home
# has gone, or has got another central: who looks here compares the tensor itself.
_HOMES: dict[int, list[weakref.ref[ReplicatedBuffer]]] = {}


def _register(managed: ReplicatedBuffer) -> None:
    number = id(managed.central)
    names = _HOMES.get(number)
    if names is None:
        names = _HOMES[number] = []
        weakref.finalize(managed.central, _HOMES.pop, number, None)
    names.append(weakref.ref(managed))


def _merge(copies: Sequence[BufferCopy], weights: Sequence[float], device: torch.device) -> Tensor:
    tensors = [copy.tensor.detach().to(device) for copy in copies if copy.tensor is not None]
    first = tensors[0]
    alike = all(t.shape == first.shape and t.dtype == first.dtype for t in tensors)
    if len(tensors) == 1 or not alike or not (first.is_floating_point() or first.is_complex()):
        return first
    total = sum(weights[copy.replica_id] for copy in copies)
    if total <= 0:
        return first
    merged = first * (weights[copies[0].replica_id] / total)
    for copy, tensor in zip(copies[1:], tensors[1:], strict=True):
        merged.add_(tensor, alpha=weights[copy.replica_id] / total)
    return merged
