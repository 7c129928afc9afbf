"""Aggregation of the replicas' gradients at the end of every backward pass.

The first leaf that accumulates a gradient in a backward pass asks the autograd engine for a callback at the end of
the pass. There the replicas wait for each other, and one of them computes, in replica order,

    sum over replicas with rows of  weight * gradient        ("mean": weight = share of the rows)
    sum over replicas with rows of  gradient                 ("sum": tf.distribute's plain sum)

and gives every leaf a tensor of its own with that result. So clipping, scaling or logging inside the step sees
the gradient that one device would have. A replica without rows is left out: its gradients may be NaN, and it
may have returned already.

Earlier gradients (accumulation over several passes): under "mean" the weights add up to 1, so aggregating
``base + gradient`` leaves an equal base as it is. Under "sum", or when a user put hooks on the central parameter (they
act once, on the aggregated gradient of this pass), the base is put aside before the pass and added back after it
(`add_base_hook`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import RunRecord, find_managed, read_grad, run_record, write_grad
from stratagem._core.torch_patches import private_api
from stratagem.errors import ReplicaError

if TYPE_CHECKING:
    from stratagem._core.replicas import ReplicaGroup
    from stratagem._core.replicated_parameters import Leaf, ReplicatedParameter

    _Column = tuple[list[Leaf], list[Tensor]]
    """Leaves of one replica, and their gradients."""

BACKWARD = "the end of backward()"
"""Label of the rendezvous, for error messages."""

# ------------------------------------------------------------------ hooks on leaves


def add_accumulation_hook(leaf: Leaf) -> None:
    """Notice every gradient that arrives at a new leaf."""
    tensor = leaf.tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return  # integers never have a gradient
    wanted = tensor.requires_grad
    tensor.requires_grad_()  # torch refuses hooks on a tensor that takes no gradients
    tensor.register_post_accumulate_grad_hook(accumulation_hook(leaf))
    tensor.requires_grad_(wanted)


def accumulation_hook(leaf: Leaf) -> Callable[[Tensor], None]:
    """Return the hook to call after a gradient has arrived at the leaf."""
    reference = weakref.ref(leaf)  # the leaf keeps the tensor, and the tensor keeps the hook

    def hook(_: Tensor) -> None:
        leaf = reference()
        if leaf is not None and not (record := leaf.record).closed:  # else: used outside its run
            record.accumulated[leaf.managed] = leaf
            if not record.queued:
                _queue(record)

    return hook


def add_base_hook(leaf: Leaf) -> None:
    """Put earlier gradients aside during each pass, for a leaf whose aggregation needs it."""
    if leaf.tensor.requires_grad:
        leaf.managed.add_pre_gradient_hook(leaf, _base_hook(leaf))
        leaf.has_base_hook = True


def _base_hook(leaf: Leaf) -> Callable[[Tensor], None]:
    reference = weakref.ref(leaf)

    def hook(_: Tensor) -> None:
        leaf = reference()
        if leaf is not None and not leaf.record.closed:
            _put_base_aside(leaf, leaf.record)

    return hook


def _put_base_aside(leaf: Leaf, record: RunRecord) -> None:
    # torch.autograd.grad() calls this too but accumulates nothing: then the callback restores the base.
    if leaf.managed in record.accumulated:
        return  # a table gets several gradients in one pass: the first ones are no base
    if leaf.base is None and read_grad(leaf.tensor) is not None:
        leaf.base = leaf.managed.gradient_of(leaf)
        write_grad(leaf.tensor, None)
        record.put_aside.append(leaf)
        if not record.queued:
            _queue(record)


def _queue(record: RunRecord) -> None:
    record.queued = True
    private_api.queue_callback(lambda: _end_of_backward(record))


# ------------------------------------------------------------------ the rendezvous


def _end_of_backward(record: RunRecord) -> None:
    here = current_replica()  # None on a thread of the engine, for a device other than the CPU
    if here is not None and record.replica is not None and here is not record.replica:
        record.queued = False
        raise other_replicas_graph(here)
    if record.extra:
        _add_extra(record)
    replica, accumulated, put_aside = record.replica, record.accumulated, record.put_aside
    record.accumulated, record.put_aside, record.queued = {}, [], False
    record.arrived = len(accumulated)
    if accumulated and replica is not None:
        parameters = list(accumulated)
        _aggregate(
            replica, parameters, waits=bool(put_aside) or not _may_go_on(replica, parameters)
        )
    _restore_bases(put_aside)


def _may_go_on(replica: Replica, parameters: Sequence[ReplicatedParameter]) -> bool:
    """Return whether a replica may go on before its gradients are aggregated, until it uses one (`wait_for_gradients`).

    Not if code of the user acts on the aggregated gradients, if aggregating may raise an error, or if gradients may be
    used where no patch of ours notices it.
    """
    if replica.device.type != "cpu" or private_api.compiler_used():
        return False
    if any(managed.has_rows for managed in parameters):
        return False
    if private_api.any_has_hooks([managed.central for managed in parameters]):
        return False
    me = replica.id
    tensors = [managed.by_replica[me].tensor for managed in parameters]
    return private_api.are_plain(list(map(read_grad, tensors)))


def wait_for_gradients(replica: Replica) -> None:
    """Wait for the others at the end of the last backward pass, before the replica's code uses a gradient."""
    replica.is_ahead = False
    replica.group.wait(replica.id)


def add_to_pass(replica: Replica, found: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Add gradients of central parameters to those of the replica's leaves, at the end of this pass."""
    for central, grad in found:
        managed = cast("ReplicatedParameter", find_managed(central))
        managed.resolve()
        if grad is not None:
            run_record(replica).extra.append((managed.by_replica[replica.id], grad))


def end_pass(record: RunRecord) -> None:
    """Aggregate after a pass that reached central parameters only: the engine has not called us."""
    if record.extra:
        _end_of_backward(record)


def _add_extra(record: RunRecord) -> None:
    extra, record.extra = record.extra, []
    record.queued = True  # this is the end of the pass
    for leaf, grad in extra:
        if leaf.has_base_hook and leaf.managed not in record.accumulated:
            _put_base_aside(leaf, record)
        before = read_grad(leaf.tensor)
        own = grad.to(leaf.tensor.device)
        write_grad(leaf.tensor, own if before is None else before + own)
        record.accumulated[leaf.managed] = leaf


def other_replicas_graph(replica: Replica) -> ReplicaError:
    """Return the error for a loss that another replica computed."""
    return ReplicaError(
        f"backward() in {replica!r} reached the parameters of another replica. Replicas are threads that share Python "
        "objects: if the step keeps a tensor in an attribute (self.loss = ...), every replica writes the same one. "
        "Keep the tensor in a local variable, or call backward() in the statement after the assignment."
    )


def forget_pass(record: RunRecord) -> None:
    """Reset the record after a backward pass that failed: the engine will not call us for it."""
    put_aside = record.put_aside
    record.accumulated, record.put_aside, record.queued, record.extra = {}, [], False, []
    _restore_bases(put_aside)


def _restore_bases(leaves: Sequence[Leaf]) -> None:
    for leaf in leaves:
        if leaf.base is not None:
            write_grad(leaf.tensor, leaf.base)
            leaf.base = None


def are_aggregated(leaves: Sequence[Leaf]) -> bool:
    """Return whether these gradients are those that the last aggregation produced."""
    for leaf, grad in zip(leaves, map(read_grad, [each.tensor for each in leaves]), strict=True):
        if grad is not None and (leaf.aggregated is None or leaf.aggregated() is not grad):
            return False
    return True


def aggregate_by_hand(group: ReplicaGroup, leaves: Mapping[int, Sequence[Leaf]]) -> None:
    """Aggregate gradients that were set by hand, while all replicas wait. If one replica has one, all aggregate.

    Args:
        group: the replicas of the run.
        leaves: by replica number, the leaves whose gradients were aggregated or set.
    """
    if not all(map(are_aggregated, leaves.values())):
        used = {i: [leaf.managed for leaf in each] for i, each in leaves.items() if each}
        with torch.no_grad():
            _Aggregation(group, used).run(by_hand=True)


def _aggregate(replica: Replica, parameters: list[ReplicatedParameter], *, waits: bool) -> None:
    """Meet the other replicas; afterwards the leaves of all their parameters hold the aggregated gradients."""
    group = replica.group

    def combine(brought: list[list[ReplicatedParameter] | None]) -> list[bool]:
        with torch.no_grad():
            present = {i: each for i, each in enumerate(brought) if each is not None}
            _Aggregation(group, present).run()
        return [True] * len(brought)

    done = group.rendezvous(replica.id, BACKWARD, parameters, combine, waits=waits)
    replica.is_ahead = not done


class _Aggregation:
    """One aggregation for all replicas; runs on the thread of one of them.

    Attributes:
        present: numbers of the replicas that are here.
        live: those of them whose gradients count.
        factors: factor of each live replica's gradient.
        order: all parameters that any replica has gradients for.
    """

    def __init__(
        self, group: ReplicaGroup, brought: Mapping[int, list[ReplicatedParameter]]
    ) -> None:
        weights = group.row_weights
        self._replicas = group.replicas
        self.present = list(brought)
        self.live = [i for i in self.present if weights[i] > 0] or self.present
        self.weights = [weights[i] for i in self.live]
        first, *others = brought.values()
        self.order = first
        self._partial: Mapping[int, set[ReplicatedParameter]] = {}
        if any(each != first for each in others):
            self.order = list(dict.fromkeys(m for each in brought.values() for m in each))
            self._partial = {i: set(each) for i, each in brought.items()}
        self.factors = [1.0] * len(self.live) if self.order[0].adds_up else self.weights

    def run(self, *, by_hand: bool = False) -> None:
        """Aggregate all gradients: plain ones as lists, the others one by one."""
        for i, parameters in self._partial.items():
            unused = [each for each in self.order if each not in parameters]
            self._complete(self._replicas[i], unused, by_hand=by_hand)
        if by_hand:
            self._by_hand()
            return
        columns = self._columns(self.order)
        if columns is None:
            others = dict.fromkeys(each for each in self.order if self._columns([each]) is None)
            columns = self._columns([each for each in self.order if each not in others])
            assert columns is not None, "each of them is plain"
            for managed in others:
                found = self._gradients(managed)
                if private_api.has_hooks(managed.central):
                    self._give(managed, self._after_hooks(managed, found))
                else:
                    self._give(managed, _weighted_sum(found, self.factors, None))
        if columns[0][0]:
            self._combine_columns(columns)

    def _complete(
        self, replica: Replica, unused: Sequence[ReplicatedParameter], *, by_hand: bool
    ) -> None:
        """Join the leaves of parameters that a replica has not used and others have; put earlier gradients aside."""
        for managed in unused:
            leaf = managed.leaf_of(replica)
            if not by_hand and leaf.has_base_hook and leaf.base is None:
                leaf.base = managed.gradient_of(leaf)
                write_grad(leaf.tensor, None)

    def _columns(self, order: Sequence[ReplicatedParameter]) -> list[_Column] | None:
        """Return the leaves and gradients of each live replica; None if a parameter is not plain.

        A parameter is plain if it is no table, has no hooks, and has a dense gradient in every live replica.
        """
        centrals = [managed.central for managed in order if not managed.has_rows]
        if len(centrals) < len(order) or private_api.any_has_hooks(centrals):
            return None
        columns = []
        for i in self.live:
            leaves = [leaf for each in order if (leaf := each.by_replica.get(i)) is not None]
            grads = list(map(read_grad, [leaf.tensor for leaf in leaves]))
            if len(leaves) < len(order) or not private_api.are_plain(grads):
                return None
            columns.append((leaves, cast("list[Tensor]", grads)))
        return columns

    def _by_hand(self) -> None:
        for managed in self.order:
            leaves = [leaf for i in self.live if (leaf := managed.by_replica.get(i)) is not None]
            if not are_aggregated(leaves):
                # After an aggregation in this run, a gradient set by hand was made from the aggregated one, alike in
                # every replica: average it, which changes nothing, under "sum" too.
                again = any(leaf.aggregated_in is leaf.record for leaf in leaves)
                factors = self.weights if again else self.factors
                found = self._gradients(managed, with_graph=True)
                self._give(managed, _weighted_sum(found, factors, None))

    def _gradients(
        self, managed: ReplicatedParameter, *, with_graph: bool = False
    ) -> list[Tensor | None]:
        """Return the live replicas' gradients; refuse those of ``backward(create_graph=True)``."""
        found: list[Tensor | None] = []
        for i in self.live:
            leaf = managed.by_replica.get(i)
            grad = None if leaf is None else managed.gradient_of(leaf)
            if grad is not None and grad.requires_grad and not with_graph:
                raise _graph_ends(managed)
            found.append(grad)
        return found

    def _combine_columns(self, columns: list[_Column]) -> None:
        """Combine dense gradients in the memory of the gradients themselves.

        Not with copies on write (``torch._lazy_clone``): with them, a backward pass that accumulated into its
        gradient in each of two threads hung inside torch, and a process crashed.
        """
        for leaves, grads in columns:
            if not private_api.own_memory(grads):
                grads[:] = map(_in_own_memory, leaves, grads)
        results, *others = [grads for _, grads in columns]
        device = self._replicas[self.live[0]].device
        first, *rest = self.factors
        near = [
            each if self._replicas[i].device == device else [grad.to(device) for grad in each]
            for i, each in zip(self.live[1:], others, strict=True)
        ]
        if len(near) == 1 and first + rest[0] == 1.0:
            private_api.foreach_lerp_(results, near[0], rest[0])  # one pass over memory
        else:
            if first != 1.0:
                private_api.foreach_mul_(results, first)
            for each, factor in zip(near, rest, strict=True):
                private_api.foreach_add_(results, each, alpha=factor)
        for each in others:
            private_api.foreach_copy_(each, results)
        for leaves, grads in columns:
            for leaf, grad in zip(leaves, grads, strict=True):
                if leaf.base is None:
                    leaf.aggregated, leaf.aggregated_in = weakref.ref(grad), leaf.record
                else:
                    _mark_aggregated(leaf, grad)
        for i in self.present:
            if i not in self.live:
                for leaf, result in zip(columns[0][0], results, strict=True):
                    idle = leaf.managed.by_replica.get(i)
                    if idle is not None:
                        own = result.to(idle.tensor.device, copy=True)
                        write_grad(idle.tensor, own)
                        _mark_aggregated(idle, own)

    def _give(self, managed: ReplicatedParameter, result: Tensor | None) -> None:
        for i in self.present:
            leaf = managed.by_replica.get(i)
            if leaf is not None:
                device = managed.gradient_device(self._replicas[i])
                own = None if result is None else result.to(device, copy=i != self.present[0])
                write_grad(leaf.tensor, own)
                _mark_aggregated(leaf, own)

    def _after_hooks(
        self, managed: ReplicatedParameter, found: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Return the aggregated gradient after the hooks on the central parameter have seen it."""
        central = managed.central
        grad = _weighted_sum(found, self.factors, central.device)
        if grad is None:
            return None
        hooks, post_hooks = private_api.gradient_hooks(central)
        for hook in hooks:
            changed = hook(grad)
            grad = grad if changed is None else changed
        if not post_hooks:
            return grad
        leaves = list(managed.by_replica.values())
        base = next((leaf.base for leaf in leaves if leaf.base is not None), None)
        write_grad(central, grad if base is None else base.to(central.device) + grad)
        for post_hook in post_hooks:
            post_hook(central)
        managed.stepped()  # a hook may run an optimizer
        for leaf in leaves:
            leaf.base = None  # it is in central.grad now, or the hook removed it
        left = read_grad(central)
        return None if left is None else left.clone()


# ------------------------------------------------------------------ arithmetic


def _graph_ends(managed: ReplicatedParameter) -> ReplicaError:
    return ReplicaError(
        f"backward(create_graph=True) in a replica left a gradient with a graph on "
        f"{managed.describe()}. Gradients in .grad are aggregated over the replicas and the "
        "graph ends there, so a loss made of them would have no gradient. Use grads = "
        "torch.autograd.grad(loss, model.parameters(), create_graph=True) and, for the "
        "gradient of the whole batch, sg.get_replica_context().all_reduce('mean', grads), "
        "which is differentiable."
    )


def _in_own_memory(leaf: Leaf, grad: Tensor) -> Tensor:
    """Return the gradient, or a copy that replaces it if it shares memory with another tensor.

    Autograd passes memory on: the gradients of ``p.unsqueeze(0) + q.unsqueeze(0)`` may share memory, the gradient of
    ``p.view(-1).backward(g)`` is the caller's `g`, those of stacked parameters lie in one block.
    """
    if private_api.own_memory([grad]):
        return grad
    copy = grad.clone()
    write_grad(leaf.tensor, copy)
    return copy


def _weighted_sum(
    found: Sequence[Tensor | None], factors: Sequence[float], device: torch.device | None
) -> Tensor | None:
    """Return Σ factor · gradient over the gradients that exist; None if none does."""
    present = [(g.detach(), f) for g, f in zip(found, factors, strict=True) if g is not None]
    if not present:
        return None
    place = present[0][0].device if device is None else device
    if len({grad.layout for grad, _ in present}) > 1:
        present = [(g if g.layout is torch.strided else g.to_dense(), f) for g, f in present]
    result = present[0][0].to(place) * present[0][1]
    for grad, factor in present[1:]:
        result = torch.add(result, grad.to(place), alpha=factor)
    return result


def _mark_aggregated(leaf: Leaf, result: Tensor | None) -> None:
    """Add earlier gradients to a leaf's aggregated gradient, and remember it."""
    if leaf.base is not None:
        base, leaf.base = leaf.base, None
        if result is not None:  # torch adds sparse to dense, but not dense to sparse
            base = result + base if base.is_sparse else base + result
        write_grad(leaf.tensor, base)
    leaf.aggregated_in = leaf.record
    kept = read_grad(leaf.tensor)  # of a table: the rows of it
    leaf.aggregated = None if kept is None else weakref.ref(kept)
