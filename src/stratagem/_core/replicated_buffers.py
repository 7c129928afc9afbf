"""One central buffer and a copy of it per replica.

Modules such as BatchNorm write their buffers in place. Each replica writes its own copy, and after a successful run
the copies are merged into the central buffer. A buffer that is never written is copied once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import BLANK, RunRecord, outside_transforms, run_record
from stratagem._core.strategy_hooks import StrategyHooks
from stratagem._core.torch_patches.private_api import in_transform, version_of
from stratagem.errors import ReplicaError

if TYPE_CHECKING:
    from stratagem._core.torch_patches.module_members import BuffersByReplica

COMPARED_ELEMENTS = 65_536
"""Buffers up to this size are compared by value: more than any layer's channels, at most 10 µs."""

STATISTICS = frozenset({"running_mean", "running_var"})
"""Names of buffers that torch's layers, and others like them, fill with means over rows."""


class BufferCopy:
    """One replica's copy of a buffer.

    Attributes:
        own: the copy made from central; ``tensor`` is another one after the replica assigned one.
        version: version of ``own`` when it was made.
        source: the central tensor it was made from, and ``source_version`` its version then.
    """

    __slots__ = (
        "managed", "own", "record", "replica_id", "source", "source_version", "tensor", "version",
    )  # fmt: skip

    def __init__(self, managed: ReplicatedBuffer, replica_id: int) -> None:
        self.managed = managed
        self.replica_id = replica_id
        self.record: RunRecord = BLANK
        self.source: Tensor | None = None

    def is_current(self, central: Tensor) -> bool:
        """Return whether the copy holds central's values and its last run did not fail."""
        return (
            self.source is central
            and self.source_version == version_of(central)
            and self.record.closed
        )

    def refill(self, central: Tensor, device: torch.device) -> None:
        """Copy central's values."""
        with torch.inference_mode(False), torch.no_grad():
            own = central.detach().to(device, copy=True)
        if central.requires_grad:
            own.requires_grad_()
        self.own = self.tensor = own
        self.version = version_of(own)
        self.source = central
        self.source_version = version_of(central)

    def written(self) -> bool:
        """Return whether the replica changed the buffer, in place or by assigning another tensor."""
        own, source = self.own, self.source
        if self.tensor is not own or source is None or version_of(own) != self.version:
            return True
        # batch_norm and instance_norm write running statistics without counting a version, and so does ``.data``.
        if own.numel() > COMPARED_ELEMENTS:
            return False
        return not torch.equal(own, source.to(own.device))


class ReplicatedBuffer:
    """One central buffer and one copy per replica.

    A tensor that modules register under several names has one `ReplicatedBuffer` (`replicated_buffer`).

    Attributes:
        central: the buffer that code outside replicas works with.
    """

    __slots__ = ("__weakref__", "_copies", "_merges", "_names", "_strategy", "_warned", "central")

    def __init__(self, central: Tensor, strategy: StrategyHooks) -> None:
        self.central = central
        self._strategy = weakref.ref(strategy)
        self._copies: dict[int, BufferCopy] = {}
        self._names: list[tuple[weakref.ref[BuffersByReplica], str]] = []
        self._merges = 0
        self._warned = False

    def resolve(self) -> Tensor:
        """Return central outside replicas, and the replica's copy in a replica of our strategy."""
        replica = current_replica()
        if replica is None:
            return self.central
        copy = self._copies.get(replica.id)
        if copy is not None and copy.record is replica.record:
            return copy.tensor
        return self._refresh(replica)

    @property
    def strategy(self) -> StrategyHooks | None:
        """The strategy of this buffer; None if it was collected."""
        return self._strategy()

    def bound_to(self, buffers: BuffersByReplica, name: str) -> None:
        """Remember a module's dict and the name under which it holds the buffer."""
        self._names.append((weakref.ref(buffers), name))

    def _places(self) -> list[tuple[BuffersByReplica, str]]:
        """Return every dict and name under which modules hold the buffer now."""
        held = [(buffers(), name) for buffers, name in self._names]
        return [
            (each, name)
            for each, name in held
            if each is not None and each.managed.get(name) is self
        ]

    def adopt_copy(self, buffer: Tensor) -> ReplicatedBuffer:
        """Take over a deep copy of central."""
        return replicated_buffer(buffer, _alive(self))

    def replaced_by(self, buffer: Tensor) -> ReplicatedBuffer:
        """Take over a tensor that was assigned to the buffer's name outside replicas."""
        return replicated_buffer(buffer, _alive(self))

    def put(self, replica: Replica, tensor: Tensor) -> None:
        """Handle an assignment to the buffer's name in a replica of our strategy."""
        if tensor is self.resolve():
            return
        names = [name for _, name in self._places()]
        if len(names) > 1:
            raise ReplicaError(
                f"a buffer of shape {tuple(self.central.shape)} that modules hold under the names {names} "
                f"was assigned under one of them in {replica!r}. Write it in place "
                "(buffer.copy_(value)), or assign it outside the function given to run()."
            )
        self._copies[replica.id].tensor = tensor

    def _refresh(self, replica: Replica) -> Tensor:
        central = self.central
        if replica.strategy is not self._strategy() or is_lazy(central):
            return central
        if in_transform() is not None:
            return outside_transforms(self._refresh, replica)
        replica.group.check_running()
        copy = self._copies.get(replica.id)
        if copy is None:
            copy = self._copies[replica.id] = BufferCopy(self, replica.id)
        if not copy.is_current(central):
            copy.refill(central, replica.device)
        copy.record = record = run_record(replica)
        record.copies.append(copy)
        return copy.tensor

    def merge_copies(self, copies: Sequence[BufferCopy], weights: Sequence[float]) -> None:
        """Merge what the replicas wrote into central after a run that succeeded.

        A floating-point buffer becomes the row-weighted mean over the replicas with rows. Any other buffer, and one
        whose copies differ in shape or dtype, becomes that of the first replica with rows (docs/same-numbers.md).

        Args:
            copies: the copies used in the run, those of replicas with rows first.
            weights: share of the rows by replica number.
        """
        if not any(copy.written() for copy in copies):
            return
        live = [copy for copy in copies if weights[copy.replica_id] > 0] or copies[:1]
        central = self.central
        self._warn_if_different(live)
        with torch.inference_mode(False), torch.no_grad():
            merged = _merge(live, weights, central.device)
            if merged.shape == central.shape and merged.dtype == central.dtype:
                central.copy_(merged)
            else:
                self.central = merged
                _BY_ID[id(merged)] = self
                for buffers, name in self._places():
                    dict.__setitem__(buffers, name, merged)
        for copy in copies:
            copy.source = None  # made again from central at the next use

    def _warn_if_different(self, copies: Sequence[BufferCopy]) -> None:
        """Warn once if the replicas wrote different values that need not be statistics; look in the 1st, 2nd, 4th, … merge."""
        self._merges += 1
        if self._warned or len(copies) == 1 or self._merges & (self._merges - 1):
            return
        names = sorted({name for _, name in self._places()})
        first = copies[0].tensor
        if STATISTICS.issuperset(names) or all(_is_same(first, copy.tensor) for copy in copies[1:]):
            return
        self._warned = True
        result = (
            "becomes the mean of these values, weighted by rows. That is the value of one device for a mean over rows, not "
            "for a sum, a count or a queue of rows"
            if first.is_floating_point()
            else "becomes the value of the first replica"
        )
        warnings.warn(
            f"Replicas wrote different values to the buffer {' = '.join(names)} of shape {tuple(first.shape)}, and it {result}. "
            "Combine what is added over the replicas before you write it: "
            'n = sg.get_replica_context().all_reduce("sum", n) for sums and counts (codebooks of vector quantisation), '
            "all_gather(rows, axis=0) for rows. Then every replica writes the same value.",
            stacklevel=2,
        )

    def __repr__(self) -> str:
        return (
            f"<ReplicatedBuffer of shape {tuple(self.central.shape)}, {len(self._copies)} copies>"
        )


# id(central) -> its ReplicatedBuffer. The id of a collected tensor may be reused, so compare the tensor as well.
_BY_ID: weakref.WeakValueDictionary[int, ReplicatedBuffer] = weakref.WeakValueDictionary()


def replicated_buffer(central: Tensor, strategy: StrategyHooks) -> ReplicatedBuffer:
    """Return the `ReplicatedBuffer` of a tensor; create it if the strategy has none yet."""
    found = _BY_ID.get(id(central))
    if found is None or found.central is not central or found.strategy is not strategy:
        found = _BY_ID[id(central)] = ReplicatedBuffer(central, strategy)
    return found


def _alive(buffer: ReplicatedBuffer) -> StrategyHooks:
    strategy = buffer.strategy
    assert strategy is not None, "the caller checks that the strategy exists"
    return strategy


def _is_same(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach().to(one.device)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.allclose(one, other, equal_nan=True)


def _merge(copies: Sequence[BufferCopy], weights: Sequence[float], device: torch.device) -> Tensor:
    tensors = [copy.tensor.detach().to(device) for copy in copies]
    first = tensors[0]
    alike = all(t.shape == first.shape and t.dtype == first.dtype for t in tensors)
    if len(tensors) == 1 or not alike or not (first.is_floating_point() or first.is_complex()):
        return first
    total = sum(weights[copy.replica_id] for copy in copies)
    if total <= 0 or all(torch.equal(first, other) for other in tensors[1:]):
        return first  # equal copies exactly: the mean of 7.0 and 7.0 by rows may be 7.0000005
    merged = first * (weights[copies[0].replica_id] / total)
    for copy, tensor in zip(copies[1:], tensors[1:], strict=True):
        merged.add_(tensor, alpha=weights[copy.replica_id] / total)
    return merged
