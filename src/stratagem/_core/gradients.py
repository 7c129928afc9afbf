"""The replicas' gradients become one at the end of every backward pass.

The first leaf that accumulates a gradient in a backward pass asks the autograd engine for a callback at
its end; there the replicas meet, exchange their gradients, and every replica computes the same

    sum over replicas with rows of  weight * gradient        ("mean": weight = share of the rows)
    sum over replicas with rows of  gradient                 ("sum": tf.distribute's plain sum)

for its own leaf, in replica order, so that all leaves hold bit-identical gradients in tensors of their
own: clipping, scaling or logging inside the step sees what it would see on one device. A replica without
rows is left out (its gradients may be NaN), and may not come at all.

Earlier gradients (accumulation over several passes): under "mean" the weights sum to 1, so aggregating
``base + gradient`` leaves an equal base as it is; nothing needs to be kept apart. Under "sum", or when
somebody put hooks on the central parameter (they act on the aggregated gradient of this pass, once, as
on one device), the base is put aside before the pass and added back after it (`add_base_hook`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from stratagem._core.managed import RunRecord
from stratagem._core.torch_patches import private_api
from stratagem.errors import ReplicaError

if TYPE_CHECKING:
    from stratagem._core.replicas import ReplicaGroup
    from stratagem._core.replicated_parameters import Leaf, ReplicatedParameter

BACKWARD = "the end of backward()"
"""Where replicas meet; it stands in messages."""

# ------------------------------------------------------------------ noticing


def watch(leaf: Leaf) -> None:
    """Notice every gradient that arrives at a new leaf."""
    tensor = leaf.tensor
    wanted = tensor.requires_grad
    tensor.requires_grad_()  # hooks can only be put on a tensor that takes gradients
    tensor.register_post_accumulate_grad_hook(accumulation_hook(leaf))
    tensor.requires_grad_(wanted)


def accumulation_hook(leaf: Leaf) -> Callable[[Tensor], None]:
    """What is to be called when a gradient has arrived at the leaf."""
    return _hook(leaf, _accumulated)


def add_base_hook(leaf: Leaf) -> None:
    """Put earlier gradients aside during a pass, for a leaf whose aggregation needs it."""
    if leaf.tensor.requires_grad:
        leaf.managed.add_pre_gradient_hook(leaf, _hook(leaf, _put_base_aside))
        leaf.has_base_hook = True


def has_hooks(central: Tensor) -> bool:
    """Whether somebody put hooks on the central parameter; they act on the aggregated gradient."""
    return bool(central._backward_hooks or central._post_accumulate_grad_hooks)


def _hook(leaf: Leaf, call: Callable[[Leaf, RunRecord], None]) -> Callable[[Tensor], None]:
    """A hook for the leaf's tensor; weak, since the tensor keeps it and the leaf keeps the tensor."""
    reference = weakref.ref(leaf)

    def hook(_: Tensor) -> None:
        leaf = reference()
        if leaf is not None and not leaf.record.closed:  # else: used outside the run it belongs to
            call(leaf, leaf.record)

    return hook


def _accumulated(leaf: Leaf, record: RunRecord) -> None:
    record.accumulated[leaf.managed] = leaf
    if not record.queued:
        _queue(record)


def _put_base_aside(leaf: Leaf, record: RunRecord) -> None:
    # Also called for torch.autograd.grad(), which accumulates nothing: then the meeting's callback
    # finds no new gradient and only puts the base back.
    if leaf.base is None and leaf.tensor.grad is not None:
        leaf.base = leaf.managed.gradient_of(leaf)
        leaf.tensor.grad = None
        record.put_aside.append(leaf)
        if not record.queued:
            _queue(record)


def _queue(record: RunRecord) -> None:
    record.queued = True
    private_api.queue_callback(lambda: _end_of_backward(record))


# ------------------------------------------------------------------ meeting


def _end_of_backward(record: RunRecord) -> None:
    accumulated, record.accumulated = record.accumulated, {}
    put_aside, record.put_aside = record.put_aside, []
    record.queued = False
    record.arrived = len(accumulated)
    with torch.no_grad():
        if accumulated:
            offer = _Offer(accumulated)
            if offer.gradients is None:
                _refuse_graphs(record, accumulated)
            _aggregate(record.replica, offer, BACKWARD)
        for leaf in put_aside:  # torch.autograd.grad() only: see _put_base_aside
            if leaf.base is not None:
                leaf.tensor.grad, leaf.base = leaf.base, None


def _refuse_graphs(record: RunRecord, accumulated: Mapping[ReplicatedParameter, Leaf]) -> None:
    """``backward(create_graph=True)``: what the replicas agree on is not differentiable any more."""
    for managed, leaf in accumulated.items():
        grad = managed.gradient_of(leaf)
        if grad is not None and grad.requires_grad:
            raise ReplicaError(
                f"backward(create_graph=True) in {record.replica!r} left a gradient with a graph on "
                f"{managed.describe()}. Gradients in .grad are aggregated over the replicas and the "
                "graph ends there, so a loss made of them would have no gradient. Use grads = "
                "torch.autograd.grad(loss, model.parameters(), create_graph=True) and, for the "
                "gradient of the whole batch, sg.get_replica_context().all_reduce('mean', grads), "
                "which is differentiable."
            )


def forget_pass(record: RunRecord) -> None:
    """A backward pass failed: no meeting follows it, and the next pass must ask for its own."""
    record.accumulated = {}
    put_aside, record.put_aside = record.put_aside, []
    record.queued = False
    for leaf in put_aside:
        if leaf.base is not None:
            leaf.tensor.grad, leaf.base = leaf.base, None


def aggregate_by_hand(replica: Any, all_managed: Sequence[ReplicatedParameter], label: str) -> None:
    """At ``optimizer.step()``: gradients that did not come out of a meeting are aggregated now."""
    _aggregate(replica, _Offer(dict.fromkeys(all_managed)), label, by_hand=True)


class _Offer:
    """What one replica brings to the meeting.

    Attributes:
        homes: parameters it has gradients for.
        gradients: one per home, if all of them are plain: dense tensors that need no care.
    """

    __slots__ = ("all_managed", "gradients")

    def __init__(self, brought: Mapping[ReplicatedParameter, Leaf | None]) -> None:
        self.all_managed = list(brought)
        self.gradients: list[Tensor] | None = None
        gradients = []
        for managed, leaf in brought.items():
            grad = None if leaf is None else managed.gradient_of(leaf)
            if (
                grad is None
                or grad.layout is not torch.strided
                or grad.requires_grad
                or has_hooks(managed.central)
            ):
                return
            gradients.append(grad)
        self.gradients = gradients


class _Plan:
    """What the meeting came to.

    Attributes:
        settled: homes whose leaves already hold the result; the meeting itself put it there.
        dense: homes of dense gradients, combined by every replica for itself, whole lists at a time.
        rest: the others, one by one: home, gradients, a factor for each.
    """

    __slots__ = ("dense", "rest", "settled")

    def __init__(self) -> None:
        self.settled: list[ReplicatedParameter] = []
        self.dense: _Dense | None = None
        self.rest: list[tuple[ReplicatedParameter, list[Tensor], list[float]]] = []


class _Dense:
    """Homes for which every contributing replica has a dense gradient: handled as lists."""

    __slots__ = ("all_managed", "factors", "gradients")

    def __init__(
        self,
        all_managed: list[ReplicatedParameter],
        gradients: list[list[Tensor]],
        factors: list[float],
    ) -> None:
        self.all_managed = all_managed
        self.gradients = gradients  # of each contributor, in the order of homes
        self.factors = factors  # one per contributor


def _aggregate(replica: Any, offer: _Offer, label: str, *, by_hand: bool = False) -> None:
    """Replicas meet; afterwards each one's leaves of all named homes hold the aggregated gradient."""
    group = replica.group

    # The group is closed over, not asked for: the meeting may run on any replica's thread.
    def combine(brought: list[_Offer | None]) -> list[_Plan]:
        return [_plan(group, brought, by_hand=by_hand)] * len(brought)

    plan: _Plan = group.meet(replica.id, label, offer, combine)
    me = replica.id
    for managed in plan.settled:
        leaf = managed.by_replica.get(me)
        if leaf is not None:
            _take(leaf, leaf.tensor.grad)
    if plan.dense is not None:
        for managed, result in zip(
            plan.dense.all_managed, _combine_lists(plan.dense, replica.device), strict=True
        ):
            _give(managed, me, result)
    for managed, gradients, factors in plan.rest:
        _give(managed, me, _combine_one(gradients, factors, managed.gradient_device(replica)))


def _plan(group: ReplicaGroup, brought: Sequence[_Offer | None], *, by_hand: bool) -> _Plan:
    """Who computes what; gradients on one device are combined right here."""
    weights = group.row_weights
    offers = {i: offer for i, offer in enumerate(brought) if offer is not None}
    live = {i: offer for i, offer in offers.items() if weights[i] > 0} or offers
    order = _order(list(offers.values()))
    factors = [1.0 if order[0].adds_up else weights[i] for i in live]
    plan = _Plan()
    if by_hand:
        for managed in order:
            if not _settled(managed, live):
                found = [_gradient(managed, i) for i in live]
                how = [weights[i] for i in live] if _met_in_this_run(managed, live) else factors
                plan.rest.append((managed, *_present(found, how)))
        return plan
    lists = [
        each.gradients for each in live.values() if each.gradients and each.all_managed == order
    ]
    if len(lists) == len(live):  # as nearly always
        dense = _Dense(order, lists, factors)
    else:
        dense = _sort_out(plan, order, list(live), factors)
    if not dense.all_managed:
        return plan
    devices = {group.replicas[i].device for i in offers}
    if len(devices) > 1:
        plan.dense = dense
    else:
        plan.settled = dense.all_managed
        _combine_in_place(dense, offers, next(iter(live)))
    return plan


def _order(offers: Sequence[_Offer]) -> list[ReplicatedParameter]:
    """The parameters any replica brings gradients for, in one order for all."""
    first = offers[0].all_managed
    if all(offer.all_managed == first for offer in offers[1:]):
        return first
    return list(dict.fromkeys(managed for offer in offers for managed in offer.all_managed))


def _sort_out(
    plan: _Plan, order: Sequence[ReplicatedParameter], live: Sequence[int], factors: list[float]
) -> _Dense:
    """Gradients that need care go to the plan, one by one; the plain ones are returned."""
    dense = _Dense([], [[] for _ in live], factors)
    for managed in order:
        found = [_gradient(managed, i) for i in live]
        if has_hooks(managed.central):
            plan.rest.append((managed, *_after_hooks(managed, found, factors)))
        elif not all(grad is not None and _is_plain(grad) for grad in found):
            plan.rest.append((managed, *_present(found, factors)))
        else:
            dense.all_managed.append(managed)
            for each, grad in zip(dense.gradients, found, strict=True):
                each.append(cast("Tensor", grad))
    return dense


def _combine_in_place(dense: _Dense, present: Iterable[int], lead: int) -> None:
    """Σ factor · gradient in the first contributor's tensors; everybody else gets copies of them.

    Not copies on write (``torch._lazy_clone``): with them a backward pass that accumulated into its
    gradient in each of two threads hung inside torch, and a process crashed, once each.
    """
    factors, (brought, *others) = dense.factors, dense.gradients
    results = [
        grad if _has_own_memory(grad) else _move(managed, lead, grad)
        for managed, grad in zip(dense.all_managed, brought, strict=True)
    ]
    if len(others) == 1 and factors[0] + factors[1] == 1.0:
        torch._foreach_lerp_(results, others[0], factors[1])
    else:
        if factors[0] != 1.0:
            torch._foreach_mul_(results, factors[0])
        for each, factor in zip(others, factors[1:], strict=True):
            torch._foreach_add_(results, each, alpha=factor)
    for i in present:
        if i != lead:
            for managed, result in zip(dense.all_managed, results, strict=True):
                if (leaf := managed.by_replica.get(i)) is not None:
                    leaf.tensor.grad = result.clone()


def _has_own_memory(grad: Tensor) -> bool:
    """Whether nobody else sees what is written into it, and nothing else is copied with it.

    Autograd hands memory on: the gradients of ``p.unsqueeze(0) + q.unsqueeze(0)`` may be one piece of it, the
    gradient of ``p.view(-1).backward(g)`` is the caller's `g`, those of stacked parameters lie in one block.
    """
    storage = grad.untyped_storage()
    users = private_api.storage_users(storage._cdata)  # the gradient, and `storage`
    return users <= 2 and storage.nbytes() == grad.nbytes


def _move(managed: ReplicatedParameter, replica_id: int, grad: Tensor) -> Tensor:
    moved = grad.clone()
    managed.by_replica[replica_id].tensor.grad = moved
    return moved


def _gradient(managed: ReplicatedParameter, replica_id: int) -> Tensor | None:
    leaf = managed.by_replica.get(replica_id)
    return None if leaf is None else managed.gradient_of(leaf)


def _combine_lists(dense: _Dense, device: torch.device) -> Sequence[Tensor]:
    """Σ factor · gradient for whole lists, into new tensors; the same operations on every replica."""
    lists, factors = dense.gradients, dense.factors
    if len(lists) == 1 and factors[0] == 1.0:
        # The contributor takes a copy too: it goes on and may clip in place while others still read.
        return [grad.detach().to(device, copy=True) for grad in lists[0]]
    lists = [[grad.to(device, non_blocking=True) for grad in each] for each in lists]
    if len(lists) == 2 and factors[0] + factors[1] == 1.0:
        return torch._foreach_lerp(lists[0], lists[1], factors[1])  # one pass over memory
    if all(factor == 1.0 for factor in factors):
        results = torch._foreach_add(lists[0], lists[1])
        rest = zip(lists[2:], factors[2:], strict=True)
    else:
        results = torch._foreach_mul(lists[0], factors[0])
        rest = zip(lists[1:], factors[1:], strict=True)
    for each, factor in rest:
        torch._foreach_add_(results, each, alpha=factor)
    return results


def _combine_one(
    gradients: Sequence[Tensor], factors: Sequence[float], device: torch.device
) -> Tensor | None:
    """The same for one parameter: sparse gradients, or some replicas without any."""
    if not gradients:
        return None
    gradients = [grad.detach().to(device) for grad in gradients]
    if len({grad.layout for grad in gradients}) > 1:
        gradients = [
            grad if grad.layout is torch.strided else grad.to_dense() for grad in gradients
        ]
    result = gradients[0] * factors[0]
    for grad, factor in zip(gradients[1:], factors[1:], strict=True):
        result = torch.add(result, grad, alpha=factor)
    return result


def _give(managed: ReplicatedParameter, replica_id: int, result: Tensor | None) -> None:
    leaf = managed.by_replica.get(replica_id)
    if leaf is not None:
        leaf.tensor.grad = result
        _take(leaf, result)


def _take(leaf: Leaf, result: Tensor | None) -> None:
    """A leaf's gradient has become what the replicas agreed on; earlier ones are added now."""
    if leaf.base is not None:
        base, leaf.base = leaf.base, None
        if (
            result is not None
        ):  # dense + sparse, never the other way round: torch knows only the first
            base = result + base if base.is_sparse else base + result
        leaf.tensor.grad = base
    leaf.met = leaf.record
    kept = leaf.tensor.grad  # of a table: the rows of it
    leaf.aggregated = None if kept is None else weakref.ref(kept)


# ------------------------------------------------------------------ details


def _is_plain(grad: Tensor) -> bool:
    return grad.layout is torch.strided and not grad.requires_grad


def _after_hooks(
    managed: ReplicatedParameter, found: Sequence[Tensor | None], factors: Sequence[float]
) -> tuple[list[Tensor], list[float]]:
    """The aggregated gradient as the hooks on the central parameter leave it."""
    central = managed.central
    grad = _combine_one(*_present(found, factors), central.device)
    if grad is None:
        return [], []
    for hook in list((central._backward_hooks or {}).values()):
        changed = hook(grad)
        if changed is not None:
            grad = changed
    if central._post_accumulate_grad_hooks:
        leaves = list(managed.by_replica.values())
        base = next((leaf.base for leaf in leaves if leaf.base is not None), None)
        central.grad = grad if base is None else base.to(central.device) + grad
        for post_hook in list(central._post_accumulate_grad_hooks.values()):
            post_hook(central)
        for leaf in leaves:
            leaf.base = None  # it is in central.grad now, or the hook did away with it
        left: Tensor | None = central.grad
        if left is None:
            return [], []
        grad = left
    return [grad], [1.0]


def _present(
    found: Sequence[Tensor | None], factors: Sequence[float]
) -> tuple[list[Tensor], list[float]]:
    present = [(g, f) for g, f in zip(found, factors, strict=True) if g is not None]
    return [g for g, _ in present], [f for _, f in present]


def _settled(managed: ReplicatedParameter, live: Iterable[int]) -> bool:
    leaves = [leaf for i in live if (leaf := managed.by_replica.get(i)) is not None]
    return all(leaf.is_aggregated() for leaf in leaves)


def _met_in_this_run(managed: ReplicatedParameter, live: Iterable[int]) -> bool:
    # Then what was put in .grad by hand was made from the aggregated gradient, alike on every
    # replica: it is averaged (which changes nothing), also under "sum".
    leaves = [leaf for i in live if (leaf := managed.by_replica.get(i)) is not None]
    return any(leaf.met is leaf.record for leaf in leaves)
